"""Imports Ray (extra `cluster`) on demand and connects to a Ray cluster."""

import ctypes
import importlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from warpbus.errors import UsageError

_SIGACTION_BYTES = 256  # more than any platform's struct sigaction has

_lock = threading.Lock()
_users = 0  # of the connection that `connect` has made


def load_ray() -> Any:
    """The module `ray`. Importing it takes about a second.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UsageError("a cluster needs Ray: pip install 'warpbus[cluster]' on each of its machines") from error


def connect(ray: Any, address: str) -> bool:
    """Connect this process to a cluster, unless it is connected already.

    Args:
        ray: the module.
        address: "auto", the cluster that this machine belongs to, or "ray://HOST:PORT".

    Returns:
        True if the connection is ours; then the caller has to call `disconnect`. Jobs in several threads share it.

    Raises:
        UsageError: there is no cluster.
    """
    global _users
    with _lock:
        if ray.is_initialized():
            _users += _users > 0
            return _users > 0
        try:
            with _same_sigterm():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            first = str(error).strip().splitlines()[0]
            raise UsageError(f"cluster {address}: {first}: give auto on a machine of it, or ray://HOST:PORT") from error
        _users = 1
        return True


@contextmanager
def _same_sigterm() -> Iterator[None]:
    """Keep the process's handler of SIGTERM: the core of Ray replaces it by one that prints a stack first.

    It does so beneath Python and in any thread, where `signal.signal` cannot put the handler back.
    """
    library = ctypes.CDLL(None, use_errno=True)
    before = ctypes.create_string_buffer(_SIGACTION_BYTES)
    if library.sigaction(signal.SIGTERM, None, before) != 0:
        raise OSError(ctypes.get_errno(), "sigaction")
    try:
        yield
    finally:
        library.sigaction(signal.SIGTERM, before, None)


def disconnect(ray: Any) -> None:
    """End a use of the connection that `connect` has made, and the connection with its last use."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            ray.shutdown()
