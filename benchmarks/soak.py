"""Whether the server stands a long time of everything at once: requests of all kinds, good ones and bad ones.

    python benchmarks/soak.py
    python benchmarks/soak.py --requests 1000 --seed 7 --kill
    python benchmarks/soak.py --concurrency 500 --queue 600 --sequences 32 --cache-tokens 4096 --model MODEL
    python benchmarks/soak.py --model chatglm3-6b-w4 --device cuda
    python benchmarks/soak.py --url http://127.0.0.1:8000 --api-key KEY

It starts `warpbus serve` with a random model of next to no size, or that of `--model`, and a cache so small that
requests lose their places to others, and sends it chats and completions of all options, streamed and not; clients that
leave at any moment or never read; bodies and heads that are wrong in many ways; and more at once than it takes. Ten
times it waits until all is quiet, and lets the server sleep and wake. It checks that

- every request ends: with an answer that is complete, or with the status that is meant for it;
- answers are those that the same requests got when they were alone (on the CPU alone: its float32 leaves no near ties);
- nothing runs, waits or holds blocks of the cache when it is quiet; the cache's memory is back at its start;
- the processes' memory grows no more from the half to the end, their descriptors are as at the start, and their threads
  no more than in the first half (memory only from 1,000 requests on: with fewer they do not get warm);
- the server's log holds no trace of a fault, and at SIGTERM it ends with 0.

`--kill` also kills the engine's process amid requests: they end with 503 or an error event, and it comes back. A server
at `--url` is not killed or ended, and its processes, log and answers are not looked at. The exit status is 1 where
something is wrong.
"""

import argparse
import asyncio
import itertools
import random
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from soak_answers import Answer, Body, World, WrongError, answered, asked, decoded, error_of
from soak_client import Address, Connection, CutShortError
from soak_requests import KINDS, Kind, burst
from soak_server import Process, Server, write_model

_PHASES, _FEW_PHASES = 10, 4  # the latter for less than 1,000 requests
_KILLED_PHASE = 1  # early, so that the engine that comes back is watched for long
_REFERENCES = 48
_BURST_EVERY = 1000  # requests
_PATIENCE = 300.0  # seconds that requests of a kind may take by default, on a machine where others work too
_SECONDS_TO_SETTLE = 60.0
_MOST_FAILURES = 25
_SEQUENCES, _QUEUE, _CACHE_TOKENS, _CONTEXT = 8, 80, 640, 512
_GROWTH, _GROWTH_BYTES = 0.03, 8 << 20  # of a process's memory, from the half to the end: this part or so many bytes
_SPARE_THREADS = 2  # that a library may start when it first needs them


@dataclass
class Soak:
    """One run.

    Attributes:
        server: None where it is another's.
        phases: after each of which there is a pause.
        start: the engine's counters when nothing had been asked for.
        patience: seconds that requests of a kind may take.
        measured: the processes, at each pause.
        preempted: requests that lost their places, all engines together.
    """

    world: World
    server: Server | None
    phases: int
    patience: float = _PATIENCE
    start: Mapping[str, float] = field(default_factory=dict)
    measured: list[dict[str, Process]] = field(default_factory=list)
    preempted: float = 0.0
    _last_preempted: float = 0.0
    _began: float = field(default_factory=time.monotonic)

    async def run(self, requests: int, *, seed: int, concurrency: int, kill: bool) -> None:
        """All phases, with a pause before and after each."""
        world = self.world
        self.start = await metrics(world)
        draw = random.Random(seed)
        for _ in range(min(_REFERENCES, requests // 10)):
            path, body = asked(world, draw, repeats=True)
            async with await Connection.open(world.address) as connection:
                found = await answered(world, connection, path, body)
            if not isinstance(found, Answer):
                raise SystemExit(f"the first requests were not answered: {found}")
            world.references.append((path, body, found))
        await self._pause("start")
        numbers = itertools.count()
        for phase in range(self.phases):
            until = requests * (phase + 1) // self.phases
            workers = [self._work(numbers, seed, until) for _ in range(concurrency)]
            if kill and phase == _KILLED_PHASE:
                workers.append(self._kill((world.sent + until) // 2))
            await asyncio.gather(*workers)
            if len(world.failures) >= _MOST_FAILURES:
                return
            await self._pause(f"after {world.sent:,} requests")

    async def _work(self, numbers: "itertools.count[int]", seed: int, until: int) -> None:
        world = self.world
        while world.sent < until and len(world.failures) < _MOST_FAILURES:
            number = next(numbers)
            draw = random.Random(f"{seed} {number}")
            [kind] = draw.choices([kind for kind, _ in KINDS], [often for _, often in KINDS])
            await self._try(burst if number % _BURST_EVERY == 40 else kind, number, draw)

    async def _try(self, kind: Kind, number: int, draw: random.Random) -> None:
        try:
            async with asyncio.timeout(self.patience):
                await kind(self.world, draw)
        except TimeoutError:
            self._fail(f"{kind.__name__}, number {number}: it did not end in {self.patience:g} s")
        except (WrongError, CutShortError, OSError, KeyError, TypeError, ValueError) as error:
            self._fail(f"{kind.__name__}, number {number}: {type(error).__name__}: {error}")

    def _fail(self, what: str) -> None:
        self.world.failures.append(what)
        print("WRONG:", what, flush=True)

    def _expect(self, right: bool, what: str) -> None:
        if not right:
            self._fail(what)

    async def _kill(self, at: int) -> None:
        """Kill the engine once so many requests were sent, and wait until it is back."""
        world = self.world
        while world.sent < at and len(world.failures) < _MOST_FAILURES:
            await asyncio.sleep(0.01)
        assert self.server is not None, "only our own server's"
        world.trouble_until = float("inf")
        began = time.monotonic()
        self.server.kill_engine()
        await asyncio.sleep(0.5)
        while (await status(world, "GET", "/health"))[0] != 200:
            if time.monotonic() > began + _PATIENCE:
                self._fail("the engine did not come back")
                return
            await asyncio.sleep(0.1)
        world.trouble_until = time.monotonic()
        self._last_preempted = 0.0
        print(f"the engine was killed, and back after {world.trouble_until - began:.1f} s", flush=True)

    async def _pause(self, when: str) -> None:
        """Wait until nothing runs, check that nothing is left, sleep and wake, and measure."""
        began = time.monotonic()
        while _busy(found := await metrics(self.world)) and time.monotonic() < began + _SECONDS_TO_SETTLE:
            await asyncio.sleep(0.05)
        self._expect(not _busy(found), f"{when}: still there after {_SECONDS_TO_SETTLE:g} s: {_busy(found)}")
        self.preempted += found["num_preemptions_total"] - self._last_preempted
        self._last_preempted = found["num_preemptions_total"]
        await self._sleep(when)
        found = await metrics(self.world)
        mapped, at_start = found["kv_cache_bytes_mapped"], self.start["kv_cache_bytes_mapped"]
        self._expect(mapped == at_start, f"{when}: the cache has {mapped:,.0f} bytes, {at_start:,.0f} at the start")
        if self.server is not None:
            self.measured.append(self.server.processes())
        seconds = time.monotonic() - self._began
        parts = [f"{name} {process}" for name, process in (self.measured[-1] if self.measured else {}).items()]
        print("; ".join([f"{when}: {seconds:.0f} s, {self.preempted:.0f} preemptions", *parts]), flush=True)

    async def _sleep(self, when: str) -> None:
        world = self.world
        body: Body = {"model": world.model, "prompt": "春", "max_tokens": 150, "ignore_eos": True, "stream": True}
        async with await Connection.open(world.address) as connection:
            await connection.ask("POST", "/v1/completions", body)
            await connection.head()
            async for _ in connection.pieces():
                break
            code, _ = await status(world, "POST", "/sleep")
            self._expect(code == 409, f"{when}: /sleep amid an answer: {code} instead of 409")
        if code == 200:
            await status(world, "POST", "/wake_up")
        began = time.monotonic()
        while (code := (await status(world, "POST", "/sleep"))[0]) != 200 and time.monotonic() < began + 10:
            await asyncio.sleep(0.02)  # the server has not seen yet that the client has gone
        self._expect(code == 200, f"{when}: /sleep: {code}")
        code, content = await status(world, "POST", "/v1/completions", body)
        self._expect(code == 503 and error_of(content)["code"] == "asleep", f"{when}: asleep, it answers {code}")
        found, at_start = await metrics(world), self.start
        self._expect(found["kv_cache_bytes_mapped"] < at_start["kv_cache_bytes_mapped"], f"{when}: the cache is awake")
        code, _ = await status(world, "POST", "/wake_up")
        self._expect(code == 200, f"{when}: /wake_up: {code}")

    def check_processes(self) -> None:
        """Whether they are at the end as they were."""
        if len(self.measured) <= self.phases:  # it was broken off
            return
        first, half, last = self.at_start_half_and_end()
        for name in ("server", "engine"):
            if name not in last:
                self._fail(f"there is no {name} at the end")
                continue
            grown = last[name].rss - half[name].rss
            allowed = max(_GROWTH_BYTES, _GROWTH * half[name].rss)
            if self.phases == _PHASES:  # in fewer it does not get warm
                what = f"the {name} has grown by {grown / 2**20:.1f} MiB from the half to the end"
                self._expect(grown <= allowed, what)
            more = last[name].descriptors - first[name].descriptors
            self._expect(more <= 0, f"the {name} has {more} descriptors more than at the start")
            # Pools of worker threads follow the requests, so that their number differs from pause to pause.
            more = last[name].threads - max(each[name].threads for each in self.measured[: self.phases // 2 + 1])
            self._expect(more <= _SPARE_THREADS, f"the {name} has {more} threads more than in the first half")

    def at_start_half_and_end(self) -> list[dict[str, Process]]:
        """The processes at these moments."""
        return [self.measured[index] for index in (0, self.phases // 2, self.phases)]


async def status(world: World, method: str, path: str, body: Body | None = None) -> tuple[int, object]:
    """The status and the JSON that a route answers with."""
    async with await Connection.open(world.address) as connection:
        await connection.ask(method, path, body)
        head = await connection.head()
        return head.status, await decoded(connection)


async def metrics(world: World) -> dict[str, float]:
    """Those of the model, without their prefix."""
    async with await Connection.open(world.address) as connection:
        await connection.ask("GET", "/metrics")
        await connection.head()
        text = (await connection.body()).decode()
    pattern = rf'^warpbus:(\w+){{model_name="{re.escape(world.model)}"(?:,replica="0")?}} (\S+)$'
    found = {name: float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}
    if "num_requests_running" not in found:
        raise SystemExit("the server's metrics say nothing of its engine")
    return found


def _busy(found: Mapping[str, float]) -> dict[str, float]:
    """What is not zero and should be."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: found[name] for name in names if found[name]}


async def _soak(options: argparse.Namespace, server: Server | None, address: Address) -> Soak:
    unknown = World(address, "", 0, exact=False, places=None)
    _, listed = await status(unknown, "GET", "/v1/models")
    assert isinstance(listed, dict), "a list of models"
    if "data" not in listed:
        raise SystemExit(f"{address.host}:{address.port}: {listed}")
    [model, *_] = listed["data"]
    own = server is not None
    places = options.sequences + options.queue if own else None
    world = World(address, model["id"], model["max_model_len"], own and options.device == "cpu", places)
    phases = _PHASES if options.requests >= 1000 else _FEW_PHASES
    soak = Soak(world, server, phases, patience=options.patience)
    await soak.run(options.requests, seed=options.seed, concurrency=options.concurrency, kill=options.kill)
    return soak


def _arguments(model: Path, options: argparse.Namespace) -> list[str]:
    limits = {
        "--device": options.device,
        "--speculation": options.speculation,
        "--max-model-len": _CONTEXT,
        "--max-num-seqs": options.sequences,
        "--max-queue": options.queue,
        "--kv-cache-tokens": options.cache_tokens,
        "--max-connections": 2 * (options.concurrency + options.sequences + options.queue),
    }
    return [str(model), *(str(word) for pair in limits.items() for word in pair)]


def _report(soak: Soak, seconds: float) -> None:
    world = soak.world
    print(f"\n{world.sent:,} requests in {seconds:.0f} s, {soak.preempted:.0f} preemptions\n")
    for (kind, outcome), count in sorted(world.outcomes.items()):
        print(f"{count:7,}  {kind}: {outcome}")
    for name in ("server", "engine") if len(soak.measured) > soak.phases else ():
        first, half, last = (found[name] for found in soak.at_start_half_and_end())
        print(f"\n{name} at the start: {first}\n{name} at the half: {half}\n{name} at the end: {last}")
    print(f"\n{len(world.failures)} things are wrong" if world.failures else "\nnothing is wrong")
    for failure in world.failures:
        print(f"- {failure}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="10000 by default")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked for, and in which order")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time, 32 by default")
    parser.add_argument("--sequences", type=int, default=_SEQUENCES, help="of a batch, 8 by default")
    parser.add_argument("--queue", type=int, default=_QUEUE, help="requests that may wait, 80 by default")
    parser.add_argument("--cache-tokens", type=int, default=_CACHE_TOKENS, help="of the KV cache, 640 by default")
    parser.add_argument("--patience", type=float, default=_PATIENCE, help="seconds that a request may take, 300")
    parser.add_argument("--model", type=Path, help="a model directory; by default a random model, written for this")
    parser.add_argument("--device", default="cpu", help="that it is served on; cpu by default")
    parser.add_argument("--speculation", type=int, default=0, help="the most tokens guessed in a step; 0 by default")
    parser.add_argument("--kill", action="store_true", help="kill the engine's process once")
    parser.add_argument("--url", help="of a server that runs already: http://HOST:PORT")
    parser.add_argument("--api-key", help="of the server at --url")
    options = parser.parse_args()
    if options.url and (options.kill or options.model):
        parser.error("--url: the server is not ours: leave out --kill and --model")

    began = time.monotonic()
    if options.url:
        soak = asyncio.run(_soak(options, None, Address.of(options.url, options.api_key)))
    else:
        with tempfile.TemporaryDirectory() as directory:
            model = options.model or Path(directory) / "tiny"
            if options.model is None:
                write_model(model)
            server = Server(_arguments(model, options), "the-key-of-the-soak", Path(directory) / "log")
            try:
                soak = asyncio.run(_soak(options, server, Address.of(server.url, "the-key-of-the-soak")))
            finally:
                code = server.end()
            soak.check_processes()
            soak.world.failures += [f"the server's log: {line}" for line in server.complaints()]
            if code:
                soak.world.failures.append(f"the server ended with {code}")
    _report(soak, time.monotonic() - began)
    sys.exit(1 if soak.world.failures else 0)


if __name__ == "__main__":
    main()
