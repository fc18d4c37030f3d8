"""The broker's checks of what it is asked: hosts that are not valid, and leases that no GPU could ever hold."""

from collections.abc import Iterable, Mapping

from warpbus.cuda.memory_size import gigabytes
from warpbus.errors import UsageError
from warpbus.pool.broker.leases import Lease, Limits, PoolGpu
from warpbus.pool.broker.ledger import TOLERANCE, Ledger

MOST_OVERSUBSCRIBED = 16.0


def checked_gpus(host: str, gpus: Iterable[PoolGpu]) -> dict[str, PoolGpu]:
    """The GPUs that a host offers, by name.

    Raises:
        UsageError: names that do not fit together, a GPU without memory, or a link that leads nowhere.
    """
    listed = list(gpus)
    offered = {gpu.name: gpu for gpu in listed}
    if not host or "/" in host or host.split() != [host]:
        raise UsageError(f"host is {host!r}: give a name without spaces and slashes")
    if len(offered) < len(listed):
        raise UsageError(f"host {host} offers a GPU twice: {', '.join(gpu.name for gpu in listed)}: give each once")
    for gpu in listed:
        if (gpu.name, gpu.host) != (f"{host}/{gpu.index}", host) or gpu.index < 0:
            raise UsageError(f"host {host} offers GPU {gpu.name} of {gpu.host}: expected {host}/{gpu.index}")
        if gpu.memory <= 0:
            raise UsageError(f"{gpu.name} offers {gpu.memory} bytes: offer more than 0, or leave it out")
        if not 1 <= gpu.oversubscribe <= MOST_OVERSUBSCRIBED:
            raise UsageError(f"{gpu.name} is oversubscribed {gpu.oversubscribe}: give 1 to {MOST_OVERSUBSCRIBED:g}")
        if unknown := set(gpu.links) - set(offered):
            raise UsageError(f"{gpu.name} has links to {', '.join(sorted(unknown))}: expected GPUs of the same host")
    return offered


def no_place(ledger: Ledger, kind: str, name: str) -> UsageError:
    """The error for a GPU or a host that the pool does not have."""
    known = ", ".join(gpu.name for gpu in ledger.gpus()) or "none"
    return UsageError(f"the pool has no {kind} {name}: its GPUs are {known}: choose one of them")


def check_possible(ledger: Ledger, lease: Lease) -> None:
    """See that a GPU of the pool could hold a lease, were it empty. Hosts that are draining count.

    Raises:
        UsageError: there is no such GPU, or the places that the lease is requested for are not there.
    """
    gpus = ledger.gpus()
    if lease.on is not None and not any(lease.on in (gpu.name, gpu.host) for gpu in gpus):
        raise no_place(ledger, "GPU or host", lease.on)
    neighbour = ledger.neighbour(lease)
    # One that comes back from disk may have lost its neighbour meanwhile.
    if lease.near is not None and lease.state == "queued" and (neighbour is None or neighbour.tenant != lease.tenant):
        raise UsageError(f"near: tenant {lease.tenant} has no lease {lease.near}: give the id of one")
    suiting = [gpu for gpu in gpus if ledger.suits(lease, gpu)]
    if any(gpu.memory >= lease.quota.memory for gpu in suiting):
        return
    wishes = (("on", lease.on), ("near", lease.near))
    where = "".join(f" {how} {place}" for how, place in wishes if place is not None)
    if not suiting:
        what = f"there is no GPU{where}: choose another place" if where else "it has no GPU: let a host join first"
        raise UsageError(f"the pool cannot hold a lease of {lease.quota}: {what}")
    largest = max(suiting, key=lambda gpu: gpu.memory)
    raise UsageError(
        f"no GPU of the pool{where} can hold a lease of {lease.quota}: the largest, {largest.name}, has "
        f"{gigabytes(largest.memory)}: ask for that at most"
    )


def check_limits(ledger: Ledger, lease: Lease, limits: Mapping[str, Limits]) -> None:
    """See that a tenant may have one lease more.

    Raises:
        UsageError: it would have more than its limits (or those of "*") allow; the message says what is left.
    """
    own = _limits_of(lease.tenant, limits)
    if own.priority is not None and lease.priority > own.priority:
        raise UsageError(
            f"tenant {lease.tenant} asks for priority {lease.priority}, but may have {own.priority} at most: ask for it"
        )
    living = [each for each in ledger.leases.values() if each.tenant == lease.tenant and each.id != lease.id]
    memory, share = _counted(living)
    if own.memory is not None and memory + lease.quota.memory > own.memory:
        left = f"{gigabytes(own.memory)} of memory, of which {gigabytes(max(0, own.memory - memory))} is left"
    elif own.share is not None and share + lease.quota.share > own.share + TOLERANCE:
        left = f"a share of {own.share:.2f}, of which {max(0.0, own.share - share):.2f} is left"
    elif own.leases is not None and len(living) >= own.leases:
        left = f"{own.leases} leases, and has {len(living)}"
    else:
        return
    raise UsageError(
        f"tenant {lease.tenant} asks for {lease.quota}, but may have {left}: ask for less, or release a lease"
    )


def left_of_limits(ledger: Ledger, tenant: str, limits: Mapping[str, Limits]) -> dict[str, int | float | None]:
    """What a tenant's limits leave for one lease more: "memory" in bytes and "share"; None where there is no limit."""
    own = _limits_of(tenant, limits)
    memory, share = _counted(each for each in ledger.leases.values() if each.tenant == tenant)
    return {
        "memory": None if own.memory is None else max(0, own.memory - memory),
        "share": None if own.share is None else max(0.0, round(own.share - share, 6)),
    }


def _limits_of(tenant: str, limits: Mapping[str, Limits]) -> Limits:
    return limits.get(tenant) or limits.get("*") or Limits()


def _counted(leases: Iterable[Lease]) -> tuple[int, float]:
    """Memory and share of leases, without those that are suspended."""
    quotas = [each.quota for each in leases if each.state != "suspended"]
    return sum(quota.memory for quota in quotas), sum(quota.share for quota in quotas)
