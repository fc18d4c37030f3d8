"""The operations of each endpoint: the requests (`messages`) that a daemon and a tenant's process accept.

Results of the daemon's operations; progress is {"queued": position, "why": str} for "lease" and "resume", and {"phase":
str, "done": int, "total": int} for what moves leases:

    status                     see `warpbus.pool.broker.status`
    lease, resume              {"lease": id, "key": bytes, "gpu": "host/0", "address": str}
                               an empty address is that of the daemon that was asked
    release, suspend           {"released": id}; {"suspended": id, "seconds", "bytes"}
    migrate                    {"moved": gpu, "seconds", "pause", "bytes"}
    link                       {}; the lease's process is connected to that of the lease `to`, in a group
    checkpoints                {"checkpoints": [{"host", "name", "files", "nbytes"}]}, of all machines
    load_checkpoint            {"tensors": int, "nbytes": int}; the client then asks the lease's process for them
    drain, undrain             {"drained" | "undrained": host, "moves": int, "failed": {lease: why}}

    broker                     {"known": bool, "address": of the broker's daemon | None, "host": name}
    join                       {"end": [ids of leases that have ended in the pool]}
    forward                    the result of the operation that a client of another daemon asked for
    receive, order             {"address": str}; {"order": arguments of "receive" | None}
    send, save                 {"seconds", "pause", "bytes"}; {"seconds", "bytes"}
    end, call_off, forget      {}
    open_link                  as link
    offered, offer             as checkpoints, of one machine; as load_checkpoint
"""

from warpbus.pool.protocol.messages import Operation

COPYING_REST = "copying the rest"
"""The phase of a migration in which the lease executes nowhere. Before it the destination does not have all of it."""

_LEASE = {"lease": str}
_ORDER = {
    "lease": str,
    "key": bytes,
    "tenant": str,
    "gpu": str,
    "memory": int,
    "share": int | float,
    "migration_token": bytes | None,
    "saved": bool,
    "priority": int,
    "movable": bool,
}

DAEMON = {
    # Of clients. A tenant controls its own leases, an admin all of them; a viewer changes nothing.
    "status": Operation(role="viewer"),
    "lease": Operation(
        {"memory": int, "share": int | float},
        {"on": str | None, "near": str | None, "priority": int, "movable": bool},
    ),
    "release": Operation(_LEASE),
    "migrate": Operation({**_LEASE, "to": str}),
    "suspend": Operation(_LEASE),
    "resume": Operation({**_LEASE, "on": str | None}),
    "link": Operation({**_LEASE, "to": str, "link_key": bytes, "group": bytes, "rank": int}),
    "checkpoints": Operation(),
    "load_checkpoint": Operation({**_LEASE, "checkpoint": str}),
    "drain": Operation({"host": str}, role="admin"),
    "undrain": Operation({"host": str}, role="admin"),
    # Of other daemons, to the one with the broker.
    "broker": Operation(role="admin"),
    "join": Operation(
        {
            "host": str,
            "address": str,
            "life": str,
            "gpus": list,
            "leases": list,
            "news": list,
            "measured": list,
            "residency": dict,
            "link_memory": dict,
        },
        role="admin",
    ),
    "forward": Operation(
        {"operation": str, "arguments": dict, "tenant": str, "role": str, "address": str}, role="admin"
    ),
    # Of the one with the broker, to the others.
    "receive": Operation(_ORDER, role="admin"),
    "end": Operation({**_LEASE, "why": str}, role="admin"),
    "call_off": Operation({**_LEASE, "why": str}, role="admin"),
    "send": Operation({**_LEASE, "to": str, "migration_token": bytes}, role="admin"),
    "open_link": Operation(
        {**_LEASE, "to": str, "address": str, "link_key": bytes, "group": bytes, "rank": int}, role="admin"
    ),
    "save": Operation(_LEASE, role="admin"),
    "order": Operation(_LEASE, role="admin"),
    "forget": Operation(_LEASE, role="admin"),
    "offered": Operation(role="admin"),
    "offer": Operation({**_LEASE, "checkpoint": str}, role="admin"),
}

NEWS = {
    "lost": Operation({**_LEASE, "why": str, "arriving": bool}),
    "arrived": Operation(_LEASE),
}
"""A daemon's report of its leases in "join"."""

GPU = {
    "gpu": Operation(
        {
            "name": str,
            "host": str,
            "index": int,
            "model": str,
            "memory": int,
            "links": list,
            "oversubscribe": int | float,
        }
    )
}
"""A GPU that a daemon reports in "join"."""

RESIDENCY = {
    "residency": Operation({"leases": dict, "limit": int}),
    "lease": Operation(
        {
            "state": str,
            "since": int | float,
            "bytes": int,
            "waits": int | float | None,
            "why": str,
            "swaps": int,
            "swap_seconds": int | float,
            "last_wait": int | float | None,
        }
    ),
}
"""Where the memory of leases is that a daemon reports in "join", see `warpbus.pool.broker.status`."""

LINK_MEMORY = {"link_memory": Operation({"used": int, "limit": int, "unshared": int})}
"""What a daemon reports of the memory that its leases share in "join", see `warpbus.pool.broker.status`."""

TENANT = {
    # The first one.
    "setup": Operation(
        {
            **_ORDER,
            "name": str,
            "device": str,
            "queue_file": str | None,
            "threads": int,
            "environment": dict,
            "saved": str | None,  # the file to resume from
            "content": str | None,
            "sandbox": bool,
            "native_calls": str | None,  # where the compiled `execution.cpp` is, or will be
            "gpu_links": bool,  # links to leases on other GPUs of this machine may go from GPU to GPU
            "swapped_out": bool,  # it may not execute until "swap_in"
        }
    ),
    # With a socket: a client, whose preamble and TLS are done, or a lease of this machine, with `link_memory` too; or a
    # connection to the process to migrate to.
    "client": Operation(),
    "migrate": Operation({"to": str, "ca": str | None, "migration_token": bytes, "lease_id": bytes}),
    "suspend": Operation({"path": str}),
    # With a socket to the process of another lease: through its daemon at `address`, or directly where that is None,
    # with `link_memory`.
    "link": Operation(
        {
            "address": str | None,
            "ca": str | None,
            "link_id": bytes,
            "link_key": bytes,
            "group": bytes,
            "rank": int,
        }
    ),
    # To host memory, of which it may use so many bytes, and back; why it is out or waits is for the client.
    "swap_out": Operation({"limit": int, "why": str}),
    "swap_in": Operation(),
    "waits": Operation({"why": str}),
    # With a socket from which the files come.
    "checkpoint": Operation({"name": str, "files": int}),
    "neighbours": Operation({"count": int}),  # other leases on its GPU, where time is shared in slices
    "end": Operation({"reason": str}),
}
"""A daemon's requests to the process of a tenant; the answers are `EVENTS`."""

EVENTS = {
    "ready": Operation(),  # for clients, or for the process that the lease moves from
    "arrived": Operation(),  # the lease that moved here runs here
    # After changes, at most each second. `work` grows with each batch and question.
    "clients": Operation({"connected": int, "memory": int}, {"busy": int | float, "work": int}),
    "wanted": Operation(),  # the client has sent work, and the lease is in host memory
    "progress": Operation({"phase": str, "done": int, "total": int}),  # of a migration or suspension
    # The lease is executed here no more.
    "moved": Operation({"seconds": int | float, "pause": int | float, "bytes": int}, {"path": str}),
    "suspended": Operation({"seconds": int | float, "bytes": int}),
    "linked": Operation(),  # with the process of another lease; or "failed"
    "unshared": Operation({"group": bytes, "why": str}),  # a link to a lease of this machine has no shared memory
    "indirect": Operation({"why": str}),  # a link to a lease of this machine goes through host memory
    # It is in host memory, or in GPU memory again.
    "swapped_out": Operation({"seconds": int | float, "bytes": int}),
    "swapped_in": Operation({"seconds": int | float, "bytes": int}),
    "offered": Operation({"tensors": int, "nbytes": int}),  # a checkpoint is open; or "failed"
    "failed": Operation({"type": str, "message": str}),  # the lease goes on as before
}
"""The reports of a tenant's process to its daemon."""
