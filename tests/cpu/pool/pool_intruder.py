"""A lease's process that somebody has taken over: it tries what it must not be able to do, and tells its client.

It enters and seals its sandbox as `warpbus.pool.tenant.process` does. What it tries it on is in its environment.
"""

import ctypes
import json
import os
import queue
import socket
import sys
import tempfile
import threading
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def _system_call(number: int, *arguments: object) -> None:
    if _libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _spawn() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)


def _fork() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def _control_the_pool(path: str) -> None:
    """Ask the daemon at the socket that this user can open."""
    from warpbus.pool.protocol.channel import Channel
    from warpbus.pool.protocol.frames import PROTOCOL, Kind
    from warpbus.pool.protocol.preamble import CONTROL, MAGIC
    from warpbus.pool.protocol.wire import encode

    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    sock.sendall(MAGIC + CONTROL)
    channel = Channel(sock)
    channel.send(Kind.HELLO, 0, encode({"protocol": PROTOCOL, "token": None}))
    assert channel.receive(90).kind is Kind.WELCOME
    channel.close()


def _tries(facts: dict) -> dict:
    parent, port = os.getppid(), facts["port"]
    memory = (ctypes.c_uint64 * 2)()
    return {
        **{f"read {path}": lambda path=path: Path(path).read_bytes() for path in facts["secrets"]},
        **{f"list {path}": lambda path=path: os.listdir(path) for path in facts["directories"]},
        **{f"write {path}": lambda path=path: Path(path, "planted").write_text("x") for path in facts["directories"]},
        "connect by TCP": lambda: socket.create_connection(("127.0.0.1", port)).close(),
        "listen at TCP": lambda: socket.create_server(("127.0.0.1", 0)).close(),
        "make a UDP socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
        "make a Unix socket": lambda: socket.socket(socket.AF_UNIX).close(),
        "control the pool": lambda: _control_the_pool(facts["unix"]),
        "start a program": _spawn,
        "fork": _fork,
        "signal the daemon": lambda: os.kill(parent, 0),
        "read the daemon's environment": lambda: Path(f"/proc/{parent}/environ").read_bytes(),
        **(
            {
                "read the daemon's memory": lambda: os.close(os.open(f"/proc/{parent}/mem", os.O_RDONLY)),
                "replace itself": lambda: os.execv("/bin/true", ["true"]),
                "trace the daemon": lambda: _system_call(101, 16, parent, 0, 0),
                "copy the daemon's memory": lambda: _system_call(310, parent, memory, 1, memory, 1, 0),
                "make a namespace": lambda: _system_call(272, 0x10000000),
                "use io_uring": lambda: _system_call(425, 1, (ctypes.c_char * 120)()),
                "load a BPF program": lambda: _system_call(321, 0, (ctypes.c_char * 120)(), 120),
            }
            if facts["all"] and os.uname().machine == "x86_64"
            else {}
        ),
    }


def _outcome(attempt: object) -> str:
    try:
        attempt()
    except PermissionError:
        return "PermissionError"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def main(descriptor: int) -> None:
    """Serve one lease: its client hears what came of each attempt, and of those of a thread that was there before."""
    import pool_fake_tenant

    sys.modules.setdefault("torch", pool_fake_tenant._Torch("torch"))
    from warpbus.pool.protocol import process_messages
    from warpbus.pool.protocol.channel import Channel
    from warpbus.pool.protocol.frames import Kind
    from warpbus.pool.protocol.operations import TENANT
    from warpbus.pool.protocol.wire import encode
    from warpbus.pool.tenant.sandbox import seal

    facts = json.loads(os.environ["INTRUDER"])
    work: queue.Queue = queue.Queue()
    done: queue.Queue = queue.Queue()

    def early() -> None:
        attempt = work.get()
        done.put(_outcome(attempt))

    threading.Thread(target=early, daemon=True).start()
    end = socket.socket(fileno=descriptor)
    try:
        (_, setup), _ = process_messages.receive(end, TENANT)
    except RuntimeError:  # it was a spare one
        return
    if setup["sandbox"]:
        seal(gpu=False)
    found = {name: _outcome(attempt) for name, attempt in _tries(facts).items()}
    work.put(_fork)
    found["fork in another thread"] = done.get()
    with tempfile.TemporaryFile() as file:  # what it may do
        file.write(b"x")
    thread = threading.Thread(target=sum, args=([1, 2],))
    thread.start()
    thread.join()
    os.kill(os.getpid(), 0)
    process_messages.send(end, "ready", {})
    kept = []
    while True:
        try:
            (operation, _), descriptors = process_messages.receive(end, TENANT)
        except RuntimeError:
            os._exit(0)
        if operation == "client":
            channel = Channel(socket.socket(fileno=descriptors[0]))
            channel.receive(90)
            channel.send(Kind.WELCOME, 0, encode(found))
            kept.append(channel)
        elif operation == "end":
            os._exit(0)
