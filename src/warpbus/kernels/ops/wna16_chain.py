"""`wna16_chain`: several `wna16` products one after another, in one launch where the GPU can do so (`wna16/chain.cu`)."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.green import multiprocessors
from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import (
    HALVES,
    aligned,
    blocks,
    check_alike,
    check_projection,
    contiguous_aligned,
)
from warpbus.kernels.ops.packed import STORED_BITS, TILE_ROWS, PackedWeight, check_weight_only, scheme_of
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.kernels.ops.wna16_decode import FEWEST_STAGES, MOST_STAGES, PROBLEM, DecodeVariant, describe
from warpbus.kernels.ops.workspace import counters

MOST_LINKS = 4  # kMostLinks in chain.cu
MOST_ROWS = 4
_NO_LINK = -1
_LINK = (
    "const uint4* codes, const uint32* scales, const uint32* zeros, const ELEMENT* x, const ELEMENT* norm, "
    "const ELEMENT* bias, const ELEMENT* residual, ELEMENT* out, " + PROBLEM + ", int first"
)
_FIELDS = _LINK.split(", ")
_PARAMETERS = Parameters(
    "Chain chain, int* counters",
    Chain=", ".join(f"{field}{number}" for number in range(MOST_LINKS) for field in _FIELDS) + ", int count, int x_bytes",
)
_ABSENT: dict[str, int | None] = {field.split()[-1]: None if "*" in field else 0 for field in _FIELDS}


@dataclass(frozen=True)
class Link:
    """One product of a chain: `residual + activation(norm(x) @ weight.T + bias)`, as `wna16_linear` computes it.

    Attributes:
        weight: `[n, k]`.
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


def wna16_chain(x: Tensor, links: Sequence[Link]) -> list[Tensor]:
    """The results of products of which each takes the result of the one before, the first one x.

    Where the chain `fits`, all of them are one launch; elsewhere they are computed one by one. The bits are the same.

    Args:
        x: `[..., k]` of the first weight, float16 or bfloat16, on the device of all weights.
        links: up to `MOST_LINKS`, of one scheme.

    Returns:
        the result of each link, `[..., n]` or, with swiglu, `[..., n / 2]`.

    Raises:
        TensorError: other shapes, dtypes or devices; schemes that differ; a residual of a later link.
        UsageError: no such activation.
    """
    check_links(x, links)
    rows, scheme = prod(x.shape[:-1]), links[0].weight.scheme
    residuals = [None if isinstance(link.residual, int) else link.residual for link in links]
    results = _chain(
        x.reshape(rows, x.shape[-1]),
        [link.weight.codes for link in links],
        [link.weight.scales for link in links],
        [link.weight.zeros for link in links],
        [link.weight.shape[0] for link in links],
        *(scheme.bits, scheme.group_size or 0),
        [link.bias for link in links],
        [link.norm for link in links],
        [link.eps for link in links],
        [None if residual is None else residual.reshape(rows, -1) for residual in residuals],
        [link.residual if isinstance(link.residual, int) else _NO_LINK for link in links],
        [link.activation == "swiglu" for link in links],
    )
    return [result.view(*x.shape[:-1], result.shape[1]) for result in results]


def check_links(x: Tensor, links: Sequence[Link]) -> None:
    """Raises the errors of `wna16_chain`."""
    if not 0 < len(links) <= MOST_LINKS or len({link.weight.scheme for link in links}) > 1:
        schemes = ", ".join(str(link.weight.scheme) for link in links)
        raise TensorError(f"wna16_chain: expected 1 to {MOST_LINKS} weights of one scheme, got {schemes or 'none'}")
    given = x
    results: list[Tensor] = []  # their shapes, without memory
    for number, link in enumerate(links):
        check_weight_only("wna16_chain", link.weight.scheme)
        residual = link.residual
        if isinstance(residual, int):
            if not 0 <= residual < number:
                raise TensorError(f"wna16_chain: the residual of link {number} is link {residual}: give an earlier one")
            residual = results[residual]
        around = {"bias": link.bias, "norm": link.norm, "residual": residual}
        n, k = link.weight.shape
        check_projection("wna16_chain", n, k, given, link.activation, **around)
        tensors = {name: each for name, each in around.items() if each is not None and not each.is_meta}
        check_alike("wna16_chain", HALVES, x=x, scales=link.weight.scales, **tensors)
        columns = n // 2 if link.activation == "swiglu" else n
        given = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device="meta")
        results.append(given)


def fits(x: Tensor, weights: Sequence[PackedWeight]) -> bool:
    """Whether products of x `[..., k]` with these weights, one after another, are one launch."""
    if not x.is_cuda or not 0 < len(weights) <= MOST_LINKS or len({weight.scheme for weight in weights}) > 1:
        return False
    rows, widest = prod(x.shape[:-1]), max(weight.shape[1] for weight in weights)
    if not 0 < rows <= MOST_ROWS or not capabilities(architecture(x.device)).tma:
        return False
    if any(k % 8 for _, k in (weight.shape for weight in weights)):
        return False
    variant = _variant(weights[0], x.get_device())
    return variant.stages(rows, widest, x.get_device(), streamed=False) >= FEWEST_STAGES


def _variant(weight: PackedWeight, device: int) -> DecodeVariant:
    """How the products of a chain are computed: in the order of `wna16_decode`, so that they have its bits."""
    return replace(DecodeVariant.of(1, weight, device), rounds=1)


@functools.cache
def _kernel(variant: DecodeVariant, dtype: torch.dtype) -> Kernel:
    return variant.unit("wna16/chain.cu", dtype).kernel("wna16_chain", _PARAMETERS)


def _launch(x: Tensor, links: list[Link]) -> list[Tensor]:
    weights = [link.weight for link in links]
    if not fits(x, weights) or any(link.activation == "swiglu" and link.weight.shape[0] % 32 for link in links):
        return _one_by_one(x, links)
    m, device = x.shape[0], x.get_device()
    variant, grid = _variant(weights[0], device), multiprocessors(x.device)
    widest = max(weight.shape[1] for weight in weights)
    stages = min(variant.stages(m, widest, device, streamed=False), MOST_STAGES)
    stage_bytes, others = variant.shared(m, widest, streamed=False)
    x = contiguous_aligned(x)
    copied, results, first = False, list[Tensor](), 0
    arguments: dict[str, Any] = {}
    for number, link in enumerate(links):
        weight, gated, residual, norm = link.weight, link.activation == "swiglu", link.residual, link.norm
        n, k = weight.shape
        if norm is not None and not (norm.is_contiguous() and aligned(norm)):
            norm, copied = norm.clone(memory_format=torch.contiguous_format), True
        out = x.new_empty(m, n // 2 if gated else n)
        fields = {
            **describe(weight, m, gated, stages),
            "x": results[-1] if results else x,
            "norm": norm,
            "bias": None if link.bias is None else link.bias.contiguous(),
            "residual": results[residual] if isinstance(residual, int) else residual,
            "out": out,
            "eps": link.eps,
            "first": first % grid,
        }
        results.append(out)
        first += blocks((n, 2 * TILE_ROWS))
        arguments.update({f"{name}{number}": value for name, value in fields.items()})
    for number in range(len(links), MOST_LINKS):
        arguments.update({f"{name}{number}": absent for name, absent in _ABSENT.items()})
    _kernel(variant, x.dtype)(
        grid,
        variant.threads,
        **arguments,
        counters=counters(x.device, MOST_LINKS),
        count=len(links),
        x_bytes=others - variant.other_bytes,
        shared=stages * stage_bytes + others,
        dependent=not copied,
    )
    return results


def _one_by_one(x: Tensor, links: list[Link]) -> list[Tensor]:
    results: list[Tensor] = []
    for link in links:
        residual = results[link.residual] if isinstance(link.residual, int) else link.residual
        x = wna16_linear(
            x, link.weight, link.bias, norm=link.norm, eps=link.eps, residual=residual, activation=link.activation
        )
        results.append(x)
    return results


def _fake(x: Tensor, codes: list[Tensor], scales: list[Tensor], zeros: list[Tensor | None], n: list[int], *others: Any) -> list[Tensor]:
    return [x.new_empty(x.shape[0], rows // 2 if gated else rows) for rows, gated in zip(n, others[-1], strict=True)]


def _linked(implementation: Callable[[Tensor, list[Link]], list[Tensor]]) -> Callable[..., list[Tensor]]:
    """An implementation of the operator, whose parameters are tensors and numbers, from one that takes links."""

    def run(
        x: Tensor,
        codes: list[Tensor],
        scales: list[Tensor],
        zeros: list[Tensor | None],
        n: list[int],
        bits: int,
        group: int,
        bias: list[Tensor | None],
        norm: list[Tensor | None],
        eps: list[float],
        residual: list[Tensor | None],
        residual_of: list[int],
        gated: list[bool],
    ) -> list[Tensor]:
        scheme, k = scheme_of(bits, group, zeros[0] is None), x.shape[1]
        links = []
        for i, rows in enumerate(n):
            weight = PackedWeight(codes[i], scales[i], zeros[i], scheme, (rows, k))
            added = residual[i] if residual_of[i] == _NO_LINK else residual_of[i]
            links.append(Link(weight, bias[i], norm[i], eps[i], "swiglu" if gated[i] else "none", added))
            k = rows // 2 if gated[i] else rows
        return implementation(x, links)

    return run


_chain = operator(
    "wna16_chain(Tensor x, Tensor[] codes, Tensor[] scales, Tensor?[] zeros, int[] n, int bits, int group, "
    "Tensor?[] bias, Tensor?[] norm, float[] eps, Tensor?[] residual, int[] residual_of, bool[] gated) -> Tensor[]",
    cuda=_linked(_launch),
    reference=_linked(_one_by_one),
    fake=_fake,
)

for _dtype, _two, _bits, _span in itertools.product(HALVES, (False, True), STORED_BITS, (1, 2)):
    if _span == 1 or _bits <= 4:
        _kernel(DecodeVariant(_bits, _two, 8, _span, 1, experts=False), _dtype)
