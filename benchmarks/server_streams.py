"""The CPU time of the server's and of the engine's process per streamed token, without a model.

    python benchmarks/server_streams.py --clients 256 --tokens 128
    python benchmarks/server_streams.py --json

Server and engine are those of `warpbus serve`: HTTP, sockets, the service, a pipe, and the engine's process with
scheduler, sampler and detokenization. Only the model computes nothing, and steps begin every `--step-time`. Clients in
processes of their own read server-sent events. The figures are the CPU time of each process, with all its threads,
divided by the tokens, requests that arrive included; of several rounds the least and the median. Other programs on
the machine raise them less than times of a clock, but do raise them: the least is nearest to a machine of one's own.
The server's figure bounds the tokens per second of one server process. The engine's has to be below the time of a step
divided by its sequences.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import socket
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from server_streams_engine import STEP_SECONDS, TEXT, stand_in

import warpbus.demo
from warpbus.engine.options import ServiceOptions
from warpbus.engine.service import Service
from warpbus.server.app import create_app
from warpbus.server.listening import make_server
from warpbus.server.options import ServerOptions
from warpbus.server.registry import Models

POET = Path(warpbus.demo.__file__).parent / "glm-poet"
NAME = "stand-in"


def serve(listening: socket.socket, clients: int) -> None:
    """The server's process."""
    torch.set_num_threads(1)
    asyncio.run(_serve(listening, clients))


async def _serve(listening: socket.socket, clients: int) -> None:
    models = Models()
    models.add(NAME, adapters=[])
    options = ServerOptions()
    app = create_app(models, options, None)
    server = make_server(app, options, app.state.running)
    service = await Service.start(POET, ServiceOptions(device="cpu", max_num_seqs=clients), load=stand_in)
    models.find(NAME).loaded(service)
    gc.freeze()  # as `warpbus serve` does
    try:
        await server.serve([listening])
    finally:
        await models.close(0.0)


def read_streams(port: int, clients: int, tokens: int, results: "multiprocessing.SimpleQueue[tuple[int, int]]") -> None:
    """A process of clients: all send their request at once and read to the end. Reports events and tokens."""
    results.put(asyncio.run(_read_all(port, clients, tokens)))


async def _read_all(port: int, clients: int, tokens: int) -> tuple[int, int]:
    found = await asyncio.gather(*(_read_one(port, tokens, number) for number in range(clients)))
    return sum(events for events, _ in found), sum(text for _, text in found)


async def _read_one(port: int, tokens: int, number: int) -> tuple[int, int]:
    message = {"role": "user", "content": f"写一首诗 {number}"}
    params = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body = json.dumps({"model": NAME, "messages": [message], **params})
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body.encode())}\r\nconnection: close\r\n\r\n{body}".encode())
    answer = await reader.read()
    writer.close()
    if b" 200 " not in answer.split(b"\r\n", 1)[0]:
        raise SystemExit(answer[:500].decode(errors="replace"))
    return answer.count(b"data: "), answer.decode().count(TEXT)


@dataclass(frozen=True)
class Sample:
    """One round: microseconds of CPU time per token of each process; events per token; tokens per second."""

    server: float
    engine: float
    events: float
    rate: float


def measure(port: int, process: int, clients: int, tokens: int) -> Sample:
    """All clients ask once."""
    results: multiprocessing.SimpleQueue[tuple[int, int]] = multiprocessing.SimpleQueue()
    each = (process, _child(process))
    before, start = [_cpu_seconds(one) for one in each], time.monotonic()
    readers = multiprocessing.Process(target=read_streams, args=(port, clients, tokens, results))
    readers.start()
    events, text = results.get()
    took = time.monotonic() - start
    server, engine = (_cpu_seconds(one) - ago for one, ago in zip(each, before, strict=True))
    readers.join()
    if text != clients * tokens:
        raise SystemExit(f"{text} of {clients * tokens} tokens arrived")
    return Sample(1e6 * server / text, 1e6 * engine / text, events / text, text / took)


def _child(process: int) -> int:
    """The engine's process: the only child of the server's, of any of its threads."""
    [child] = [int(one) for of in Path(f"/proc/{process}/task").glob("*/children") for one in of.read_text().split()]
    return child


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument("--step-time", type=float, default=40.0, help="milliseconds between the tokens of a request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    os.environ[STEP_SECONDS] = str(given.step_time / 1000)
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    port = listening.getsockname()[1]
    server = multiprocessing.get_context("fork").Process(target=serve, args=(listening, given.clients))
    server.start()
    try:
        assert server.pid is not None
        _wait_until_ready(port)
        measure(port, server.pid, given.clients, min(16, given.tokens))  # warm
        samples = [measure(port, server.pid, given.clients, given.tokens) for _ in range(given.rounds)]
    finally:
        server.terminate()
        server.join()
    found = {
        name: {"least": min(values), "median": statistics.median(values)}
        for name in ("server", "engine")
        for values in [[getattr(sample, name) for sample in samples]]
    }
    if given.json:
        print(json.dumps({"clients": given.clients, "samples": [vars(sample) for sample in samples], "cpu_us": found}))
        return
    for sample in samples:
        print(
            f"server {sample.server:6.1f}, engine {sample.engine:6.1f} us per token; {sample.events:.2f} events per "
            f"token, {sample.rate:,.0f} tokens/s"
        )
    for name, figures in found.items():
        print(f"{name}: least {figures['least']:.1f}, median {figures['median']:.1f} us of CPU time per token")


def _wait_until_ready(port: int) -> None:
    while True:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            if b" 200 " in connection.recv(4096):
                return
        time.sleep(0.1)


if __name__ == "__main__":
    main()
