"""What formats of the cache of latents (MLA) cost a small model in KL and perplexity, on text that is new to it.

    python benchmarks/latent_cache.py TEXT
    python benchmarks/latent_cache.py TEXT --steps 600 --threads 2

There is no small published model with multi-head latent attention: this one, of 1.5 million parameters over bytes, is
trained on the first nine tenths of TEXT in some minutes on a CPU, in pieces as long as those that are measured. Its
latents have 256 features, two groups of the FP8 format, its rotary keys 32. Latents and rotary keys are rounded before
any token attends to them. One row is the format of the engine, by its reference; the others are simulated. Prints a
table in Markdown.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.kernels.reference.latent_cache import GROUP, dequantize, quantize, token_bytes
from warpbus.models import SHAPES, Decoder, LatentAttentionSpec, MLPSpec, random_model
from warpbus.models.layers import LatentAttention

RANK, ROPE = 256, 32
ROWS, LENGTH = 8, 128  # of a training step
VALIDATED = 120  # texts of LENGTH bytes
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

Rounding = Callable[[Tensor], Tensor]


def model_to_train() -> Decoder:
    """Three dense layers over bytes, with random weights."""
    shape = SHAPES["glm-4.7-flash"]
    attention = LatentAttentionSpec(6, 96, RANK, nope_dim=32, rope_dim=ROPE, value_dim=32, norm_eps=1e-6)
    layer = replace(shape.layers[0], hidden_size=160, attention=attention, mlp=MLPSpec(480))
    rope = replace(shape.rope, rotary_dim=ROPE)
    config = replace(shape, vocab_size=256, layers=(layer,) * 3, rope=rope)
    model = random_model(config, None, "cpu", torch.float32)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.7 * parameter.shape[1] ** -0.5)
    return model


def train(model: Decoder, text: Tensor, steps: int) -> None:
    """AdamW with a cosine schedule; prints the loss now and then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.05)
    begin = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        starts = torch.randint(len(text) - LENGTH - 1, (ROWS,)).tolist()
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}, {time.monotonic() - begin:.0f} s", flush=True)


def rounded(x: Tensor, dtype: torch.dtype, group: int | None = None, *, power_of_two: bool = False) -> Tensor:
    """Vectors in codes with one scale per `group` features (None: all)."""
    groups = x.unflatten(-1, (-1, group or x.shape[-1]))
    scales = (groups.abs().amax(-1, keepdim=True) / LARGEST[dtype]).clamp_min(2.0**-24)
    if power_of_two:
        scales = scales.log2().ceil().exp2()
    ratios = groups / scales
    codes = ratios.round() if dtype == torch.int8 else ratios.clamp(-448, 448).to(dtype).float()
    return (codes * scales).flatten(-2)


def bfloat16(x: Tensor) -> Tensor:
    """In 16 bits."""
    return x.bfloat16().float()


def apart(x: Tensor, latent: Rounding, rotary: Rounding = bfloat16) -> Tensor:
    """Latent and rotary key, rounded in different ways."""
    return torch.cat((latent(x[..., :RANK]), rotary(x[..., RANK:])), dim=-1)


def of_engine(x: Tensor) -> Tensor:
    """As with `--kv-cache-dtype fp8`."""
    flat = x.flatten(0, -2).bfloat16()
    return dequantize(quantize(flat, RANK), RANK, ROPE, torch.bfloat16).float().view_as(x)


E4M3 = torch.float8_e4m3fn
# What a token takes with 512 features, rotary keys of 64 and float32 scales, and the rounding.
FORMATS: dict[str, tuple[int, Rounding]] = {
    "bfloat16": (1152, bfloat16),
    "e4m3, one scale for both": (580, partial(rounded, dtype=E4M3)),
    "e4m3, a scale for each": (
        584,
        partial(apart, latent=partial(rounded, dtype=E4M3), rotary=partial(rounded, dtype=E4M3)),
    ),
    "e4m3, one scale; rotary key in 16 bits": (644, partial(apart, latent=partial(rounded, dtype=E4M3))),
    "e4m3, groups of 128; rotary key in 16 bits": (
        656,
        partial(apart, latent=partial(rounded, dtype=E4M3, group=GROUP)),
    ),
    "the same, scales powers of two: `fp8`": (token_bytes(512, 64, torch.bfloat16), of_engine),
    "int8, one scale for both": (580, partial(rounded, dtype=torch.int8)),
    "int8, groups of 128; rotary key in 16 bits": (
        656,
        partial(apart, latent=partial(rounded, dtype=torch.int8, group=GROUP)),
    ),
}


@torch.no_grad()
def log_probabilities(model: Decoder, rows: Tensor) -> Tensor:
    """float64 `[texts, bytes, 256]`."""
    return torch.cat([model(part[:, :-1]).double().log_softmax(-1) for part in rows.split(20)])


def measure(model: Decoder, rows: Tensor) -> None:
    """Print a row per format."""
    exact, expand = log_probabilities(model, rows), LatentAttention.expand
    print("\n| cache | bytes of a token | relative error | KL | agrees | perplexity |\n|---|---|---|---|---|---|")
    for name, (size, rounding) in FORMATS.items():
        errors = []

        def through_cache(attention: LatentAttention, latent: Tensor) -> tuple[Tensor, Tensor]:
            stored = rounding(latent)  # noqa: B023
            errors.append(((stored - latent).norm() / latent.norm()).item())  # noqa: B023
            return expand(attention, stored)

        LatentAttention.expand = through_cache
        found = log_probabilities(model, rows)
        LatentAttention.expand = expand
        divergence = (exact.exp() * (exact - found)).sum(-1).mean().item()
        agrees = (found.argmax(-1) == exact.argmax(-1)).double().mean().item()
        perplexity = math.exp(-found.gather(2, rows[:, 1:, None]).mean().item())
        error = sum(errors) / len(errors)
        print(f"| {name} | {size} | {error:.2%} | {divergence:.6f} | {agrees:.2%} | {perplexity:.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path, help="some 100,000 bytes or more")
    parser.add_argument("--steps", type=int, default=600, help="of training (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    text = torch.tensor(list(options.text.read_bytes()))
    end = len(text) * 9 // 10
    model = model_to_train()
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    train(model, text[:end], options.steps)
    measure(model, text[end : end + VALIDATED * (LENGTH + 1)].view(VALIDATED, LENGTH + 1))


if __name__ == "__main__":
    main()
