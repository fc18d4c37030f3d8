"""A lease moves between processes on two GPUs, through a socket and from GPU to GPU, and computes the same as one that
stayed."""

import gc
import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "cpu" / "pool"))
from pool_migration_work import ask, contents, execute, lease

from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.wire import decode
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.migration_destination import ENDS, DestinationState, MigrationDestination
from warpbus.pool.tenant.migration_source import MigrationSource
from warpbus.pool.tenant.transport import memory_exporter

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

QUOTA = Quota(4 * 2**30, 1.0)
LARGE, LARGE_BYTES = 500, 2**30 + 12_345  # a storage beside those that the batches make
TOKEN = b"t" * 32
BATCHES = 40


def digest(executor: Executor) -> str:
    found = hashlib.sha256()
    for handle, data in sorted(contents(executor).items()):
        found.update(handle.to_bytes(8, "little") + data)
    return found.hexdigest()


def begun(device: torch.device, batches: int) -> Executor:
    executor = lease(device, QUOTA)
    executor.storages.create(LARGE, LARGE_BYTES)
    with torch.inference_mode():
        executor.storages.raw(LARGE).random_(generator=torch.Generator(device).manual_seed(3))
    executor.storages.written(LARGE)
    for number in range(1, batches + 1):
        execute(executor, number)
    return executor


def destination(path: str, device: str) -> None:
    """The other process: takes the lease, goes on with it, and prints the digest of what it has then."""
    there = lease(torch.device(device), QUOTA)
    waiting = MigrationDestination(there, migration_token=TOKEN)
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(path)
    channel = Channel(connected)
    hello = channel.receive(60.0)
    assert hello is not None
    waiting.admit(channel, decode(hello.payload))  # type: ignore[arg-type]
    while waiting.step(60.0) not in ENDS:
        pass
    assert waiting.state is DestinationState.LIVING, waiting.reason
    for number in range(there.executed + 1, BATCHES + 1):
        execute(there, number)
    print(digest(there))


@pytest.mark.parametrize(
    ("visible", "directly"),
    [("both", True), ("its own", True), ("both", False)],
    ids=["GPU to GPU", "GPU to GPU, the destination sees its own alone", "sockets"],
)
def test_a_lease_moves_to_another_gpu(tmp_path: Path, visible: str, directly: bool) -> None:
    gc.collect()  # executors of earlier tests, whose memory counts against this process's quota
    path = str(tmp_path / "socket")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    environment = dict(os.environ)
    if visible == "its own":
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        environment["CUDA_VISIBLE_DEVICES"] = names[1]
    child = subprocess.Popen(
        [sys.executable, __file__, path, "cuda:0" if visible == "its own" else "cuda:1"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    here = begun(torch.device("cuda:0"), 20)
    channel = Channel(listening.accept()[0])
    source = MigrationSource(
        here, channel, migration_token=TOKEN, shared=memory_exporter if directly else lambda _: None
    )
    ask(source)
    while not source.copy_ahead().stop_reason:
        if here.executed < 30:
            execute(here, here.executed + 1)
    report = source.finish()
    answer = child.communicate(timeout=120)[0].split()
    print(f"{visible} visible: {report}")
    assert report.confirmed
    assert report.ahead >= LARGE_BYTES
    assert report.path == ("GPU to GPU" if directly else "sockets")
    assert child.returncode == 0
    del here, source
    gc.collect()
    assert answer == [digest(begun(torch.device("cuda:0"), BATCHES))]


if __name__ == "__main__":
    destination(*sys.argv[1:])
