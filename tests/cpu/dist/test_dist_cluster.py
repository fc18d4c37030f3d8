"""A job over a Ray cluster: two nodes on this machine, one core each."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch

from warpbus.dist import Group, Send, TreeSum, cluster, ray_cluster
from warpbus.dist.cluster import ClusterProcesses
from warpbus.errors import DeviceError, NumericError, UsageError


def run_on_cluster(function: Callable[..., None], argument: object, **options: Any) -> None:
    with ClusterProcesses(function, **options) as started:
        started.run(argument)


@pytest.fixture
def address(two_nodes: str) -> str:
    return two_nodes


def add_up(group: Group, send: Send, scale: torch.Tensor) -> None:
    for number in range(20):
        send((group.rank, number))
    total = TreeSum(group, (3,))
    for share in group.shares():
        total.add(share, scale + share)
    send((group.rank, group.world, str(group.device), total.total().tolist()))
    send((group.rank, ray.get_runtime_context().get_node_id()))


def end(group: Group, send: Send, how: str) -> None:
    if group.rank == 1 and how == "numeric":
        raise NumericError("layer 3, o: NaN: give other data")
    if group.rank == 1 and how == "fault":
        raise IndexError("no such row")
    if group.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    group.gather(torch.zeros(1))
    group.gather(torch.zeros(1))


def all_is_free() -> bool:
    """Whether what the job held is given back; Ray takes a moment for it."""
    end = time.monotonic() + 90
    while ray.available_resources().get("CPU") != 2 and time.monotonic() < end:
        time.sleep(0.1)
    return ray.available_resources().get("CPU") == 2


def test_both_nodes_work_and_messages_arrive(address: str) -> None:
    got: list[tuple[object, ...]] = []
    run_on_cluster(add_up, torch.ones(3), processes=2, address=address, gpus=False, receive=got.append)
    assert not ray.is_initialized()  # as it was before
    for rank in range(2):
        said = [message[1:] for message in got if message[0] == rank]
        assert said[:20] == [(number,) for number in range(20)]
        assert said[20] == (2, "cpu", [36.0] * 3)
    assert len({message[1] for message in got if len(message) == 2 and isinstance(message[1], str)}) == 2


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("numeric", NumericError, "layer 3, o: NaN: give other data"),
        ("killed", DeviceError, r"process 1 on node [\d.]+ of cluster .* died, or its machine did: .* run it again"),
        ("fault", DeviceError, r"process 1 on node [\d.]+ of cluster .* stopped at IndexError: no such row: run it"),
    ],
)
def test_a_process_that_fails_ends_the_job(
    address: str, how: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "fault":
        monkeypatch.setattr(cluster, "_SECONDS_FOR_THE_CAUSE", 0.5)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    with pytest.raises(error, match=f"^{message}"):
        run_on_cluster(end, how, processes=2, address=address, gpus=False, receive=print)
    assert all_is_free()  # nothing of the job is left


def test_too_few_cores(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_SECONDS_FOR_RESOURCES", 1)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    with pytest.raises(DeviceError, match="the job needs 3 CPU cores, the cluster has 2, of which 2 are free"):
        run_on_cluster(end, "", processes=3, address=address, gpus=False, receive=print)
    with pytest.raises(DeviceError, match="the job needs 1 GPUs, the cluster has 0"):
        run_on_cluster(end, "", processes=1, address=address, gpus=True, receive=print)
    assert all_is_free()


def test_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(**settings: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nMore about it")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", nobody)
    with pytest.raises(UsageError, match=r"^cluster auto: Could not find any running Ray instance\.: give auto on"):
        run_on_cluster(end, "", processes=2, address="auto", gpus=False, receive=print)


def test_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"a cluster needs Ray: pip install 'warpbus\[cluster\]'"):
        run_on_cluster(end, "", processes=2, address="auto", gpus=False, receive=print)


def test_a_connection_keeps_the_handler_of_sigterm(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The core of Ray puts one of its own beneath Python's, also in a thread, which prints a stack first."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        thread = threading.Thread(target=ray_cluster.connect, args=(ray, address))
        thread.start()
        thread.join()
        assert ray.is_initialized()
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 90
        while not got and time.monotonic() < end:
            time.sleep(0.01)
        assert got == [signal.SIGTERM]
        assert "SIGTERM" not in capfd.readouterr().err
    finally:
        ray_cluster.disconnect(ray)
        signal.signal(signal.SIGTERM, before)
