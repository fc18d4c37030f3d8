"""Launching `wna16/chain.cu`: consecutive products of a decoder layer, for a few tokens, in one launch."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda import driver
from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.green import multiprocessors
from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.kernels.ops.arguments import HALVES, aligned, blocks, contiguous_aligned
from warpbus.kernels.ops.moe_mlp import moe_mlp
from warpbus.kernels.ops.moe_router import CHOICE, moe_route
from warpbus.kernels.ops.packed import STORED_BITS, TILE_COLUMNS, TILE_ROWS, PackedWeight
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.kernels.ops.wna16_decode import FEWEST_STAGES, MOST_STAGES, PROBLEM, DecodeVariant, describe
from warpbus.kernels.ops.workspace import counters
from warpbus.kernels.reference.moe import Scoring

MOST_LINKS = 6  # kMostLinks in chain.cuh
MOST_ROWS = 4
MOST_TOKENS_OF_EXPERTS = 2
_MOST_SLOTS = 48  # kMostSlots
_DENSE, _ROUTER, _SLOTS, _TOKENS = range(4)  # Kind
_LINK = (
    "const uint4* codes, const uint32* scales, const uint32* zeros, const ELEMENT* x, const ELEMENT* norm, "
    f"const ELEMENT* bias, const ELEMENT* residual, ELEMENT* out, {PROBLEM}, int x_stride, int kind, int first"
)
_FIELDS = _LINK.split(", ")
_ROUTING = f"{CHOICE}, const ELEMENT* router, const float* router_bias, float* logits"
_PARAMETERS = Parameters(
    "Chain chain, int* counters",
    Chain=", ".join(
        [
            *(f"{field}{number}" for number in range(MOST_LINKS) for field in _FIELDS),
            _ROUTING,
            "int tokens, int count, int x_bytes",
        ]
    ),
)


def _absent(fields: Sequence[str]) -> dict[str, Any]:
    """Null pointers and zeros for C fields."""
    return {field.split()[-1]: None if "*" in field else 0 for field in fields}


@dataclass(frozen=True)
class ChainLink:
    """One product of a chain: `residual + activation(norm(x) @ weight.T + bias)`, as `wna16_linear` computes it.

    Attributes:
        weight: `[n, k]`; x is the first k columns of what the link before gives.
        bias: `[n]`.
        norm: weight `[k]` of an RMSNorm of x, with `eps`.
        activation: "none" or "swiglu".
        residual: a tensor in the shape of the result, or the number of an earlier link, whose result it is.
    """

    weight: PackedWeight
    bias: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    activation: str = "none"
    residual: Tensor | int | None = None

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"

    @property
    def columns(self) -> int:
        """Of the result."""
        return self.weight.shape[0] // 2 if self.gated else self.weight.shape[0]


@dataclass(frozen=True)
class RoutedExperts:
    """A router and its experts: `x + sum of weights * expert(norm(x))`; see `moe_route` and `moe_mlp`.

    Attributes:
        router: `[experts, hidden]` in the dtype of x; `router_bias` float32 `[experts]`.
        norm: weight `[hidden]` of an RMSNorm of x, with `eps`.
        top_k, scoring, normalized, scale, groups, top_groups, shared: as of `moe_route`.
        gate_up, down: as of `moe_mlp`.
    """

    router: Tensor
    router_bias: Tensor | None
    norm: Tensor
    eps: float
    gate_up: PackedExperts
    down: PackedExperts
    top_k: int
    scoring: Scoring = "sigmoid"
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    shared: bool = False

    @property
    def slots(self) -> int:
        """Experts of a token."""
        return self.top_k + self.shared

    @property
    def columns(self) -> int:
        """Of the result."""
        return self.router.shape[1]


Element = ChainLink | RoutedExperts


def wna16_chain(x: Tensor, elements: Sequence[Element]) -> list[Tensor]:
    """The results of elements of which each takes the result of the one before, the first one x.

    Where the chain `fits`, all of them are one launch; elsewhere they are computed one by one. Results of links are the
    same to the bit; those of experts differ in the order of sums.

    Args:
        x: `[rows, k]`, float16 or bfloat16, on the device of all weights.
        elements: products, and routed experts at most once.

    Returns:
        the result of each, `[rows, columns]`.

    Raises:
        TensorError: other shapes, dtypes or devices; see `wna16_linear`, `moe_route` and `moe_mlp`.
        UsageError: no such activation or scoring.
    """
    return _launch(x, elements) if fits(x, elements) else _one_by_one(x, elements)


def fits(x: Tensor, elements: Sequence[Element]) -> bool:
    """Whether a chain with x `[rows, k]` is one launch."""
    rows = len(x)
    if not x.is_cuda or x.dtype not in HALVES or not 0 < rows <= MOST_ROWS or torch.is_grad_enabled():
        return False
    if not capabilities(architecture(x.device)).tma:
        return False
    weights = [weight for element in elements for weight in _weights(element)]
    experts = [element for element in elements if isinstance(element, RoutedExperts)]
    same = len({weight.scheme for weight in weights}) == 1 and all(weight.dtype == x.dtype for weight in weights)
    whole = all(weight.shape[1] % 8 == 0 for weight in weights)
    links = len(elements) + 2 * len(experts)
    if not same or not whole or links > MOST_LINKS or len(experts) > 1:
        return False
    if any(
        isinstance(each, ChainLink) and each.gated and (experts or each.weight.shape[0] % (2 * TILE_ROWS))
        for each in elements
    ):
        return False
    if experts and not _takes(experts[0], rows):
        return False
    return _ChainMemory.of(x, elements).stages >= FEWEST_STAGES


def _weights(element: Element) -> list[PackedWeight]:
    return [element.weight] if isinstance(element, ChainLink) else [element.gate_up.weights, element.down.weights]


def _takes(experts: RoutedExperts, tokens: int) -> bool:
    """Whether the kernel computes these experts for so many tokens."""
    if experts.gate_up.offloaded is not None or experts.gate_up.count != len(experts.router) + experts.shared:
        return False
    ffn, hidden = experts.down.weights.shape[1], experts.router.shape[1]
    few = tokens <= MOST_TOKENS_OF_EXPERTS and tokens * experts.slots <= _MOST_SLOTS
    return few and ffn % TILE_ROWS == 0 and hidden % 8 == 0 and aligned(experts.router)


@dataclass(frozen=True)
class _ChainMemory:
    """How a launch divides the shared memory of a block.

    Attributes:
        stages: of weights.
        x: bytes of x in the largest link; `routing`: bytes for choosing experts.
        whole: bytes of all.
    """

    variant: DecodeVariant
    stages: int
    x: int
    routing: int
    whole: int

    @classmethod
    def of(cls, x: Tensor, elements: Sequence[Element]) -> "_ChainMemory":
        rows, device = len(x), x.get_device()
        # The order of sums is that of `wna16_decode`, whatever the number of rounds is.
        variant = replace(DecodeVariant.of(1, _weights(elements[0])[0], device), rounds=1)
        step_columns = variant.chunks * TILE_COLUMNS

        def of_x(vectors: int, k: int) -> int:
            return vectors * blocks((k, step_columns)) * step_columns * 2

        sizes, routing = [], 0
        for element in elements:
            if isinstance(element, ChainLink):
                sizes.append(of_x(rows, element.weight.shape[1]))
                continue
            sizes += [of_x(rows, element.columns), of_x(rows * element.slots, element.down.weights.shape[1])]
            routing = 8 * _MOST_SLOTS + 4 * (3 * len(element.router) + element.groups + element.top_k)
        others = max(sizes) + variant.other_bytes + routing
        stages = min((driver.shared_memory_of_block(device) - others) // variant.stage_bytes, MOST_STAGES)
        return cls(variant, stages, max(sizes), routing, others + stages * variant.stage_bytes)


@functools.cache
def _kernel(variant: DecodeVariant, dtype: torch.dtype, *, experts: bool) -> Kernel:
    return variant.unit("wna16/chain.cu", dtype, experts=experts).kernel("wna16_chain", _PARAMETERS)


class _ChainLaunch:
    """The arguments of a launch, link by link."""

    def __init__(self, x: Tensor, memory: _ChainMemory) -> None:
        self.arguments: dict[str, Any] = _absent([*_ROUTING.split(", "), "int tokens"])
        self.count = 0
        self.copied = False  # something that the kernel reads before the kernels ahead have ended
        self._rows, self._stages = len(x), memory.stages
        self._blocks = multiprocessors(x.device)
        self._first = 0

    def constant(self, weight: Tensor | None) -> Tensor | None:
        """A weight of a norm, as the kernel reads it."""
        if weight is None or (weight.is_contiguous() and aligned(weight)):
            return weight
        self.copied = True
        return weight.clone(memory_format=torch.contiguous_format)

    def add(self, weight: PackedWeight | None, x: Tensor, *, kind: int = _DENSE, items: int = 1, **others: Any) -> None:
        """A link. `items` of experts; `others`: fields by their names, those of `_absent` by default."""
        gated = others.pop("gated", False)
        fields = _absent(_FIELDS) | {"m": self._rows if kind == _DENSE else 1, "stages": self._stages}
        if weight is not None:
            fields |= describe(weight, fields["m"], gated, self._stages)
        fields |= {"x": x, "x_stride": x.stride(0), "kind": kind, "first": self._first % self._blocks, **others}
        self.arguments |= {f"{name}{self.count}": value for name, value in fields.items()}
        self.count += 1
        if weight is not None:
            self._first += items * blocks((weight.shape[0], 2 * TILE_ROWS))

    def finish(self) -> dict[str, Any]:
        """All arguments."""
        for number in range(self.count, MOST_LINKS):
            self.arguments |= {f"{name}{number}": value for name, value in _absent(_FIELDS).items()}
        return self.arguments | {"count": self.count}


def _launch(x: Tensor, elements: Sequence[Element]) -> list[Tensor]:
    memory, rows = _ChainMemory.of(x, elements), len(x)
    x = contiguous_aligned(x)
    launch, results = _ChainLaunch(x, memory), list[Tensor]()
    for element in elements:
        out = x.new_empty(rows, element.columns)
        given = results[-1] if results else x
        if isinstance(element, ChainLink):
            residual = element.residual
            launch.add(
                element.weight,
                given,
                norm=launch.constant(element.norm),
                bias=None if element.bias is None else element.bias.contiguous(),
                residual=results[residual] if isinstance(residual, int) else residual,
                out=out,
                eps=element.eps,
                gated=element.gated,
            )
        else:
            _add_experts(launch, element, given, out)
        results.append(out)
    experts = any(isinstance(element, RoutedExperts) for element in elements)
    _kernel(memory.variant, x.dtype, experts=experts)(
        multiprocessors(x.device),
        memory.variant.threads,
        **launch.finish(),
        x_bytes=memory.x,
        counters=counters(x.device, MOST_LINKS),
        shared=memory.whole,
        dependent=not launch.copied,
    )
    return results


def _add_experts(launch: _ChainLaunch, experts: RoutedExperts, x: Tensor, out: Tensor) -> None:
    tokens, (count, hidden), ffn = len(x), experts.router.shape, experts.down.weights.shape[1]
    inner = x.new_empty(tokens * experts.slots, ffn)
    logits = torch.empty(tokens, count, dtype=torch.float32, device=x.device)
    norm = launch.constant(experts.norm)
    chunks = blocks((hidden, TILE_COLUMNS))
    launch.add(None, x, kind=_ROUTER, norm=norm, eps=experts.eps, n=count, k=hidden, chunks=chunks)
    launch.add(experts.gate_up.weights, x, kind=_SLOTS, items=tokens * experts.slots, gated=True, out=inner)
    launch.add(experts.down.weights, inner, kind=_TOKENS, items=tokens, residual=x, out=out)
    launch.arguments |= {
        "experts_of_layer": count,
        "top_k": experts.top_k,
        "groups": experts.groups,
        "top_groups": experts.top_groups,
        "softmax": experts.scoring == "softmax",
        "normalized": experts.normalized,
        "shared_expert": experts.shared,
        "scale": experts.scale,
        "router": experts.router,
        "router_bias": launch.constant(experts.router_bias),
        "logits": logits,
        "tokens": tokens,
    }


def _one_by_one(x: Tensor, elements: Sequence[Element]) -> list[Tensor]:
    results: list[Tensor] = []
    for element in elements:
        given = results[-1] if results else x
        if isinstance(element, ChainLink):
            residual = element.residual
            results.append(
                wna16_linear(
                    given[:, : element.weight.shape[1]],
                    element.weight,
                    element.bias,
                    norm=element.norm,
                    eps=element.eps,
                    residual=results[residual] if isinstance(residual, int) else residual,
                    activation=element.activation,
                )
            )
            continue
        normed, chosen, weights = moe_route(
            given,
            element.router,
            element.router_bias,
            norm=element.norm,
            eps=element.eps,
            top_k=element.top_k,
            scoring=element.scoring,
            normalized=element.normalized,
            scale=element.scale,
            groups=element.groups,
            top_groups=element.top_groups,
            shared=element.shared,
        )
        results.append(
            moe_mlp(normed, chosen, weights, element.gate_up, element.down, residual=given, shared=element.shared)
        )
    return results


for _dtype, _two, _bits, _span in itertools.product(HALVES, (False, True), STORED_BITS, (1, 2)):
    if _span == 1 or _bits <= 4:
        for _experts in (False, True):
            _kernel(DecodeVariant(_bits, _two, 8, _span, 1, experts=False), _dtype, experts=_experts)
