"""The peer of `bench quantize`: GPTQ of llm-compressor, on a model of transformers that has the shape."""

import importlib
import json
import subprocess
import sys
import tempfile
import time

import torch

from warpbus.bench.decoders import transformers_model
from warpbus.bench.quantization_process import random_calibration
from warpbus.errors import DeviceError, UsageError
from warpbus.models import SHAPES

_SCHEMES = {"w4a16-g128": "W4A16", "w8a16-g128": "W8A16"}
"""Its names for our schemes."""


def timed(shape: str, layers: int | None, scheme: str, samples: int, seqlen: int) -> float:
    """Seconds of quantizing and writing, in a process of its own whose start is not counted.

    Args:
        shape: one of `SHAPES`; the weights are random and lie in main memory.
        layers: in place of the shape's.
        scheme: ours.
        samples, seqlen: random sequences to calibrate on, and the tokens of each.

    Raises:
        UsageError: if it has no name for the scheme.
        DeviceError: if it fails; the message is its own.
    """
    if scheme not in _SCHEMES:
        raise UsageError(f"scheme {scheme}: of ours it knows {', '.join(_SCHEMES)}")
    code = "from warpbus.bench.compressor import main; main()"
    asked = json.dumps([shape, layers, _SCHEMES[scheme], samples, seqlen])
    finished = subprocess.run([sys.executable, "-c", code, asked], capture_output=True, text=True, check=False)
    if finished.returncode:
        raise DeviceError((finished.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return float(finished.stdout.splitlines()[-1])


def main() -> None:
    """The main function of that process: prints the seconds."""
    shape, layers, scheme, samples, seqlen = json.loads(sys.argv[1])
    library = importlib.import_module("llmcompressor")
    quantization = importlib.import_module("llmcompressor.modifiers.quantization")
    config = SHAPES[shape].resized(num_layers=layers)
    model = transformers_model(config, torch.device("cpu"))
    rows = [list(each) for each in random_calibration(config.vocab_size, samples, seqlen).sequences]
    data = importlib.import_module("datasets").Dataset.from_dict(
        {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
    )
    recipe = quantization.GPTQModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    with tempfile.TemporaryDirectory() as output:
        started = time.perf_counter()
        library.oneshot(
            model=model,
            dataset=data,
            recipe=recipe,
            max_seq_length=seqlen,
            num_calibration_samples=samples,
            output_dir=output,
        )
        print(time.perf_counter() - started)
