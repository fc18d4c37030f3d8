"""`pool`: what a GPU costs that is reached over a pool, how shares are kept, and how long a move stops its client."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from warpbus.bench.cases import Benchmark, Plot, Progress, Result, Run, Task
from warpbus.bench.options import PoolBenchOptions
from warpbus.bench.pool_plot import WAIT, pool_figure, pool_finding
from warpbus.bench.pool_processes import (
    ClientLocation,
    connected,
    daemon,
    do,
    echo,
    gpu_memory,
    link,
    tenants,
    why_no_links,
)
from warpbus.bench.pool_training import SMALL_GPT, GptShape
from warpbus.bench.records import Parameter
from warpbus.bench.report import say
from warpbus.bench.serving import SMALL
from warpbus.errors import DeviceError, PoolError, UsageError
from warpbus.models import SHAPES

PARTS = ("operators", "transfers", "training", "decode", "links", "shares", "migration", "swapping")
"""The measurements, by name."""

TARGET_US = 15.0
"""Microseconds of the client's CPU that an operator may cost."""

LOOPBACK = "loopback"
_EACH, _RECORDED = "each operator", "one message"  # how a training step is sent
_SHARES = (0.25, 0.75)
_ALONE = 2  # times that each tenant is measured while the other one rests
_OF_A_GPU = 0.6  # what leases that do not fit together have of its memory
_TURN, _TURNS = 1.0, 16  # seconds of a time slice, and slices that are measured


@dataclass(frozen=True)
class PoolEffort:
    """How much is measured.

    Attributes:
        rounds: of each case; more of it go first and are not counted.
        nbytes: of an upload or download.
        gpts, steps: the trained models, the first over links too, and steps per round.
        shape, scheme, prompt, tokens: of the model that decodes.
        side, seconds: matrices that tenants multiply, and for how long each time.
        states: bytes that are moved.
        memory: of a tenant that multiplies.
        moves: of each state, to and fro.
    """

    rounds: int
    nbytes: int
    gpts: tuple[GptShape, ...]
    steps: int
    shape: str
    scheme: str
    prompt: int
    tokens: int
    side: int
    seconds: float
    states: tuple[int, ...]
    memory: int
    moves: int


FULL = PoolEffort(
    rounds=5,
    nbytes=256 << 20,
    gpts=(GptShape(), GptShape(context=1024, batch=32)),
    steps=10,
    shape="chatglm2-6b",
    scheme="w4a16-g128",
    prompt=128,
    tokens=128,
    side=8192,
    seconds=1.0,
    states=(64 << 20, 256 << 20, 1 << 30, 4 << 30),
    memory=2 * 10**9,
    moves=3,
)
QUICK = replace(FULL, rounds=2, gpts=FULL.gpts[:1], steps=5, tokens=32, states=(64 << 20, 1 << 30), moves=2)
LITTLE = PoolEffort(
    rounds=3,
    nbytes=32 << 20,
    gpts=(SMALL_GPT,),
    steps=5,
    shape=SMALL,
    scheme="w4a16-g128",
    prompt=32,
    tokens=16,
    side=512,
    seconds=1.0,
    states=(16 << 20, 64 << 20, 256 << 20),
    memory=10**8,
    moves=3,
)
"""On the CPU."""


def pool_benchmark(work: PoolBenchOptions, progress: Progress = lambda what, done, total: None) -> Benchmark:
    """The benchmark of some work; `progress` is called for each case.

    Raises:
        UsageError: a part or shape that there is not.
    """
    for part in work.parts:
        if part not in PARTS:
            raise UsageError(f"--part {part}: there is no such part: choose among {', '.join(PARTS)}")
    if work.shape not in (None, SMALL, *SHAPES):
        raise UsageError(f"--shape {work.shape}: there is no such shape: choose among {SMALL}, {', '.join(SHAPES)}")
    return Benchmark(
        "pool",
        "A GPU that is reached over a pool, beside this machine's own",
        lambda run: _cases(run, work, progress),
        Plot(x=None, figure=pool_figure, finding=pool_finding),
        takes=(),
    )


def _cases(run: Run, work: PoolBenchOptions, progress: Progress) -> list[Task]:
    effort = (QUICK if run.quick else FULL) if run.on_gpu else LITTLE
    measured = _PoolMeasurements(run, replace(effort, shape=work.shape or effort.shape), work)
    steps: dict[str, Callable[[], list[Result]]] = {
        "operators": measured.operators,
        "transfers": measured.transfers,
        "training": measured.training,
        "decode": measured.decode,
        "links": measured.links,
        "shares": measured.shares,
        "migration": measured.migration,
        "swapping": measured.swapping,
    }
    wanted = [name for name in PARTS if not work.parts or name in work.parts]

    def one(place: int, name: str) -> list[Result]:
        progress(name, place, len(wanted))
        found = steps[name]()
        progress(name, place + 1, len(wanted))
        return [replace(row, parameters={"part": name, **row.parameters}) for row in found]

    return [partial(one, place, name) for place, name in enumerate(wanted)]


class _PoolMeasurements:
    """Each method measures a part and gives its rows."""

    def __init__(self, run: Run, effort: PoolEffort, work: PoolBenchOptions) -> None:
        self.run, self.effort, self.work = run, effort, work
        self.here = f"torch on {'this GPU' if run.on_gpu else 'this CPU'}"

    @contextmanager
    def on_loopback(self, *flags: str) -> Iterator[ClientLocation]:
        """A daemon on this machine."""
        with daemon("--spare", "1", *flags) as address:
            yield ClientLocation(address)

    def operators(self) -> list[Result]:
        """The cost for the client of an operator whose result it does not read, and of a read."""
        with self.on_loopback() as place, echo() as port:
            found = do("operators", place, device=str(self.run.device), rounds=self.effort.rounds)
            plain = do("transfers", place, nbytes=1 << 20, rounds=self.effort.rounds, echo=port)["echo"]
        rows = [
            _row(
                {"of": "operator", "operator": name},
                ("time", "us"),
                _scaled(seconds, 1e6),
                (self.here, torch.__version__, _scaled(found["local"][name], 1e6)),
                ("the target", "of the client's CPU time", [TARGET_US]),
            )
            for name, seconds in found["remote"].items()
        ]
        read = ("8 bytes and back over TCP", "loopback", _scaled(plain, 1e6))
        return [*rows, _row({"of": "read", "link": LOOPBACK}, ("time", "us"), _scaled(found["read"], 1e6), read)]

    def transfers(self) -> list[Result]:
        """Bytes a second of large tensors."""
        with self.on_loopback() as place, echo() as port:
            found = do("transfers", place, nbytes=self.effort.nbytes, rounds=self.effort.rounds, echo=port)
        plain = ("the same bytes over TCP", "loopback", self._rate(found["socket"]))
        return [self._transfer(name, LOOPBACK, found[name], plain) for name in ("upload", "upload again", "download")]

    def _transfer(
        self,
        of: str,
        where: str,
        seconds: Sequence[float],
        peer: tuple[str, str, Sequence[float]],
        floor: float | None = None,
    ) -> Result:
        case: dict[str, Parameter] = {"of": of, "link": where, "megabytes": self.effort.nbytes >> 20}
        return _row(case, ("bandwidth", "GB/s"), self._rate(seconds), peer, floor=floor)

    def _rate(self, seconds: Sequence[float]) -> list[float]:
        return [self.effort.nbytes / each / 1e9 for each in seconds]

    def training(self) -> list[Result]:
        """A training step, and what it sends: of few tokens, which programs are bound by, and of many."""
        rows: list[Result] = []
        for gpt in self.effort.gpts:
            try:
                with self.on_loopback() as place:
                    found = self._train(place, str(self.run.device), gpt)
                with self.on_loopback() as place:
                    recorded = self._train(place, str(self.run.device), gpt, recorded=True)
            except (DeviceError, PoolError) as error:
                if gpt is self.effort.gpts[0]:
                    raise
                self.run.note(f"training steps of {_tokens(gpt)} tokens were left out: {error}")
            else:
                rows += self._trained(found, recorded, gpt)
        return rows

    def _trained(self, found: Mapping[str, Any], recorded: Mapping[str, Any], gpt: GptShape) -> list[Result]:
        counted = found["counted"]
        tokens = 8.0 * gpt.batch * (gpt.context + 1)
        self.run.note(
            f"a training step: {_gpt(found)}, {_tokens(gpt)} tokens, "
            f"{counted['operators']:.0f} operators in {counted['batches']:.0f} batches; the losses of both sides are "
            f"{_agreement(found['losses'])}; sent as one message, {_agreement(recorded['losses'])}, and it runs "
            + ("as a CUDA graph" if recorded["usage"]["captured"] else "operator by operator")
        )
        case: dict[str, Parameter] = {"link": LOOPBACK, "model": _gpt(found), "tokens": _tokens(gpt)}
        here = [(self.here, found["seconds"]["local"])]
        graph = [("torch's CUDA graph on this GPU", recorded["seconds"]["local"])] if self.run.on_gpu else []
        return [
            self._step(found, here, LOOPBACK, gpt),
            self._step(recorded, here + graph, LOOPBACK, gpt, _RECORDED),
            _row({"of": "round trips a step", **case}, ("count", "round trips"), [counted["round_trips"]], _ASKED),
            _row(
                {"of": "bytes sent a step", **case},
                ("count", "bytes"),
                [counted["bytes_sent"]],
                ("its tokens", "8 bytes each", [tokens]),
            ),
        ]

    def _train(
        self, place: ClientLocation, device: str | None, gpt: GptShape, recorded: bool = False
    ) -> dict[str, Any]:
        effort = self.effort
        return do(
            "training",
            place,
            device=device,
            shape=asdict(gpt),
            steps=effort.steps,
            rounds=effort.rounds,
            recorded=recorded,
        )

    def _step(
        self,
        found: Mapping[str, Any],
        local: Sequence[tuple[str, Sequence[float]]],
        where: str,
        gpt: GptShape,
        sent: str = _EACH,
    ) -> Result:
        return _row(
            {"of": "training step", "link": where, "model": _gpt(found), "tokens": _tokens(gpt), "sent": sent},
            ("latency", "ms"),
            _scaled(found["seconds"]["remote"], 1e3),
            *((name, torch.__version__, _scaled(seconds, 1e3)) for name, seconds in local),
        )

    def decode(self) -> list[Result]:
        """A token of our engine."""
        with self.on_loopback() as place:
            found = self._generate(place, str(self.run.device))
        counted = found["counted"]
        self.run.note(
            f"a token: {counted['round_trips']:.2f} round trips, {counted['bytes_sent']:.0f} bytes sent, "
            f"{counted['operators']:.0f} operators named by the client"
        )
        return [self._token(found, found["seconds"]["local"], LOOPBACK)]

    def _generate(self, place: ClientLocation, device: str | None) -> dict[str, Any]:
        effort = self.effort
        wanted = {name: getattr(effort, name) for name in ("shape", "scheme", "prompt", "tokens", "rounds")}
        return do("decode", place, device=device, **wanted, half=self.run.on_gpu)

    def _token(self, found: Mapping[str, Any], local: Sequence[float], where: str) -> Result:
        return _row(
            {"of": "decode step", "link": where, "model": f"{self.effort.shape}, {self.effort.scheme}"},
            ("latency", "ms"),
            _scaled(found["seconds"]["remote"], 1e3),
            (f"warpbus on {'this GPU' if self.run.on_gpu else 'this CPU'}", torch.__version__, _scaled(local, 1e3)),
        )

    def links(self) -> list[Result]:
        """The measurements of the other parts, over links as slow as networks."""
        reason = why_no_links()
        if reason is not None:
            self.run.note(f"links were left out: {reason}")
            return []
        rows: list[Result] = []
        gpt = self.effort.gpts[0]
        with self.on_loopback() as place:
            step = [(self.here, self._train(place, str(self.run.device), gpt)["seconds"]["local"])]
            token = self._generate(place, str(self.run.device))["seconds"]["local"]
        for gigabits in self.work.gigabits:
            where = f"{gigabits:g} Gbit/s"
            limit = gigabits / 8
            with link(gigabits, "--spare", "1") as far:
                moved = do("transfers", far, nbytes=self.effort.nbytes, rounds=self.effort.rounds, echo=None)
                for name in ("upload", "download"):
                    rows.append(self._transfer(name, where, moved[name], ("the link", where, [limit]), limit))
                rows.append(self._step(self._train(far, None, gpt), step, where, gpt))
                rows.append(self._token(self._generate(far, None), token, where))
        self.run.note("links are shaped by tc between network namespaces, with TLS; latency is the machine's own")
        return rows

    def shares(self) -> list[Result]:
        """The shares of two tenants that both want a whole GPU."""
        if not self.run.on_gpu:
            self.run.note("shares were left out: on a CPU a share is a number of threads")
            return []
        rows: list[Result] = []
        for sharing in ("mps", "slices"):
            try:
                with self.on_loopback("--sharing", sharing, "--spare", "2") as place:
                    rows += self._shared(place, sharing)
            except (DeviceError, PoolError) as error:
                self.run.note(f"shares by {sharing} were left out: {error}")
        return rows

    def _shared(self, place: ClientLocation, sharing: str) -> list[Result]:
        effort = self.effort
        wanted = {"memory": effort.memory, "side": effort.side, "dtype": "bfloat16", "seconds": effort.seconds}
        rate = 2 * effort.side**3 / 1e12
        together: list[list[float]] = []
        alone: list[list[float]] = [[] for _ in _SHARES]
        say(f"shares by {sharing}: the tenants start")
        with tenants(place, _SHARES, **wanted) as both:
            for _ in range(effort.rounds):
                together.append([rate * products for products in both.measure(*range(len(_SHARES)))])
                say(f"shares by {sharing}, together: {_of_each(together[-1])} TFLOP/s")
            for index, share in enumerate(_SHARES):
                alone[index] = [rate * products for _ in range(_ALONE) for products in both.measure(index)]
                say(f"shares by {sharing}, {share} alone: {_of_each(alone[index])} TFLOP/s")
        rows: list[Result] = []
        for index, share in enumerate(_SHARES):
            case: dict[str, Parameter] = {"sharing": sharing, "granted": share}
            parts = [100 * got[index] / sum(got) for got in together]
            got = [each[index] for each in together]
            granted = ("granted", "of the GPU", [100 * share])
            rows.append(_row({"of": "share", **case}, ("speed", "% of what both get"), parts, granted))
            rests = ("alone", "while the other one rests", alone[index])
            rows.append(_row({"of": "beside another", **case}, ("speed", "TFLOP/s"), got, rests))
        return rows

    def migration(self) -> list[Result]:
        """How long moves stop a client, by the size of its state."""
        rows: list[Result] = []
        with self._two_gpus() as (place, targets):
            for nbytes in self.effort.states:
                for writing in (False, True):
                    wanted = {"targets": targets, "nbytes": nbytes, "writing": writing}
                    moves = do("migration", place, rounds=self.effort.moves, **wanted)["moves"]
                    case: dict[str, Parameter] = {"client": "writes all" if writing else "writes 4 KB"}
                    whole = ("the whole move", "the copy ahead with it", [1e3 * each["seconds"] for each in moves])
                    for of, name in (("pause", "pause"), (WAIT, "wait")):
                        found = [1e3 * each[name] for each in moves]
                        rows.append(
                            _row({"of": of, **case, "megabytes": nbytes >> 20}, ("latency", "ms"), found, whole)
                        )
        return rows

    def swapping(self) -> list[Result]:
        """The cost of a lease's stay in host memory: its first operator after it, and turns of two that always work."""
        flags = ("--oversubscribe", "1.2", "--swap-time-slice", f"{_TURN:g}")
        rows: list[Result] = []
        for nbytes in self.effort.states:
            say(f"swapping: {nbytes >> 20} MB")
            with self.on_loopback(*flags) as place:
                rows.append(self._first_operator(place, nbytes))
        with self.on_loopback(*flags) as place:
            rows.append(self._turns(place, self.effort.states[0]))
        return rows

    def _first_operator(self, place: ClientLocation, nbytes: int) -> Result:
        lease = {"memory": int(_OF_A_GPU * gpu_memory(place)), "share": 0.5}
        with connected("holder", place, [{**lease, "nbytes": nbytes, "priority": 1}]) as alone:
            usual = [each["seconds"] for _ in range(10) for each in alone.ask(0)][5:]
        clients = [{**lease, "nbytes": nbytes, "priority": 1}, {**lease, "nbytes": 1 << 20, "priority": 0}]
        back = []
        with connected("holder", place, clients) as both:
            both.ask(0)
            for _ in range(self.effort.moves):
                both.ask(1)  # as soon as the first one is idle
                back += both.ask(0)
        if not all(each["copy"] for each in back):
            raise DeviceError(
                "bench pool: a lease that was to be in host memory was not: is the machine's memory full?"
            )
        return _row(
            {"of": "first operator after host memory", "megabytes": nbytes >> 20},
            ("latency", "ms"),
            _scaled([each["seconds"] for each in back], 1e3),
            ("copying back", "a part of it", _scaled([each["copy"] for each in back], 1e3)),
            ("an operator of a resident lease", "and a read", _scaled(usual, 1e3)),
        )

    def _turns(self, place: ClientLocation, nbytes: int) -> Result:
        effort = self.effort
        dtype = "bfloat16" if self.run.on_gpu else "float32"
        wanted: dict[str, Any] = {"memory": int(_OF_A_GPU * gpu_memory(place)), "side": effort.side, "dtype": dtype}
        wanted |= {"nbytes": nbytes, "seconds": _TURNS * _TURN}
        say(f"swapping: two leases of {nbytes >> 20} MB take turns")
        with tenants(place, (0.5, 0.5), **wanted) as both:
            together = [sum(both.measure(0, 1)) for _ in range(effort.moves)]
            alone = [both.measure(0)[0] for _ in range(effort.moves)]
        mean = statistics.mean(alone) / 100
        return _row(
            {"of": "two leases that take turns", "megabytes": nbytes >> 20, "time slice": _TURN},
            ("speed", "% of one alone"),
            [each / mean for each in together],
            ("one of them", "while the other one rests", [each / mean for each in alone]),
        )

    @contextmanager
    def _two_gpus(self) -> Iterator[tuple[ClientLocation, list[str]]]:
        """Two GPUs of one daemon; where there is one, or none, two daemons of one pool."""
        if self.run.on_gpu and torch.cuda.device_count() > 1:
            with self.on_loopback("--name", "bench") as place:
                yield place, ["bench/1", "bench/0"]
            return
        with self.on_loopback("--name", "near") as place, daemon("--name", "far", "--peer", place.address):
            yield place, ["far/0", "near/0"]


_ASKED = ("reads that the step asks for", "its loss", [1.0])


def _row(
    parameters: Mapping[str, Parameter],
    metric: tuple[str, str],
    ours: Sequence[float],
    *peers: tuple[str, str, Sequence[float]],
    floor: float | None = None,
) -> Result:
    return Result({**parameters, "timed": "clock"}, metric[0], metric[1], ours, peers, floor)


def _gpt(found: Mapping[str, Any]) -> str:
    return f"GPT, {found['parameters'] / 1e6:.1f} M"


def _tokens(gpt: GptShape) -> str:
    return f"{gpt.batch} x {gpt.context:,}"


def _of_each(rates: Sequence[float]) -> str:
    return " and ".join(f"{rate:.1f}" for rate in rates)


def _scaled(seconds: Sequence[float], scale: float) -> list[float]:
    return [scale * each for each in seconds]


def _agreement(losses: Mapping[str, Sequence[float]]) -> str:
    """How far the losses of both sides are apart, in words."""
    apart = max(abs(a - b) for a, b in zip(losses["remote"], losses["local"], strict=True))
    return (
        "equal"
        if apart == 0
        else f"apart by {apart:.1g} at most (their median is {statistics.median(losses['local']):.3f})"
    )
