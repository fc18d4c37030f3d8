"""Imports Ray (extra `cluster`) on demand and connects to a Ray cluster."""

import importlib
import threading
from typing import Any

from warpbus.errors import UsageError

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
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            first = str(error).strip().splitlines()[0]
            raise UsageError(f"cluster {address}: {first}: give auto on a machine of it, or ray://HOST:PORT") from error
        _users = 1
        return True


def disconnect(ray: Any) -> None:
    """End a use of the connection that `connect` has made, and the connection with its last use."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            ray.shutdown()
