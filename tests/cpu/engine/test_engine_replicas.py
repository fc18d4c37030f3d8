"""A set of replicas: requests go where their prefix is, dead replicas come back, and the others continue."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import torch
from test_engine_service import KILLED, POET, SLOW, Counting, broken, counting, params, tokens
from test_engine_service_faults import until

from warpbus.dist import Group
from warpbus.engine.messages import LoadEngine
from warpbus.engine.options import ReplicaOptions, ServiceOptions
from warpbus.engine.placement import replica_devices
from warpbus.engine.replicas import ReplicaSet, start_service
from warpbus.engine.scaling import QueueScaling
from warpbus.engine.service import Service
from warpbus.errors import (
    CheckpointError,
    ConflictError,
    DeviceError,
    EngineDiedError,
    QueueFullError,
    UnavailableError,
    UsageError,
)
from warpbus.models import Progress


def with_replicas(
    test: Callable[[ReplicaSet], Awaitable[None]],
    count: int = 2,
    load: LoadEngine = counting,
    copies: ReplicaOptions | None = None,
    scaling: QueueScaling | None = None,
    **options: object,
) -> None:
    async def run() -> None:
        others = psutil.Process().children()
        replicas = await ReplicaSet.start(
            POET,
            ServiceOptions(device="cpu", **options),
            copies or ReplicaOptions(count),
            load=load,
            scaling=scaling,
        )
        try:
            await asyncio.wait_for(test(replicas), 300)
        finally:
            await replicas.close()
        assert replicas.pending == 0
        assert replicas.health.state == "closed"
        assert psutil.Process().children() == others

    asyncio.run(run())


async def collect(replicas: ReplicaSet, prompt: list[int], count: int) -> tuple[int, ...]:
    return tuple([token async for piece in replicas.generate(prompt, params(count)) for token in piece.token_ids])


async def added(replicas: ReplicaSet) -> list[int]:
    return [(await replica.stats()).added for replica in replicas.replicas.values()]


async def process(replicas: ReplicaSet, number: int) -> int:
    found: int = (await replicas.replicas[number].stats()).process
    return found


def states(replicas: ReplicaSet) -> list[str]:
    return [replica.health.state for replica in replicas.replicas.values()]


def test_requests_are_spread_and_follow_their_prefix() -> None:
    async def test(replicas: ReplicaSet) -> None:
        prompts = [[20 + index] * 64 for index in range(4)]
        await asyncio.gather(*[collect(replicas, prompt, 5) for prompt in prompts])
        assert await added(replicas) == [2, 2]
        for _ in range(3):
            assert await collect(replicas, [*prompts[2], 9], 5) == tokens(5, [0] * 65)
        assert await added(replicas) == [5, 2]
        await collect(replicas, [*prompts[3], 9], 5)
        assert await added(replicas) == [5, 3]
        # Another salt shares no prefix, so the request goes to the replica whose last one is older.
        async for _ in replicas.generate(prompts[3], params(1), cache_salt=b"b"):
            pass
        assert await added(replicas) == [6, 3]

    with_replicas(test)


def test_loading_and_devices() -> None:
    seen: list[tuple[int, int]] = []

    async def run() -> None:
        replicas = await ReplicaSet.start(
            POET,
            ServiceOptions(device="cpu"),
            ReplicaOptions(2),
            progress=lambda done, total: seen.append((done, total)),
            load=counting,
        )
        processes = {await process(replicas, number) for number in (0, 1)}
        assert len(processes) == 2
        assert replicas.tokenizer is replicas.replicas[0].tokenizer is replicas.replicas[1].tokenizer
        with pytest.raises(UsageError, match="has 2 replicas"):
            await replicas.move("cuda:1")
        await replicas.close()

    asyncio.run(run())
    assert seen[-1] == (2000, 2000)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    with pytest.raises(UsageError, match="data_parallel is 0"):
        ReplicaOptions(0)
    placed = replica_devices(ServiceOptions(device="cpu", tensor_parallel=2), 3)
    assert [[str(device) for device in each] for each in placed] == [["cpu", "cpu"]] * 3


def test_gpus_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpbus.engine.placement.resolve_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    placed = replica_devices(ServiceOptions(tensor_parallel=2), 2)
    assert [[str(device) for device in each] for each in placed] == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    with pytest.raises(DeviceError, match="tensor_parallel is 2, data_parallel 3: torch sees 4"):
        replica_devices(ServiceOptions(tensor_parallel=2), 3)
    with pytest.raises(UsageError, match="cannot share one GPU"):
        replica_devices(ServiceOptions(device="cuda:1"), 2)


def test_a_start_that_fails_leaves_no_process() -> None:
    async def run() -> None:
        others = psutil.Process().children()
        with pytest.raises(DeviceError, match="out of memory for the weights"):
            await ReplicaSet.start(POET, ServiceOptions(device="cpu"), ReplicaOptions(2), load=broken)
        assert psutil.Process().children() == others

    asyncio.run(run())


def test_a_dead_replica_comes_back_and_the_others_go_on() -> None:
    async def test(replicas: ReplicaSet) -> None:
        # Both replicas have a request that has begun.
        streams = [replicas.generate([SLOW, *[30 + index] * 64], params(900)) for index in (0, 1)]
        for stream in streams:
            await anext(stream)
        os.kill(await process(replicas, 0), signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="killed by signal 9"):
            async for _ in streams[0]:
                pass
        assert states(replicas)[1] == "ready"
        assert replicas.health.state == "ready"
        assert replicas.alive
        assert await collect(replicas, [10], 3) == tokens(3, [10])  # by the other one
        rest = [piece async for piece in streams[1]]
        assert rest[-1].finish_reason == "length"
        await until(lambda: states(replicas) == ["ready", "ready"])
        assert replicas.health.restarts == 1
        # Its cache is empty: the prompt it had goes to the one whose last request is older, which is itself.
        assert await collect(replicas, [11], 3) == tokens(3, [11])

    with_replicas(test)


class Silent(Counting):
    """Takes requests that begin with SLOW, and gives them no token."""

    def step(self):  # type: ignore[no-untyped-def]
        kept = [sequence for sequence in self._running if sequence.prompt[0] == SLOW]
        self._running = [sequence for sequence in self._running if sequence.prompt[0] != SLOW]
        pieces = super().step() if self._running else []
        self._running += kept
        return pieces


def silent(model: Path, options: ServiceOptions, group: Group, progress: Progress) -> Counting:
    """The first replica is silent: the one that has no file beside it yet."""
    mark = Path(os.environ["REPLICA_MARK"])
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return Counting(group)
    return Silent(group)


def test_a_request_without_a_token_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICA_MARK", str(tmp_path / "mark"))

    async def test(replicas: ReplicaSet) -> None:
        waiting = [asyncio.ensure_future(collect(replicas, [SLOW, 7, index], 4)) for index in range(4)]
        await until(lambda: replicas.pending == 2)  # those of the silent one
        (number,) = [number for number, replica in replicas.replicas.items() if replica.pending]
        os.kill(await process(replicas, number), signal.SIGKILL)
        assert await asyncio.gather(*waiting) == [tokens(4, [0] * 3)] * 4

    with_replicas(test, load=silent)


def test_a_request_that_kills_engines_is_sent_again_once() -> None:
    async def test(replicas: ReplicaSet) -> None:
        with pytest.raises(EngineDiedError, match="killed by signal 9"):
            await collect(replicas, [KILLED], 3)
        assert sorted(states(replicas)) == ["ready", "restarting", "restarting"]
        assert await collect(replicas, [10], 3) == tokens(3, [10])

    with_replicas(test, count=3)


def test_all_dead_and_queues_that_are_full() -> None:
    async def test(replicas: ReplicaSet) -> None:
        running = [replicas.generate([SLOW], params(900)) for _ in range(4)]
        with pytest.raises(QueueFullError):
            replicas.generate([10], params(1))
        for number in (0, 1):
            os.kill(await process(replicas, number), signal.SIGKILL)
        await until(lambda: "ready" not in states(replicas))
        assert replicas.health.state == "restarting"
        assert replicas.health.reason.startswith("replica 0: the engine died: ")
        assert "; replica 1: the engine died: " in replicas.health.reason
        with pytest.raises(EngineDiedError, match="being restarted") as refused:
            replicas.generate([10], params(1))
        assert refused.value.retry_after == 5.0
        for one in running:
            with pytest.raises(EngineDiedError):
                async for _ in one:
                    pass

    with_replicas(test, max_num_seqs=1, max_queue=1)


def test_sleep_is_of_all_or_none() -> None:
    async def test(replicas: ReplicaSet) -> None:
        running = replicas.generate([SLOW], params(900))
        with pytest.raises(ConflictError, match="requests run or wait"):
            await replicas.sleep()
        assert states(replicas) == ["ready", "ready"]
        await running.aclose()
        await until(lambda: replicas.pending == 0)
        await replicas.sleep()
        assert states(replicas) == ["asleep", "asleep"]
        assert replicas.health.state == "asleep"
        with pytest.raises(UnavailableError, match="asleep"):
            replicas.generate([10], params(1))
        await replicas.wake()
        assert await collect(replicas, [10], 3) == tokens(3, [10])

    with_replicas(test)


def test_the_prefix_caches_of_all_are_emptied() -> None:
    async def test(replicas: ReplicaSet) -> None:
        await collect(replicas, [10], 3)
        await replicas.reset_prefix_cache()
        for replica in replicas.replicas.values():
            assert (await replica.stats()).shrunk >= 100

    with_replicas(test)


def test_adapters_are_loaded_by_all_or_none(tiny_glm: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    four = str(adapters["four"])

    async def say(replicas: ReplicaSet, adapter: str | None) -> list[int]:
        answer = replicas.generate([5, 6, 7], params(4), adapter)
        return [token async for piece in answer for token in piece.token_ids]

    async def test() -> None:
        replicas = await ReplicaSet.start(tiny_glm, ServiceOptions(device="cpu"), ReplicaOptions(2))
        with pytest.raises(CheckpointError):
            await replicas.load_adapter("four", str(tmp_path))
        with pytest.raises(UsageError, match="no adapter 'four'"):
            replicas.generate([5], params(1), "four")
        await replicas.load_adapter("four", four)
        with pytest.raises(UsageError, match="already"):
            await replicas.load_adapter("four", four)
        found = [await say(replicas, "four") for _ in range(4)]
        assert found == [found[0]] * 4 != [await say(replicas, None)] * 4
        assert all([(await replica.stats()).prefix_queries for replica in replicas.replicas.values()])
        # One replica cannot drop it: the other one has it again.
        running = replicas.generate([5], params(300), "four")
        with pytest.raises(ConflictError, match="requests use the adapter"):
            await replicas.unload_adapter("four")
        assert [replica.options.adapters for replica in replicas.replicas.values()] == [(("four", four),)] * 2
        await running.aclose()
        await until(lambda: replicas.pending == 0)
        await replicas.unload_adapter("four")
        with pytest.raises(UsageError, match="no adapter 'four'"):
            await replicas.unload_adapter("four")
        await replicas.close()

    asyncio.run(test())


def test_close_drains_all() -> None:
    async def run() -> None:
        replicas = await ReplicaSet.start(POET, ServiceOptions(device="cpu"), ReplicaOptions(2), load=counting)
        running = [asyncio.ensure_future(collect(replicas, [SLOW, index], 300)) for index in range(6)]
        await until(lambda: replicas.pending == 6)
        await replicas.close(drain=120)
        assert await asyncio.gather(*running) == [tokens(300, [0] * 2)] * 6

    asyncio.run(run())


def test_what_needs_a_cluster_or_must_not_have_one() -> None:
    async def run(cluster: str | None, **copies: int) -> None:
        await start_service(POET, ServiceOptions(device="cpu", cluster=cluster), ReplicaOptions(**copies))

    with pytest.raises(UsageError, match="are for a cluster"):
        asyncio.run(run(None, replicas=2))
    with pytest.raises(UsageError, match="are for a cluster"):
        asyncio.run(run(None, replicas=1))
    with pytest.raises(UsageError, match="with cluster=auto give replicas=2"):
        asyncio.run(run("auto", data_parallel=2))


def test_one_replica_is_a_service() -> None:
    async def run() -> None:
        service = await start_service(POET, ServiceOptions(device="cpu", max_model_len=64), ReplicaOptions())
        assert isinstance(service, Service)
        assert service.replicas == {0: service}
        await service.close()

    asyncio.run(run())
