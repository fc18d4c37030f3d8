"""How much memory quantizing a model takes: a random GLM is written, quantized, and the peak held against a bound.

    python benchmarks/memory.py --parameters 1e9
    python benchmarks/memory.py --parameters 1e9 --algorithm rtn --algorithm gptq --json

The peak is the greatest resident size of `warpbus quantize`, run as a program of its own. The bound is the same
program's peak on a model of next to no size, plus twice the largest thing the model has (a layer, the embedding or
the head, in the checkpoint's dtype), plus for gptq what `gptq_bytes` counts. The exit code is 1 if a peak is above its
bound. Files go below --directory and are removed again; 1e9 parameters take 3 GB there.
"""

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from warpbus.demo import recipe
from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.models import Decoder, ModelConfig, read_config, tensor_map
from warpbus.models.loading import part_rows
from warpbus.models.tokenizers.training import train_sentencepiece

SAMPLES, SEQLEN = 8, 512
SHARE = 2.0
DTYPE = torch.bfloat16
TEXT = "床前明月光，疑是地上霜。举头望明月，低头思故乡。The moon is bright."

# What grows with the number of parameters is how many layers there are, as it does from one GLM to the next.
SHAPE: dict[str, Any] = {
    "vocab_size": 65024,
    "hidden_size": 2048,
    "intermediate_size": 6912,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": [0],
    "pad_token_id": 0,
}
SMALL: dict[str, Any] = SHAPE | {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3456}
TRIFLE: dict[str, Any] = SHAPE | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128}


def settings(parameters: float, shape: dict[str, Any]) -> dict[str, Any]:
    """A config.json of about so many parameters."""
    hidden, ffn, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads = shape["num_attention_heads"] + shape["num_key_value_heads"]
    layer = 2 * hidden * dim * heads + 3 * hidden * ffn
    count = max(1, round((parameters - 2 * shape["vocab_size"] * hidden) / layer))
    return recipe.config(shape["vocab_size"]) | shape | {"num_hidden_layers": count}


def write_model(directory: Path, config: dict[str, Any]) -> Checkpoint:
    """A random model of that config, written shard by shard."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    train_sentencepiece(
        [TEXT], directory / "tokenizer.model", vocab_size=500, specials=recipe.SPECIALS, required_chars="\n"
    )
    decoder_config = read_config(Checkpoint(directory, weights=False))
    with torch.device("meta"):
        parameters = dict(Decoder(decoder_config).named_parameters(remove_duplicate=False))
    # Drawing every weight would take longer than quantizing them.
    pool = torch.empty(2**20 + 1, dtype=DTYPE).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
    with CheckpointWriter(directory, shard_bytes=2**28, overwrite=True) as writer:
        writer.copy_file(directory / "tokenizer.model")
        writer.write_json("config.json", config)
        for parameter, names in tensor_map(decoder_config).items():
            shape = parameters[parameter].shape
            for name, rows in zip(names, part_rows(decoder_config, parameter, len(names), shape[0]), strict=True):
                size = rows * math.prod(shape[1:])
                tensor = pool.repeat(-(-size // len(pool)))[:size].view(rows, *shape[1:])
                writer.add(name, tensor + parameter.endswith("norm.weight"))
        writer.finish()
    return Checkpoint(directory)


def write_texts(path: Path) -> Path:
    """Texts of more than `SEQLEN` tokens, so that every sequence is as long as it may be."""
    rng = random.Random(0)
    lines = ("".join(rng.choices(TEXT, k=2 * SEQLEN)) for _ in range(SAMPLES))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return path


def quantize(model: Path, output: Path, texts: Path, algorithm: str, scheme: str) -> dict[str, Any]:
    """The report of `warpbus quantize`, run as a program of its own on the CPU."""
    command = [sys.executable, "-c", "from warpbus.cli import main; main()", "quantize", str(model), str(output)]
    command += ["--scheme", scheme, "--algorithm", algorithm, "--device", "cpu", "--json", "--overwrite"]
    if algorithm == "gptq":
        command += ["--calibration", str(texts), "--samples", str(SAMPLES), "--seqlen", str(SEQLEN)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def largest_unit(checkpoint: Checkpoint) -> int:
    """Bytes of the largest of: a layer, the embedding, the head."""
    units: dict[str, int] = {}
    for name in checkpoint.names():
        parts = name.split(".")
        unit = ".".join(parts[:3]) if "layers" in parts else name
        units[unit] = units.get(unit, 0) + checkpoint.nbytes(name)
    return max(units.values())


def gptq_bytes(config: ModelConfig) -> int:
    """What gptq holds on the CPU besides the checkpoint's tensors, in float32.

    A layer, and a copy of it; the states of all calibration tokens and their attention's outputs, in the quantized and
    in the unquantized model; for the widest matrix its moments, its drift and four matrices made of them; for the
    largest one, what it aims at, its columns, and twice more what coordinate descent makes of them; for a batch of
    tokens what the MLP makes of it.
    """
    hidden, ffn, attended = config.hidden_size, config.layers[0].mlp.ffn_size, config.attention.width
    layer = sum(matrix.num_weights for matrix in config.layers[0].matrices)
    states = SAMPLES * SEQLEN * (hidden + attended)
    widest = max(hidden, attended, ffn)
    largest = 2 * hidden * ffn
    batch = 2048 * 5 * ffn
    return 4 * (2 * layer + 2 * states + 6 * widest**2 + 4 * largest + batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e9, help="of the model; 1e9 by default")
    parser.add_argument("--small", action="store_true", help="half the width and vocabulary, for quick runs")
    parser.add_argument("--algorithm", action="append", choices=["rtn", "gptq"], help="rtn alone by default")
    parser.add_argument("--scheme", default="w4a16-g128")
    parser.add_argument("--directory", type=Path, help="where the model is written; the system's by default")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()

    found = []
    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        directory = Path(temporary)
        texts = write_texts(directory / "texts.jsonl")
        write_model(directory / "trifle", settings(0, TRIFLE))
        checkpoint = write_model(directory / "model", settings(options.parameters, SMALL if options.small else SHAPE))
        config = read_config(checkpoint)
        for algorithm in options.algorithm or ["rtn"]:
            base = quantize(directory / "trifle", directory / "out", texts, algorithm, options.scheme)["peak_memory"]
            report = quantize(directory / "model", directory / "out", texts, algorithm, options.scheme)
            unit = largest_unit(checkpoint)
            bound = base + int(SHARE * unit) + (gptq_bytes(config) if algorithm == "gptq" else 0)
            found.append(
                {
                    "algorithm": algorithm,
                    "scheme": options.scheme,
                    "parameters": config.num_parameters,
                    "checkpoint_bytes": checkpoint.total_bytes,
                    "largest_unit_bytes": unit,
                    "program_bytes": base,
                    "peak_bytes": report["peak_memory"],
                    "bound_bytes": bound,
                    "seconds": round(report["seconds"], 1),
                    "versions": report["versions"],
                }
            )
    if options.json:
        print(json.dumps(found))
    else:
        for row in found:
            print(
                f"{row['algorithm']} {row['scheme']}: {row['parameters'] / 1e9:.2f} B parameters, checkpoint "
                f"{row['checkpoint_bytes'] / 1e6:,.0f} MB, largest part {row['largest_unit_bytes'] / 1e6:,.0f} MB: "
                f"peak {row['peak_bytes'] / 1e6:,.0f} MB of {row['bound_bytes'] / 1e6:,.0f} MB allowed, of which the "
                f"program itself is {row['program_bytes'] / 1e6:,.0f} MB; {row['seconds']:.1f} s"
            )
    sys.exit(any(row["peak_bytes"] > row["bound_bytes"] for row in found))


if __name__ == "__main__":
    main()
