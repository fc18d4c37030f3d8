"""The CPU time of the server's process per streamed token: how many tokens per second it can deliver.

    python benchmarks/server_streams.py --clients 256 --tokens 128
    python benchmarks/server_streams.py --json

The server is that of `warpbus serve`: HTTP, sockets, the service, and an engine process behind a pipe. Only the engine
is a stand-in: every `--step-time` it gives each running request a token, without a model. Clients in processes of their
own read server-sent events. The figure is the CPU time of the server's process, with all its threads, divided by the
tokens; it is nearly independent of other programs on the machine. Its inverse bounds the tokens per second of one
server process, however fast the GPU is. Requests that arrive are included.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from server_streams_engine import STEP_SECONDS, stand_in

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
    content = f"写一首诗 {number}"
    message = {"role": "user", "content": content}
    body = json.dumps({"model": NAME, "messages": [message], "max_tokens": tokens, "ignore_eos": True, "stream": True})
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body.encode())}\r\nconnection: close\r\n\r\n{body}".encode())
    answer = await reader.read()
    writer.close()
    if b" 200 " not in answer.split(b"\r\n", 1)[0]:
        raise SystemExit(answer[:500].decode(errors="replace"))
    return answer.count(b"data: "), answer.decode().count("春")


@dataclass(frozen=True)
class Sample:
    """One round: microseconds of CPU time of the server per token; events per token; tokens per second delivered."""

    cpu: float
    events: float
    rate: float


def measure(port: int, process: int, clients: int, tokens: int) -> Sample:
    """All clients ask once."""
    results: multiprocessing.SimpleQueue[tuple[int, int]] = multiprocessing.SimpleQueue()
    before, start = _cpu_seconds(process), time.monotonic()
    readers = multiprocessing.Process(target=read_streams, args=(port, clients, tokens, results))
    readers.start()
    events, text = results.get()
    used, took = _cpu_seconds(process) - before, time.monotonic() - start
    readers.join()
    if text != clients * tokens:
        raise SystemExit(f"{text} of {clients * tokens} tokens arrived")
    return Sample(1e6 * used / text, events / text, text / took)


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
    cpu = statistics.median(sample.cpu for sample in samples)
    if given.json:
        print(json.dumps({"clients": given.clients, "samples": [vars(sample) for sample in samples], "cpu_us": cpu}))
        return
    for sample in samples:
        print(f"{sample.cpu:6.1f} us per token, {sample.events:.2f} events per token, {sample.rate:,.0f} tokens/s")
    print(f"median {cpu:.1f} us of CPU time per token: at most {1e6 / cpu:,.0f} tokens/s of one server process")


def _wait_until_ready(port: int) -> None:
    while True:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            if b" 200 " in connection.recv(4096):
                return
        time.sleep(0.1)


if __name__ == "__main__":
    main()
