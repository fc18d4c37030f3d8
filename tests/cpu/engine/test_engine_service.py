"""The service: every request ends, with its answer or with a clear error, whatever happens to it or to the engine."""

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

import warpbus.demo
from warpbus.dist import Group
from warpbus.engine.answer import merge
from warpbus.engine.messages import Abort, Add, Ask, Command, Event, Ready, Reply, StepResults, Stop
from warpbus.engine.options import ServiceOptions
from warpbus.engine.placement import devices_of
from warpbus.engine.plan import MemoryPlan
from warpbus.engine.sampling_params import Grammar, SamplingParams
from warpbus.engine.sequence import Sequence, TextPiece, TokenLogprob
from warpbus.engine.service import Service
from warpbus.engine.serving_process import serve
from warpbus.errors import (
    CheckpointError,
    ConflictError,
    ContextLengthError,
    DeviceError,
    EngineDiedError,
    NumericError,
    QueueFullError,
    UnavailableError,
    UsageError,
    WarpbusError,
)
from warpbus.models import Progress

POET = Path(warpbus.demo.__file__).parent / "glm-poet"
CONTEXT = 1024
PLAN = MemoryPlan("GPU", {"layers": 5 * 10**9}, 6 * 10**9, CONTEXT, CONTEXT, "auto", None, False, 512)
# A prompt that begins with one of these does more than to be continued.
REFUSED, FATAL, KILLED, SLOW, BROKEN, FAILING = 3, 4, 5, 6, 7, 8


@dataclass(frozen=True)
class Counted:
    """The fake's `Stats`."""

    process: int
    running: int
    added: int
    aborted: int
    asleep: bool
    shrunk: int
    blocks: int = 64
    waiting: int = 0


class Counting:
    """A model that counts: after a prompt of n tokens come the tokens n, n + 1, ..., with whatever text they have."""

    max_model_len = CONTEXT
    plan = PLAN

    def __init__(self, group: Group) -> None:
        self._group = group
        self._running: list[Sequence] = []
        self._added = self._aborted = self._shrunk = 0
        self._asleep = False

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def add(self, sequence: Sequence) -> None:
        assert not self._asleep
        if sequence.prompt[0] == REFUSED:
            raise UsageError("this prompt is refused: give another")
        if sequence.prompt[0] == BROKEN:
            raise RuntimeError("a surprise")
        self._running.append(sequence)
        self._added += 1

    def abort(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._aborted += 1

    def step(self) -> list[tuple[Sequence, TextPiece]]:
        pieces = []
        for sequence in self._running:
            match sequence.prompt[0]:
                case x if x == FATAL:
                    raise NumericError("layer 3: the scores are NaN: give another model")
                case x if x == KILLED and self._group.rank == self._group.world - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                case x if x == SLOW:
                    time.sleep(0.002)
        for sequence, length in zip(self._running, self._lengths(), strict=True):
            before = len(sequence.text)
            if sequence.prompt[0] == FAILING and len(sequence.token_ids) == 3:
                sequence.fail(NumericError("the scores of this request are NaN: give another adapter"))
                pieces.append((sequence, TextPiece("", (), None, None, 1)))
                continue
            sequence.append(10 + length % 200)
            piece = TextPiece(sequence.text[before:], (sequence.token_ids[-1],), None, sequence.finish_reason, 1)
            pieces.append((sequence, piece))
        self._running = [sequence for sequence in self._running if not sequence.ended]
        return pieces

    def _lengths(self) -> list[int]:
        """Each process has a share of a length, and they have to agree on the order of the sequences."""
        group = self._group
        lengths = torch.tensor([len(sequence.prompt) + len(sequence.token_ids) for sequence in self._running])
        return group.sum(lengths // group.world + (lengths % group.world > group.rank)).tolist()

    def stats(self) -> Counted:
        return Counted(os.getpid(), len(self._running), self._added, self._aborted, self._asleep, self._shrunk)

    def shrink(self, *, keep: bool = True) -> None:
        assert not self._asleep
        assert keep or not self.has_work
        self._shrunk += 1 if keep else 100

    def save(self) -> None:
        pass

    def sleep(self) -> None:
        assert not self.has_work
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False


def counting(model: Path, options: ServiceOptions, group: Group, progress: Progress) -> Counting:
    assert model == POET
    assert group.device == torch.device("cpu")
    assert group.world == options.tensor_parallel
    for done in range(1001):
        progress(done, 1000)
    return Counting(group)


def broken(model: Path, options: ServiceOptions, group: Group, progress: Progress) -> Counting:
    raise DeviceError("cuda:0: out of memory for the weights: give a smaller model")


def tokens(count: int, prompt: list[int]) -> tuple[int, ...]:
    return tuple(10 + (len(prompt) + index) % 200 for index in range(count))


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, temperature=0)


async def collect(service: Service, prompt: list[int], count: int) -> tuple[tuple[int, ...], str | None]:
    got: tuple[int, ...] = ()
    reason = None
    async with service.generate(prompt, params(count)) as answer:
        async for piece in answer:
            assert reason is None
            got += piece.token_ids
            reason = piece.finish_reason
        times = answer.times
    assert reason is not None
    assert times.first_token is not None
    assert times.finished is not None
    assert times.arrived <= times.first_token <= times.finished
    assert (times.prompt_tokens, times.output_tokens, times.cached_tokens) == (len(prompt), len(got), 1)
    return got, reason


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


async def start(**options: object) -> Service:
    return await Service.start(POET, ServiceOptions(device="cpu", **options), load=counting)


def with_service(test: Callable[[Service], Awaitable[None]], **options: object) -> None:
    async def run() -> None:
        others = psutil.Process().children()
        service = await start(**options)
        try:
            await asyncio.wait_for(test(service), 300)
        finally:
            await service.close()
        assert service.pending == 0
        assert psutil.Process().children() == others

    asyncio.run(run())


@pytest.fixture(scope="module")
def lasting() -> Iterator[tuple[asyncio.Runner, Service]]:
    """A service for the tests that leave it as it was."""
    with asyncio.Runner() as runner:
        service = runner.run(start(max_num_seqs=8, max_queue=5000))
        yield runner, service
        runner.run(service.close(drain=1.0))
    assert service.health.state == "closed"
    assert service.health.restarts == 0


def test_thousands_of_requests_end_and_those_that_leave_are_aborted(lasting: tuple[asyncio.Runner, Service]) -> None:
    runner, service = lasting
    draw = random.Random(0)

    async def one(index: int) -> int:
        prompt = [10 + index % 7] * (1 + index % 50)
        count = draw.randint(1, 40)
        stay = count if draw.random() < 0.6 else draw.randint(0, count)
        got: tuple[int, ...] = ()
        answer = service.generate(prompt, params(count))
        if stay == 0:
            await asyncio.sleep(draw.random() * 0.02)
            return 0
        async for piece in answer:
            got += piece.token_ids
            if len(got) >= stay:
                break
        assert got == tokens(len(got), prompt)
        assert len(got) >= stay
        if draw.random() < 0.5:
            await answer.aclose()
        return len(got)

    async def run() -> None:
        before = await service.stats()
        done = await asyncio.gather(*(one(index) for index in range(3000)))
        assert len(done) == 3000
        await until(lambda: service.pending == 0)
        after = await service.stats()
        assert after.running == 0
        assert after.added - before.added == 3000
        assert 0 < after.aborted - before.aborted < 1500

    runner.run(run())


def test_the_plan_of_the_memory_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test(service: Service) -> None:
        assert await collect(service, [10], 1)

    with caplog.at_level(logging.INFO, "warpbus.engine"):
        with_service(test)
    (logged,) = (each.getMessage() for each in caplog.records if "memory plan" in each.getMessage())
    assert logged == f"{POET}: memory plan\n{PLAN}"


def test_an_answer_is_whole_and_timed(lasting: tuple[asyncio.Runner, Service]) -> None:
    runner, service = lasting
    prompt = service.template.render([{"role": "user", "content": "春"}])
    assert runner.run(collect(service, prompt, 20)) == (tokens(20, prompt), "length")
    # What does not fit the context is cut.
    assert runner.run(collect(service, [10] * (CONTEXT - 3), 20)) == (tokens(3, [10] * (CONTEXT - 3)), "length")


def test_pieces_that_wait_are_merged(lasting: tuple[asyncio.Runner, Service]) -> None:
    runner, service = lasting

    async def run() -> None:
        whole = [piece async for piece in service.generate([10], params(500))]
        async with service.generate([10], params(500)) as answer:
            await until(lambda: answer.times.finished is not None)
            merged = [piece async for piece in answer]
        assert len(merged) == 1
        assert merged[0] == merge(whole)
        assert merged[0].token_ids == tokens(500, [10])
        assert len(merged[0].text) > 100

    runner.run(run())


class Scripted:
    """A `JobPipe` that delivers scripted commands."""

    def __init__(self, *heard: list[list[Command]]) -> None:
        self._heard = list(heard)
        self.waits: list[float | None] = []
        self.said: list[Event] = []

    def __call__(self, content: list[Event], /) -> None:
        self.said += content

    def heard(self, timeout: float | None) -> list[list[Command]]:
        self.waits.append(timeout)
        return self._heard.pop(0)

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_an_engine_shrinks_where_nothing_is_heard_unless_it_sleeps() -> None:
    line = Scripted(
        [[Add(0, [10], params(2))], [Abort(7), Ask(1, "sleep")]],  # sleep waits until the request has ended
        [],
        [],
        [[Ask(2, "wake")]],
        [],
        [[Ask(3, "stats")]],
        [[Stop()]],
    )
    serve(Group(0, 1, torch.device("cpu")), line, counting, POET, ServiceOptions(), 1000, frozenset([2]))
    after_loading = line.said[line.said.index(Ready(CONTEXT, PLAN)) + 1 :]
    assert [type(event) for event in after_loading] == [StepResults, StepResults, Reply, Reply, Reply]
    slept, woken, reported = (event for event in after_loading if isinstance(event, Reply))
    assert (slept.number, woken.number, reported.number) == (1, 2, 3)
    assert reported.answer.shrunk == 1
    assert line.waits == [300.0, 0.0, 300.0, 300.0, 300.0, 300.0, 300.0]


def test_logprobs_are_merged_too() -> None:
    one, two = TokenLogprob(1, -0.5, ()), TokenLogprob(2, -1.0, ((3, -0.5),))
    first, last = TextPiece("a", (1,), (one,), None, 5), TextPiece("b", (2,), (two,), "stop", 5)
    assert merge([first, last]) == TextPiece("ab", (1, 2), (one, two), "stop", 5)


def test_giving_up_a_wait_loses_nothing(lasting: tuple[asyncio.Runner, Service]) -> None:
    runner, service = lasting

    async def run() -> None:
        got: tuple[int, ...] = ()
        async with service.generate([SLOW], params(30)) as answer:
            while len(got) < 30:
                try:
                    piece = await asyncio.wait_for(anext(answer), 0.001)
                except TimeoutError:
                    continue
                got += piece.token_ids
            with pytest.raises(StopAsyncIteration):
                await anext(answer)
        assert got == tokens(30, [SLOW])

    runner.run(run())


def test_a_request_that_is_refused_leaves_the_others_alone(lasting: tuple[asyncio.Runner, Service]) -> None:
    runner, service = lasting

    async def run() -> None:
        other = asyncio.ensure_future(collect(service, [10], 300))
        with pytest.raises(UsageError, match=r"^regex cannot be used"):
            await anext(service.generate([10], SamplingParams(grammar=Grammar("regex", "("))))
        answer = service.generate([REFUSED, 10], params(3))
        with pytest.raises(UsageError, match=r"^this prompt is refused: give another$"):
            await anext(answer)
        with pytest.raises(StopAsyncIteration):
            await anext(answer)
        assert await other == (tokens(300, [10]), "length")

    runner.run(run())


def test_a_request_that_fails_midway_leaves_the_others_alone(lasting: tuple[asyncio.Runner, Service]) -> None:
    runner, service = lasting

    async def run() -> None:
        process = (await service.stats()).process
        others = [asyncio.ensure_future(collect(service, [SLOW], 300)) for _ in range(3)]
        failing = service.generate([FAILING], params(30))
        got: tuple[int, ...] = ()

        async def read() -> None:
            nonlocal got
            async for piece in failing:
                got += piece.token_ids

        with pytest.raises(NumericError, match=r"^the scores of this request are NaN: give another adapter$"):
            await read()
        assert got == tokens(3, [FAILING])
        with pytest.raises(StopAsyncIteration):
            await anext(failing)
        # What is nobody's error of ours: the engine's process logs where it came from.
        with pytest.raises(WarpbusError, match=r"cannot handle this request \(RuntimeError: a surprise\)"):
            await anext(service.generate([BROKEN], params(3)))
        assert await asyncio.gather(*others) == [(tokens(300, [SLOW]), "length")] * 3
        assert ((await service.stats()).process, service.health.restarts) == (process, 0)

    runner.run(run())


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], UsageError, "^the prompt is empty"),
        ([10, -1], UsageError, "token id -1: the vocabulary has 0 to"),
        ([10**6], UsageError, "token id 1000000: the vocabulary has 0 to"),
        ([10] * CONTEXT, ContextLengthError, "^the prompt has 1,024 tokens, the context holds 1,024 with the answer"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_at_once(
    lasting: tuple[asyncio.Runner, Service], prompt: list[int], error: type[Exception], message: str
) -> None:
    runner, service = lasting

    async def run() -> None:
        with pytest.raises(error, match=message):
            service.generate(prompt, params(1))
        assert service.pending == 0

    runner.run(run())


def test_sleep_wants_a_pause_and_requests_a_model_that_is_awake(lasting: tuple[asyncio.Runner, Service]) -> None:
    runner, service = lasting

    async def run() -> None:
        answer = service.generate([SLOW], params(1000))
        with pytest.raises(ConflictError, match="1 requests run or wait"):
            await service.sleep()
        await answer.aclose()
        await until(lambda: service.pending == 0)
        await service.sleep()
        await service.sleep()
        assert (await service.stats()).asleep
        with pytest.raises(ConflictError, match="sleeps: wake it"):
            await service.reset_prefix_cache()
        assert (service.alive, service.health.state) == (True, "asleep")
        with pytest.raises(UnavailableError, match="asleep: wake it"):
            service.generate([10], params(1))
        await service.wake()
        await service.wake()
        assert not (await service.stats()).asleep
        assert await collect(service, [10], 2) == (tokens(2, [10]), "length")

    runner.run(run())


def test_the_prefix_cache_is_emptied_between_requests(lasting: tuple[asyncio.Runner, Service]) -> None:
    runner, service = lasting

    async def run() -> None:
        answer = service.generate([SLOW], params(1000))
        with pytest.raises(ConflictError, match="1 requests run or wait"):
            await service.reset_prefix_cache()
        await answer.aclose()
        await until(lambda: service.pending == 0)
        before = (await service.stats()).shrunk
        await service.reset_prefix_cache()
        assert (await service.stats()).shrunk >= before + 100

    runner.run(run())


def test_a_queue_that_is_full_says_when_to_come_back() -> None:
    async def test(service: Service) -> None:
        fill = [service.generate([SLOW], params(1000)) for _ in range(5)]
        with pytest.raises(QueueFullError, match=r"^5 requests run or wait already: try again in 5 s$") as raised:
            service.generate([10], params(1))
        assert raised.value.retry_after == 5.0
        await asyncio.gather(*(answer.aclose() for answer in fill[1:]))
        await until(lambda: service.pending == 1)
        for _ in range(20):
            await collect(service, [10], 1)
        fill += [service.generate([SLOW], params(1000)) for _ in range(4)]
        with pytest.raises(QueueFullError) as raised:
            service.generate([10], params(1))
        assert raised.value.retry_after == 1.0
        # Those that still wait end, with a clear reason, when the service does.
        await service.close(drain=0.05)
        with pytest.raises(UnavailableError, match=r"was closed, and this request not done within 0\.05 s"):
            [piece async for piece in fill[-1]]
        with pytest.raises(UnavailableError, match="takes no more requests"):
            service.generate([10], params(1))

    with_service(test, max_num_seqs=2, max_queue=3)


def test_an_engine_that_dies_ends_its_requests_and_is_started_again() -> None:
    async def test(service: Service) -> None:
        first = await service.stats()
        running = [service.generate([SLOW], params(1000)) for _ in range(20)]
        await anext(running[0])
        asked = asyncio.ensure_future(service.stats())
        os.kill(first.process, signal.SIGSTOP)  # so that the question finds no answer
        await asyncio.sleep(0)
        os.kill(first.process, signal.SIGKILL)
        said = r"^the engine died: process 0 on cpu was killed by signal 9 \(SIGKILL\); it is being restarted: send"
        for answer in running:
            with pytest.raises(EngineDiedError, match=said):
                async for _ in answer:
                    pass
        with pytest.raises(EngineDiedError, match=said):
            await asked
        assert not service.alive
        assert service.health.state == "restarting"
        with pytest.raises(EngineDiedError, match=said):
            service.generate([10], params(1))
        await until(lambda: service.alive)
        assert (await service.stats()).process != first.process
        assert await collect(service, [10], 30) == (tokens(30, [10]), "length")
        # The second death, by an error of all, is one too many.
        with pytest.raises(EngineDiedError, match=r"the scores are NaN.* given up after 1 restarts in a row"):
            await collect(service, [FATAL], 3)
        assert service.health.state == "failed"
        assert service.health.restarts == 1

    with_service(test, max_restarts=1)


def test_loading_is_reported_and_close_lets_requests_finish() -> None:
    async def run() -> None:
        seen: list[tuple[int, int]] = []
        service = await Service.start(
            POET, ServiceOptions(device="cpu"), load=counting, progress=lambda done, total: seen.append((done, total))
        )
        assert (seen[0], seen[-1], len(seen)) == ((0, 1000), (1000, 1000), 201)
        running = asyncio.ensure_future(collect(service, [SLOW], 50))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(service.close(drain=30.0))
        await asyncio.sleep(0)
        assert (service.alive, service.health.state) == (False, "closing")
        with pytest.raises(UnavailableError, match="is being closed: it takes no more requests"):
            service.generate([10], params(1))
        assert await running == (tokens(50, [SLOW]), "length")
        await closing
        assert service.health.state == "closed"

    asyncio.run(run())


def test_two_processes_step_alike_and_die_together() -> None:
    async def test(service: Service) -> None:
        prompts = [[10] * (1 + index) for index in range(200)]  # together more than one exchange holds
        answers = await asyncio.gather(*(collect(service, prompt, 5) for prompt in prompts))
        assert answers == [(tokens(5, prompt), "length") for prompt in prompts]
        await service.sleep()
        await service.wake()
        other = service.generate([SLOW], params(1000))
        with pytest.raises(EngineDiedError, match=r"process 1 on cpu was killed by signal 9 .* given up after 0"):
            await collect(service, [KILLED], 3)
        with pytest.raises(EngineDiedError):
            async for _ in other:
                pass

    with_service(test, tensor_parallel=2, max_restarts=0)


def test_what_keeps_an_engine_from_starting_is_raised(tmp_path: Path) -> None:
    async def run() -> None:
        others = psutil.Process().children()
        with pytest.raises(CheckpointError):
            await Service.start(tmp_path / "nothing", load=broken)
        with pytest.raises(UsageError, match=r"^max_model_len is 9,999,999: give 2 to"):
            await Service.start(POET, ServiceOptions(max_model_len=9_999_999), load=broken)
        with pytest.raises(DeviceError, match=r"^cuda:0: out of memory for the weights: give a smaller model$"):
            await Service.start(POET, ServiceOptions(device="cpu"), load=broken)
        await until(lambda: psutil.Process().children() == others)

    asyncio.run(run())


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0},
        {"max_queue": -1},
        {"tensor_parallel": 0},
        {"speculation": True},
        {"speculation": 1025},
        {"dtype": "float12"},
        {"cache_tokens": 63},
        {"cache_tokens": 100, "max_model_len": 101},
    ],
)
def test_options_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(options))} is "):
        ServiceOptions(**options)


def test_a_memory_plans_the_cache_too() -> None:
    with pytest.raises(UsageError, match="leave out either memory or cache_tokens"):
        ServiceOptions(memory="6GB", cache_tokens=4096)


def test_devices_of_the_options() -> None:
    assert devices_of(ServiceOptions(device="cpu", tensor_parallel=3)) == [torch.device("cpu")] * 3
    assert devices_of(ServiceOptions(cluster="auto", tensor_parallel=2)) == [torch.device("cuda")] * 2
    with pytest.raises(UsageError, match=r"^device cuda:1: on a cluster give auto or cuda"):
        devices_of(ServiceOptions(device="cuda:1", cluster="auto"))
    with pytest.raises(UsageError, match=r"^device is 'tpu'"):
        devices_of(ServiceOptions(device="tpu"))
