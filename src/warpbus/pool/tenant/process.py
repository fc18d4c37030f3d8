"""The process of one lease: sets the lease up, enters the sandbox and serves the lease until the daemon ends it."""

import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

from warpbus.dist.interpreters import permanent_objects
from warpbus.errors import ConnectionLostError, DeviceError, ProtocolError, WarpbusError
from warpbus.pool.protocol import process_messages
from warpbus.pool.protocol.geometry import contiguous
from warpbus.pool.protocol.inference import infer
from warpbus.pool.protocol.operations import TENANT
from warpbus.pool.protocol.signature import Input, Signature
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.content import ContentStore
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.native_calls import NativeCallsLoader
from warpbus.pool.tenant.sandbox import limit_memory, seal
from warpbus.pool.tenant.server import TenantServer
from warpbus.pool.tenant.storages import allowance
from warpbus.pool.tenant.suspension import resume


def _warm() -> None:
    """Make PyTorch import its meta kernels, which takes a second or more, before a lease needs them."""
    x = contiguous(torch.float32, (2,))
    with permanent_objects():
        infer(Signature("aten::native_layer_norm", (Input(0), (2,), Input(1), None, 1e-5), (), (x, x), ()))


def main(descriptor: int) -> NoReturn:
    """The main function of the process.

    Args:
        descriptor: of its end of the socket pair that `tenant_processes` tells of.
    """
    end = socket.socket(fileno=descriptor)
    code = 0
    try:
        _warm()
        (_, setup), _ = process_messages.receive(end, {"setup": TENANT["setup"]})
        tenant = _set_up(end, setup)
        if tenant is None:
            code = 1
        else:
            tenant.serve()
            tenant.executor.settle()
    except ConnectionLostError:
        pass  # the daemon is gone
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: nothing is left to save, and the driver takes a GPU's memory back faster than Python would.
    os._exit(code)


def _set_up(end: socket.socket, setup: dict[str, Any]) -> TenantServer | None:
    """Set up the lease. If that fails, send the reason to the daemon and return None."""
    try:
        os.environ.update(setup["environment"])
        if setup["gpu_links"]:
            # Streams that wait for other GPUs (`device_link`) must not share a hardware queue; the default is 8 queues.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.set_num_threads(setup["threads"])
        device = torch.device(setup["device"])
        if device.type == "cpu":
            limit_memory(setup["memory"] + allowance(setup["memory"]))
        else:
            wanted = setup["environment"].get("CUDA_VISIBLE_DEVICES", "")
            _check_gpu(device, wanted, sandboxed=setup["sandbox"])
        content = None if setup["content"] is None else ContentStore(Path(setup["content"]), setup["memory"])
        quota = Quota(setup["memory"], setup["share"])
        loader = NativeCallsLoader(None if setup["native_calls"] is None else Path(setup["native_calls"]))
        executor = Executor(device, quota, content, gpu_links=setup["gpu_links"], native=loader.load())
        if setup["saved"] is not None:
            resume(Path(setup["saved"]), executor)
        if setup["sandbox"]:
            seal(gpu=device.type == "cuda")
        return TenantServer(end, setup, executor, loader)
    except (WarpbusError, RuntimeError, KeyError) as error:  # torch's are RuntimeErrors
        kind = type(error).__name__ if isinstance(error, WarpbusError) else "DeviceError"
        process_messages.send(end, "failed", {"type": kind, "message": str(error).partition("\n")[0]})
        return None


def _check_gpu(device: torch.device, wanted: str, *, sandboxed: bool) -> None:
    """Check that this process sees the GPU of that UUID: whatever has asked the driver for GPUs before the environment
    was set would have made it see all.

    Raises:
        DeviceError: it sees none.
        ProtocolError: it sees another one.
    """
    try:
        uuid = torch.cuda.get_device_properties(device).uuid
    except RuntimeError as error:
        advice = "see whether other programs can use it"
        if sandboxed:
            advice += "; if so, its driver may need what the sandbox denies: try warpbus pool serve --no-sandbox"
        why = str(error).partition("\n")[0]
        raise DeviceError(f"the lease's process cannot use its GPU ({why}): {advice}") from None
    found = f"GPU-{uuid}"
    if wanted.startswith("GPU-") and found != wanted:
        raise ProtocolError(f"the lease's process got {found}, and was to get {wanted}: start another")
