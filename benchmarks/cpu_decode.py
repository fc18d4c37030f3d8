"""How fast quantized weights decode on the CPU: a random GLM of 1 B parameters, beside itself in float32.

    python benchmarks/cpu_decode.py
    python benchmarks/cpu_decode.py --parameters 1e9 --scheme w4a16-g128 --threads 2

The models take turns: each appends a few tokens to one sequence of its own, again and again, and every sample is kept.
Embedding and head are float32 in all of them. The records go to benchmarks/results; 1e9 parameters take 8 GB of memory.
"""

import argparse
import os
import shlex
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

# Threads that spin while they wait make small operations slow on shared or virtual cores, so the command `warpbus` has
# them sleep; libgomp reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from warpbus.bench.cases import versions
from warpbus.bench.records import RESULTS, Peer, Record, now, ratio, write
from warpbus.engine.engine import Engine, request
from warpbus.models import SHAPES, ModelConfig, random_model
from warpbus.qtensor import Scheme

SCHEMES = ("w4a16-g128", "w8a16")
PROMPT = list(range(100, 132))
WARM = 2  # tokens
SAMPLES, TOKENS = 11, 8  # samples of each model, tokens of a sample

# ChatGLM2's at half the width. Groups of 128 divide every matrix's columns, in the small one too.
SHAPE = SHAPES["chatglm2-6b"].resized(hidden_size=2048, num_heads=16, ffn_size=6912)
SMALL = replace(SHAPE.resized(hidden_size=256, num_heads=2, ffn_size=896), vocab_size=1024)


@dataclass
class Contender:
    """One of the models, which has read its prompt, and its samples in tokens/s."""

    engine: Engine
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def append(self, tokens: int) -> None:
        """Decode so many tokens."""
        for _ in range(tokens):
            self.engine.step()

    def sample(self, tokens: int) -> None:
        """Decode so many tokens, and note how fast that was."""
        start = time.perf_counter()
        self.append(tokens)
        self.samples.append(tokens / (time.perf_counter() - start))


def with_parameters(shape: ModelConfig, parameters: float) -> ModelConfig:
    """The shape with as many layers as make about that many parameters."""
    one, two = (shape.resized(num_layers=count).num_parameters for count in (1, 2))
    return shape.resized(num_layers=max(1, 1 + round((parameters - one) / (two - one))))


def contender(shape: ModelConfig, scheme: str | None) -> Contender:
    """A random model that is warm and has room for its samples."""
    model = random_model(shape, None if scheme is None else Scheme.parse(scheme), "cpu", torch.float32)
    # The first token comes with the prompt.
    engine = Engine(model)
    engine.add(request(PROMPT, tokens=2 + WARM + SAMPLES * TOKENS))
    engine.step()
    found = Contender(engine)
    found.append(WARM)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e9, help="of the model; 1e9 by default")
    parser.add_argument("--scheme", action="append", help=f"{' and '.join(SCHEMES)} by default")
    parser.add_argument("--threads", type=int, default=2, help="2 by default")
    parser.add_argument("--small", action="store_true", help="an eighth of the width, to try it out")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the directory of the records")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    schemes = options.scheme or list(SCHEMES)
    shape = with_parameters(SMALL if options.small else SHAPE, options.parameters)
    plain = contender(shape, None)
    quantized = {scheme: contender(shape, scheme) for scheme in schemes}
    for _ in range(SAMPLES):
        for each in (plain, *quantized.values()):
            each.sample(TOKENS)

    date, installed = now(), versions()
    command = f"OMP_WAIT_POLICY={shlex.quote(os.environ['OMP_WAIT_POLICY'])} {shlex.join(['python', *sys.argv])}"
    records = []
    for scheme, found in quantized.items():
        case = {
            "model": "chatglm2",
            "hidden": shape.hidden_size,
            "parameters": shape.num_parameters,
            "layers": shape.num_layers,
            "scheme": scheme,
            "dtype": "float32",
            "batch": 1,
            "context": len(PROMPT),
            "threads": options.threads,
        }
        records.append(
            Record(
                bench="cpu-decode",
                case=case,
                metric="speed",
                unit="tokens/s",
                ours=found.median,
                peer=Peer("float32", f"torch {torch.__version__}", plain.median),
                ratio=ratio("speed", found.median, plain.median),
                floor=None,
                samples={"ours": found.samples, "peer": plain.samples},
                device="cpu",
                versions=installed,
                date=date,
                command=command,
            )
        )
        print(
            f"{scheme}, {shape.num_parameters / 1e9:.2f} B parameters, {options.threads} threads: {found.median:.1f} "
            f"tokens/s, float32 {plain.median:.1f}: {records[-1].ratio:.2f} times as fast"
        )
    print(write(records, options.output))


if __name__ == "__main__":
    main()
