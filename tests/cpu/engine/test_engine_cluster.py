"""Services and replicas whose processes Ray starts on the nodes of a cluster."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from test_engine_replicas import added, collect, process, states, with_replicas
from test_engine_service import SLOW, Counted, Counting, params, tokens, with_service
from test_engine_service import collect as answer_of
from test_engine_service_faults import until

from warpbus.dist import Group, cluster
from warpbus.engine import replicas as replicas_module
from warpbus.engine.options import ReplicaOptions, ServiceOptions
from warpbus.engine.replicas import ReplicaSet
from warpbus.engine.scaling import QueueScaling
from warpbus.engine.service import Service
from warpbus.errors import EngineDiedError
from warpbus.models import Progress


def test_processes_of_a_cluster_answer(two_nodes: str) -> None:
    async def test(service: Service) -> None:
        prompts = [[10] * (1 + index) for index in range(20)]
        answers = await asyncio.gather(*(answer_of(service, prompt, 5) for prompt in prompts))
        assert answers == [(tokens(5, prompt), "length") for prompt in prompts]

    with_service(test, tensor_parallel=2, cluster=two_nodes)


def test_replicas_on_two_nodes_of_a_cluster(two_nodes: str) -> None:
    """Each has a node. One dies, and is started again on its node, while the other goes on."""

    async def test(replicas: ReplicaSet) -> None:
        prompts = [[10] * (1 + index) for index in range(20)]
        answers = await asyncio.gather(*[collect(replicas, prompt, 5) for prompt in prompts])
        assert answers == [tokens(5, prompt) for prompt in prompts]
        assert min(await added(replicas)) > 0
        streams = [replicas.generate([SLOW, *[30 + index] * 64], params(900)) for index in (0, 1)]
        for stream in streams:
            await anext(stream)
        os.kill(await process(replicas, 0), signal.SIGKILL)
        with pytest.raises(EngineDiedError, match=r"process 0 on node [\d.]+ of cluster"):
            async for _ in streams[0]:
                pass
        assert [piece async for piece in streams[1]][-1].finish_reason == "length"
        await until(lambda: states(replicas) == ["ready", "ready"])
        assert await collect(replicas, [11], 3) == tokens(3, [11])
        assert ray.is_initialized()

    connected = ray.is_initialized()  # by tests before
    with_replicas(test, cluster=two_nodes, copies=ReplicaOptions(replicas=2))
    asyncio.run(until(lambda: ray.is_initialized() == connected))


class Queueing(Counting):
    """Runs one request, the others wait."""

    def stats(self) -> Counted:
        found = super().stats()
        return replace(found, running=min(1, found.running), waiting=max(0, found.running - 1))


def queueing(model: Path, options: ServiceOptions, group: Group, progress: Progress) -> Counting:
    return Queueing(group)


def test_the_queue_starts_a_replica_and_idleness_drains_it(two_nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "_SECONDS_BETWEEN_LOOKS", 0.05)
    scaling = QueueScaling(1, 2, max_num_seqs=1, until_more=0.1, until_fewer=0.1)

    async def test(replicas: ReplicaSet) -> None:
        assert list(replicas.replicas) == [0]
        waiting = [replicas.generate([SLOW, 7], params(1000)) for _ in range(3)]
        await until(lambda: list(replicas.replicas) == [0, 1])
        assert replicas.health.state == "ready"
        assert await collect(replicas, [9] * 64, 3) == tokens(3, [0] * 64)  # by the new one, which has fewer tokens
        assert (await replicas.replicas[1].stats()).added == 1
        for answer in waiting:
            await answer.aclose()
        await until(lambda: len(replicas.replicas) == 1)
        assert await collect(replicas, [10], 3) == tokens(3, [10])

    with_replicas(
        test, cluster=two_nodes, load=queueing, copies=ReplicaOptions(min_replicas=1, max_replicas=2), scaling=scaling
    )


def test_a_cluster_that_is_full_changes_nothing(
    two_nodes: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicas_module, "_SECONDS_BETWEEN_LOOKS", 0.05)

    async def test(replicas: ReplicaSet) -> None:
        monkeypatch.setattr(cluster, "_SECONDS_FOR_RESOURCES", 1)  # only now: a busy machine starts replicas slowly
        waiting = [replicas.generate([SLOW, 7], params(1000)) for _ in range(6)]
        await until(lambda: "the job needs 1 CPU cores, the cluster has 2" in caplog.text)
        assert "the number of replicas could not be changed" in caplog.text
        assert states(replicas) == ["ready", "ready"]
        for answer in waiting:
            assert [piece async for piece in answer][-1].finish_reason == "length"

    with_replicas(
        test,
        cluster=two_nodes,
        load=queueing,
        copies=ReplicaOptions(replicas=2, max_replicas=3),
        scaling=QueueScaling(2, 3, max_num_seqs=1, until_more=0.1),
    )
