"""How fast quantized weights decode and read prompts on the CPU: a random GLM of 1 B parameters beside peers.

    python benchmarks/cpu_decode.py
    python benchmarks/cpu_decode.py --parameters 1e9 --scheme w4a16-g128 --threads 2 --llama ~/llama/bin/python

The models take turns: each appends a few tokens to one sequence of its own, again and again, and reads prompts. Every
sample is kept, and the best ones are compared: other programs on the machine only make samples slower. Quantized models
round activations, and have a head in 8 bits, as engines load them; WARPBUS_CPU_ACTIVATIONS=float measures them without.
With `--llama`, a Python that has the packages llama-cpp-python and gguf, llama.cpp takes part with a Llama of the same
shape in Q4_0, its head in Q8_0. The records go to benchmarks/results; 1e9 parameters take 8 GB of memory.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

# Threads that spin while they wait make small operations slow on shared or virtual cores, so the command `warpbus` has
# them sleep; libgomp reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from warpbus.bench.cases import versions
from warpbus.bench.records import RESULTS, Peer, Record, now, ratio, write
from warpbus.cuda.cpu import cpu_model
from warpbus.engine.engine import Engine, request
from warpbus.kernels.ops.cpu_library import activations_in_8_bits
from warpbus.models import SHAPES, ModelConfig, random_model
from warpbus.qtensor import Scheme

SCHEMES = ("w4a16-g128", "w8a16")
PROMPT = list(range(100, 132))
WARM = 2  # tokens
SAMPLES, TOKENS = 40, 2  # samples of each model, tokens of a sample
PROMPTS, LENGTH = 6, 512  # prompts of each model, tokens of a prompt
HEAD = Scheme(8, 128)

# ChatGLM2's at half the width. Groups of 128 divide every matrix's columns, in the small one too.
SHAPE = SHAPES["chatglm2-6b"].resized(hidden_size=2048, num_heads=16, ffn_size=6912)
SMALL = replace(SHAPE.resized(hidden_size=256, num_heads=2, ffn_size=896), vocab_size=1024)


class Contender(Protocol):
    """A model that has read its first prompt, `PROMPT`."""

    def decode(self, tokens: int) -> float:
        """Seconds to append so many tokens."""

    def prompt(self, tokens: int) -> float:
        """Seconds to read another prompt."""


@dataclass
class Samples:
    """What a model was measured at, in tokens/s."""

    decode: list[float] = field(default_factory=list)
    prompt: list[float] = field(default_factory=list)


class Ours:
    """A model of ours.

    Args:
        scheme: of the layers; None: float32.
    """

    def __init__(self, shape: ModelConfig, scheme: str | None) -> None:
        rounded = scheme is not None and activations_in_8_bits()
        model = random_model(
            shape,
            None if scheme is None else Scheme.parse(scheme),
            "cpu",
            torch.float32,
            head=HEAD.fitting(shape.hidden_size) if rounded else None,
            int8_activations=rounded,
        )
        self._vocabulary = shape.vocab_size
        self._reading = Engine(model)
        self._decoding = Engine(model)
        # The first token comes with the prompt.
        self._decoding.add(request(PROMPT, tokens=2 + WARM + SAMPLES * TOKENS))
        self._decoding.step()
        self.decode(WARM)

    def decode(self, tokens: int) -> float:
        start = time.perf_counter()
        for _ in range(tokens):
            self._decoding.step()
        return time.perf_counter() - start

    def prompt(self, tokens: int) -> float:
        self._reading.add(request(random.choices(range(self._vocabulary), k=tokens), tokens=1))
        start = time.perf_counter()
        while self._reading.has_work:
            self._reading.step()
        return time.perf_counter() - start


class Llama:
    """llama.cpp in a process of its own: `cpu_decode_llama.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.version = self._read()
        self.prompt(len(PROMPT))
        self.decode(WARM)

    @classmethod
    @contextmanager
    def started(cls, python: str, shape: ModelConfig, threads: int) -> Iterator["Llama"]:
        sizes = {
            "hidden": shape.hidden_size,
            "layers": shape.num_layers,
            "ffn": shape.dense_mlp.ffn_size,
            "heads": shape.attention.num_heads,
            "kv_heads": shape.attention.num_kv_heads,
            "vocabulary": shape.vocab_size,
        }
        program = Path(__file__).with_name("cpu_decode_llama.py")
        with tempfile.TemporaryDirectory(prefix="warpbus-") as directory:
            arguments = ["--shape", json.dumps(sizes), "--head", "Q8_0", "--threads", str(threads)]
            command = [python, str(program), f"{directory}/model.gguf", *arguments]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
                yield cls(process)
                assert process.stdin is not None
                process.stdin.close()

    def decode(self, tokens: int) -> float:
        return self._timed("decode", tokens)

    def prompt(self, tokens: int) -> float:
        seconds = self._timed("prompt", tokens)
        if tokens != len(PROMPT):  # the sequence that is decoded is the one of the last prompt
            self._timed("prompt", len(PROMPT))
        return seconds

    def _timed(self, what: str, tokens: int) -> float:
        assert self._process.stdin is not None
        print(what, tokens, file=self._process.stdin, flush=True)
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp ended: its Python needs llama-cpp-python and gguf")
        return line.strip()


def with_parameters(shape: ModelConfig, parameters: float) -> ModelConfig:
    """The shape with as many layers as make about that many parameters."""
    one, two = (shape.resized(num_layers=count).num_parameters for count in (1, 2))
    return shape.resized(num_layers=max(1, 1 + round((parameters - one) / (two - one))))


def measure(contenders: dict[str, Contender]) -> dict[str, Samples]:
    """The samples of all models, which take turns."""
    found = {name: Samples() for name in contenders}
    for _ in range(SAMPLES):
        for name, each in contenders.items():
            found[name].decode.append(TOKENS / each.decode(TOKENS))
    for _ in range(PROMPTS):
        for name, each in contenders.items():
            found[name].prompt.append(LENGTH / each.prompt(LENGTH))
    return found


def typed(arguments: list[str]) -> list[str]:
    """The command without the paths of this machine: of the record, and of the Python with llama.cpp."""
    words = ["python", "benchmarks/cpu_decode.py"]
    for before, word in zip(["", *arguments], arguments, strict=False):
        if word != "--output" and before != "--output":
            words.append("PYTHON" if before == "--llama" else word)
    return words


def record(
    shape: ModelConfig, scheme: str, threads: int, task: str, ours: list[float], peer: list[float], against: Peer
) -> Record:
    """The best sample of ours against the best one of a peer."""
    command = f"OMP_WAIT_POLICY={shlex.quote(os.environ['OMP_WAIT_POLICY'])} {shlex.join(typed(sys.argv[1:]))}"
    return Record(
        bench="cpu-decode",
        case={
            "model": "chatglm2",
            "hidden": shape.hidden_size,
            "parameters": shape.num_parameters,
            "layers": shape.num_layers,
            "scheme": scheme,
            "dtype": "float32",
            "activations": "int8" if activations_in_8_bits() else "float",
            "batch": 1,
            "task": task,
            "context": len(PROMPT) if task == "decode" else LENGTH,
            "threads": threads,
            "of": "best sample",
        },
        metric="speed",
        unit="tokens/s",
        ours=max(ours),
        peer=replace(against, value=max(peer)),
        ratio=ratio("speed", max(ours), max(peer)),
        floor=None,
        samples={"ours": ours, "peer": peer},
        device="cpu",
        versions={**versions(), "cpu": cpu_model()},
        date=now(),
        command=command,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e9, help="of the model; 1e9 by default")
    parser.add_argument("--scheme", action="append", help=f"{' and '.join(SCHEMES)} by default")
    parser.add_argument("--threads", type=int, default=2, help="2 by default")
    parser.add_argument("--llama", metavar="PYTHON", help="a Python with llama-cpp-python and gguf: measure it as well")
    parser.add_argument("--small", action="store_true", help="an eighth of the width, to try it out")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the directory of the records")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    schemes = options.scheme or list(SCHEMES)
    shape = with_parameters(SMALL if options.small else SHAPE, options.parameters)
    peers = [Peer("float32", f"torch {torch.__version__}", 0.0)]
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {"float32": Ours(shape, None)}
        contenders |= {scheme: Ours(shape, scheme) for scheme in schemes}
        if options.llama is not None:
            llama = stack.enter_context(Llama.started(options.llama, shape, options.threads))
            contenders["llama.cpp"] = llama
            peers.append(Peer("llama.cpp Q4_0, head Q8_0", f"llama-cpp-python {llama.version}", 0.0))
        found = measure(contenders)
    records = []
    for scheme in schemes:
        for peer in peers[: None if Scheme.parse(scheme).bits == 4 else 1]:  # llama.cpp has 4 bits
            ours, theirs = found[scheme], found[peer.name.split()[0]]
            for task, own, other in (("decode", ours.decode, theirs.decode), ("prompt", ours.prompt, theirs.prompt)):
                records.append(record(shape, scheme, options.threads, task, own, other, peer))
                print(
                    f"{scheme}, {shape.num_parameters / 1e9:.2f} B parameters, {options.threads} threads, {task}: "
                    f"{records[-1].ours:.1f} tokens/s, {peer.name} {records[-1].peer.value:.1f}: "
                    f"{records[-1].ratio:.2f} times as fast"
                )
    print(write(records, options.output))


if __name__ == "__main__":
    main()
