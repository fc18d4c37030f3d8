"""What types of KV cache cost glm-poet in perplexity and KL, on poems that it was not trained on.

    python benchmarks/kv_cache.py
    python benchmarks/kv_cache.py --documents 20

Keys (after rotary positions) and values are rounded before any token attends to them, also to those of the same
prompt. The first rows are the codes of the engine's caches; the others are 4-bit codes that it does not have, which are
simulated. All are measured twice: on the poems as conversations, and on the poems joined to texts of as many tokens as
the model's context holds. Prints a table in Markdown.
"""

import argparse
import copy
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from warpbus.demo import data_path, model_path
from warpbus.evaluation.likelihood import Score, score
from warpbus.formats import Checkpoint
from warpbus.kernels.reference.cache import INT4, hadamard, quantize
from warpbus.models import Decoder, load_model
from warpbus.models.documents import Document, read_documents
from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer

Rounding = Callable[[Tensor], Tensor]


def cached(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors `[..., head_dim]` as they are read from the engine's cache of a dtype."""
    codes, scales = quantize(x, dtype)
    if dtype != INT4:
        return (codes.float() * scales[..., None]).to(x.dtype)
    numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).float() - 7.5
    return hadamard(numbers * scales[..., None]).to(x.dtype)


def four_bits(x: Tensor, *, rotated: bool, group: int | None, zero_point: bool) -> Tensor:
    """Vectors rounded to 16 levels per group of dimensions (None: all)."""
    wide = hadamard(x.float()) if rotated else x.float()
    groups = wide.unflatten(-1, (-1, group or wide.shape[-1]))
    if zero_point:
        low = groups.amin(-1, keepdim=True)
        step = ((groups.amax(-1, keepdim=True) - low) / 15).clamp_min(1e-30)
        rounded = ((groups - low) / step).round() * step + low
    else:
        step = (groups.abs().amax(-1, keepdim=True) / 8).clamp_min(1e-30)
        rounded = (((groups / step).floor() + 8).clamp(0, 15) - 7.5) * step
    found = rounded.flatten(-2)
    return (hadamard(found) if rotated else found).to(x.dtype)


CACHES: dict[str, Rounding] = {
    "int8": partial(cached, dtype=torch.int8),
    "fp8": partial(cached, dtype=torch.float8_e4m3fn),
    "int4": partial(cached, dtype=INT4),
    **{
        f"4 bits, {'rotated' if rotated else 'not rotated'}, "
        f"{f'groups of {group}' if group else 'one scale'}{', zero point' if zero_point else ''}": partial(
            four_bits, rotated=rotated, group=group, zero_point=zero_point
        )
        for rotated in (False, True)
        for group in (None, 32)
        for zero_point in (False, True)
        if (rotated, group, zero_point) != (True, None, False)  # int4
    },
}


class Rounded:
    """Stands for the scales of a checkpoint: all keys and values are rounded."""

    def __init__(self, rounding: Rounding) -> None:
        self._rounding = rounding

    def rounded(self, layer: int, k_bthd: Tensor, v_bthd: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as they are read from the cache."""
        return self._rounding(k_bthd), self._rounding(v_bthd)


def measure(model: Decoder, documents: Sequence[Document]) -> dict[str, Score]:
    """The scores by the name of the cache; the first one is the model's with keys and values as they are."""
    models = {"unquantized": model}
    for name, rounding in CACHES.items():
        models[name] = copy.copy(model)
        models[name].kv_scales = Rounded(rounding)  # type: ignore[assignment]
    return score(models, documents)


def poems_as_text(path: Path) -> str:
    """The poems of a .jsonl of conversations, one behind the other."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(json.loads(line)["messages"][-1]["content"] for line in lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100, help="poems at most, and texts of the context's length")
    limit = parser.parse_args().documents
    checkpoint, tokenizer = Checkpoint(model_path()), load_tokenizer(model_path())
    model = load_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    template = find_template(model_path(), checkpoint.config, tokenizer)
    poems, length = data_path("validation.jsonl"), model.config.max_context
    with tempfile.TemporaryDirectory() as folder:
        joined = Path(folder, "poems.txt")
        joined.write_text(poems_as_text(poems), encoding="utf-8")
        found = [
            measure(model, read_documents(path, tokenizer, template, length=length, limit=limit))
            for path in (poems, joined)
        ]
    heads = [
        f"{what}, {scores['unquantized'].tokens:,} tokens: perplexity | KL | agrees"
        for what, scores in zip(("poems", "joined"), found, strict=True)
    ]
    print(f"| KV cache | {' | '.join(heads)} |")
    print("|---|---|---|---|---|---|---|")
    for name in found[0]:
        cells = [
            text
            for each in (scores[name] for scores in found)
            for text in (f"{each.perplexity:.2f}", f"{each.divergence:.4f}", f"{each.agreement:.1%}")
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
