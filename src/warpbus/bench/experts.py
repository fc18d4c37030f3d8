"""`moe`: the experts of one layer, beside torch's grouped product of the same weights in 16 bits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.bench.cases import Benchmark, Case, PeerContender, Plot, Run, normal
from warpbus.bench.ceilings import copy_bandwidth, matrix_rate, precision_rate
from warpbus.bench.quantized import Shelf, random_weight
from warpbus.bench.records import Parameter
from warpbus.cuda.dtype_names import short_name
from warpbus.kernels.ops.grouped_mlp import grouped_mlp
from warpbus.kernels.ops.moe_mlp import moe_mlp
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.kernels.ops.w8a8 import quantize_rows
from warpbus.qtensor import Scheme

_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
_QUICK_TOKENS = (1, 16, 256)
_SCHEME = Scheme.parse("w4a16-g128")
_ROUNDED, _UNQUANTIZED, _FP8 = f"{_SCHEME}+fp8", "16-bit", "w8a8-fp8"
_FORMS = (str(_SCHEME), _ROUNDED, _UNQUANTIZED, _FP8)
"""Of the weights, "+fp8" with activations in FP8; a variant is a shape, which is one with 4 bits and activations in 16
bits, or a shape, a colon and one of the others."""


@dataclass(frozen=True)
class _Experts:
    """The experts of a layer of a model; the shared one is among `experts`, and among the `per_token` of each token."""

    hidden: int
    ffn: int
    experts: int
    per_token: int
    shared: bool = True


SHAPES = {
    "glm-4.7-flash": _Experts(2048, 1536, 65, 5),
    "glm-4.5-air": _Experts(4096, 1408, 129, 9),
    "glm-5": _Experts(6144, 2048, 257, 9),
    "qwen3-30b-a3b": _Experts(2048, 768, 128, 8, shared=False),
}


@dataclass(frozen=True)
class _ExpertWeights:
    """Random experts in the form of each contender: ours, and 16-bit `[experts, in, out]`.

    Attributes:
        multiply: `moe_mlp` or `grouped_mlp` of x, experts and weights.
    """

    multiply: Callable[..., Tensor]
    dense_gate_up: Tensor
    dense_down: Tensor


def _cases(run: Run) -> list[Callable[[], Case]]:
    known = [*SHAPES, *(f"{name}:{form}" for name in SHAPES for form in _FORMS[1:])]
    names = run.choose_variants(known, tuple(SHAPES)[:2])
    shelf = Shelf()
    tokens = run.choose_sizes(_TOKENS, _QUICK_TOKENS)
    return [partial(_case, run, *_form(name), count, shelf) for name in names for count in tokens]


def _form(variant: str) -> tuple[str, str]:
    """The shape and the form of the weights of a variant."""
    name, _, form = variant.partition(":")
    return name, form or _FORMS[0]


def _case(run: Run, name: str, form: str, tokens: int, shelf: Shelf) -> Case:
    dtype = run.dtype or torch.bfloat16
    shape = SHAPES[name]
    experts, weights = _routing(shape, tokens, run.device)
    # Of the sorted rows: the token of each, and where each expert's end.
    order = experts.flatten().argsort(stable=True)
    rows = order // shape.per_token
    ends = experts.flatten().bincount(minlength=shape.experts).cumsum(0).int()
    factors = weights.flatten()[order][:, None]
    supply = shelf.supplier((name, form, dtype), lambda _: _weights(shape, form, dtype, run.device))

    def make() -> tuple[Tensor, _ExpertWeights]:
        return normal(tokens, shape.hidden, run.device, dtype), supply()

    def ours(x: Tensor, each: _ExpertWeights) -> Tensor:
        return each.multiply(x, experts, weights)

    def grouped(x: Tensor, each: _ExpertWeights) -> Tensor:
        gate, up = F.grouped_mm(x[rows], each.dense_gate_up, offs=ends).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, each.dense_down, offs=ends)
        return torch.zeros_like(x).index_add_(0, rows, (y * factors).to(dtype))

    each_expert = 3 * shape.hidden * shape.ffn
    reached = int((experts.flatten().bincount(minlength=shape.experts) > 0).sum())
    bits = {_UNQUANTIZED: 16.0, _FP8: 8.0}.get(form) or _SCHEME.bits_per_weight(shape.ffn)
    moved = int(reached * each_expert * bits / 8) + 2 * tokens * shape.hidden * dtype.itemsize
    flops = 2 * tokens * shape.per_token * each_expert
    rate = precision_rate(run.device, "fp8") if form in (_FP8, _ROUNDED) else matrix_rate(run.device, dtype)
    return Case(
        parameters={"shape": name, "tokens": tokens, "dtype": short_name(dtype), "variant": form},
        metric="time",
        work=moved,
        floor_seconds=max(moved / copy_bandwidth(run.device), flops / rate),
        make=make,
        ours=ours,
        rivals=[PeerContender("torch grouped_mm", torch.__version__, grouped)],
        touched=moved,
    )


def _routing(shape: _Experts, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Experts int32 and weights float32 `[tokens, per_token]`: all routed experts are equally likely."""
    routed = shape.experts - shape.shared
    weights, chosen = torch.rand(tokens, routed, device=device).topk(shape.per_token - shape.shared, dim=1)
    if shape.shared:
        chosen, weights = F.pad(chosen, (1, 0), value=routed), F.pad(weights, (1, 0), value=1.0)
    return chosen.int().contiguous(), weights.contiguous()


def _weights(shape: _Experts, form: str, dtype: torch.dtype, device: torch.device) -> _ExpertWeights:
    sides = (2 * shape.ffn, shape.hidden), (shape.hidden, shape.ffn)
    if form in _FORMS[:2]:
        return _packed_weights(shape, sides, dtype, device, torch.float8_e4m3fn if form == _ROUNDED else None)
    gate_up, down = (normal(shape.experts * n, k, device, dtype, std=k**-0.5).view(-1, n, k) for n, k in sides)
    dense = gate_up.transpose(1, 2), down.transpose(1, 2)
    if form == _UNQUANTIZED:
        return _ExpertWeights(partial(grouped_mlp, gate_up=gate_up, down=down), *dense)
    values, scales = zip(
        *(quantize_rows(each.flatten(0, 1), torch.float8_e4m3fn) for each in (gate_up, down)), strict=True
    )
    codes = values[0].view_as(gate_up), values[1].view_as(down)
    of_rows = scales[0].view(shape.experts, -1), scales[1].view(shape.experts, -1)
    return _ExpertWeights(partial(grouped_mlp, gate_up=codes[0], down=codes[1], scales=of_rows), *dense)


def _packed_weights(
    shape: _Experts,
    sides: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    device: torch.device,
    activation_dtype: torch.dtype | None,
) -> _ExpertWeights:
    packed, dense = [], []
    for n, k in sides:
        parts = [random_weight(_SCHEME, n, k, device) for _ in range(shape.experts)]
        packed.append(PackedExperts.stack([pack(part, dtype) for part in parts]))
        dense.append(torch.stack([part.dequantize(dtype) for part in parts]).transpose(1, 2))
    multiply = partial(
        moe_mlp, gate_up=packed[0], down=packed[1], shared=shape.shared, activation_dtype=activation_dtype
    )
    return _ExpertWeights(multiply, dense[0], dense[1])


def _with(*tokens: int) -> Callable[[Mapping[str, Parameter]], bool]:
    return lambda case: case["tokens"] in tokens


MOE = Benchmark(
    name="moe",
    title="The experts of one layer",
    cases=_cases,
    plot=Plot(x="tokens", x_label="tokens", panels=("shape", "variant")),
    needs_gpu=True,
    means={"1 to 16 tokens": _with(1, 4, 16), "64 tokens and more": _with(64, 256, 1024, 4096)},
)
