"""Imports Ray (extra `cluster`) on demand and connects to a Ray cluster."""

import importlib
from typing import Any

from warpbus.errors import UsageError


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
        True if this call made the connection; then the caller has to call `ray.shutdown`.

    Raises:
        UsageError: there is no cluster.
    """
    if ray.is_initialized():
        return False
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(f"cluster {address}: {first}: give auto on a machine of it, or ray://HOST:PORT") from error
    return True
