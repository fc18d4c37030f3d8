"""`moe_route`: the router of a mixture of experts, with the norm before it."""

from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.jit import architecture
from warpbus.cuda.parameters import Parameters
from warpbus.errors import TensorError, UsageError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, aligned, blocks, check_alike, check_rank, check_shape
from warpbus.kernels.ops.norm import rms_norm
from warpbus.kernels.reference import moe as reference
from warpbus.kernels.units import unit

CHOICE = (
    "int experts_of_layer, int top_k, int groups, int top_groups, int softmax, int normalized, int shared_expert, "
    "float scale, const int* slots, int* counts"
)
_ROUTE = Parameters(
    "const ELEMENT* x, const ELEMENT* norm, const ELEMENT* weight, const float* bias, ELEMENT* normed, int* experts, "
    "float* weights, int hidden, float eps, Choice c",
    Choice=CHOICE,
)
_CHOOSE = Parameters(
    "const float* logits, const float* bias, int* experts, float* weights, int tokens, Choice c", Choice=CHOICE
)
_UNITS = {dtype: unit("moe/router.cu", ELEMENT=ELEMENTS[dtype]) for dtype in HALVES}
_ROUTES = {dtype: declared.kernel("moe_route", _ROUTE) for dtype, declared in _UNITS.items()}
_CHOOSES = {dtype: declared.kernel("moe_choose", _CHOOSE) for dtype, declared in _UNITS.items()}

_SCORINGS = ("sigmoid", "softmax")
_FEW_TOKENS = 16  # up to which each token's cluster reads the router's weight again
_THREADS, _RANKS = 512, 8  # kThreads in moe/router.cu; the largest cluster that every GPU with clusters can run
_WARPS_THAT_CHOOSE = 4


def moe_route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    top_k: int,
    scoring: reference.Scoring = "sigmoid",
    normalized: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    shared: bool = False,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The experts of each token; see `RouterSpec` in models/layer_spec.py for the router's properties.

    Args:
        x: `[tokens, hidden]`, float16 or bfloat16.
        weight: `[experts, hidden]` in the dtype of `x`.
        bias: float32 `[experts]`, added to the scores for the choice.
        norm: weight `[hidden]` of an RMSNorm that x goes through first, with `eps`.
        shared: each token's first slot is the shared expert, number `experts`, with weight 1.
        slots: int32 `[experts]`, one more with a shared expert: what is returned instead of an expert's number, such as
            its place among `PackedExperts`.
        counts: int32 `[experts]`; the tokens of each expert are added.

    Returns:
        the normed x, of its shape and dtype; the experts, int32 `[tokens, slots]`; their weights, float32 of that
        shape. There are `top_k` slots per token, one more with a shared expert; the best expert comes first. Logits,
        scores and weights are computed in float32.

    Raises:
        TensorError: other shapes, dtypes or devices.
        UsageError: no such scoring.
    """
    if scoring not in _SCORINGS:
        raise UsageError(f"moe_route: scoring is {scoring!r}: give one of {', '.join(_SCORINGS)}")
    check_rank("moe_route", 2, x=x, weight=weight)
    count, hidden = weight.shape
    there = {name: tensor for name, tensor in {"norm": norm}.items() if tensor is not None}
    check_alike("moe_route", HALVES, x=x, weight=weight, **there)
    expected = {"x": (x.shape[0], hidden), "norm": (hidden,), "bias": (count,)}
    check_shape("moe_route", expected, f"the router is {count} x {hidden}", x=x, **there)
    if bias is not None:
        check_shape("moe_route", expected, f"the router is {count} x {hidden}", bias=bias)
        if bias.dtype != torch.float32:
            raise TensorError(f"moe_route: bias is {bias.dtype}, expected float32: convert it with .to()")
    for name, tensor, size in (("slots", slots, count + shared), ("counts", counts, count)):
        if tensor is not None and (tensor.shape != (size,) or tensor.dtype != torch.int32):
            raise TensorError(
                f"moe_route: {name} is {list(tensor.shape)} {tensor.dtype}, expected [{size}] int32: one per expert"
            )
    if not 0 < top_k <= count // groups * top_groups or count % groups or not 0 < top_groups <= groups:
        raise TensorError(
            f"moe_route: {top_k} of {count} experts in the {top_groups} best of {groups} groups: expected groups of "
            "equal size that hold as many experts"
        )
    return _moe_route(
        *(x, weight, bias, norm, eps, top_k, scoring, normalized, scale, groups, top_groups, shared, slots, counts)
    )


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    top_k: int,
    scoring: str,
    normalized: bool,
    scale: float,
    groups: int,
    top_groups: int,
    shared: bool,
    slots: Tensor | None,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, hidden = x.shape
    count = weight.shape[0]
    experts = torch.empty(tokens, top_k + shared, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, top_k + shared, dtype=torch.float32, device=x.device)
    choice: dict[str, Any] = {
        "experts_of_layer": count,
        "top_k": top_k,
        "groups": groups,
        "top_groups": top_groups,
        "softmax": scoring == "softmax",
        "normalized": normalized,
        "shared_expert": shared,
        "scale": scale,
        "slots": slots,
        "counts": counts,
    }
    # The kernel loads the norm and the bias before the kernels ahead have ended.
    constant = all(each is None or each.is_contiguous() for each in (norm, bias))
    bias = None if bias is None else bias.contiguous()
    x, weight = x.contiguous(), weight.contiguous()
    norm = None if norm is None else norm.contiguous()
    if tokens == 0:
        return x.clone(), experts, weights
    room = 4 * (2 * count + groups + top_k)  # bytes of shared memory per token
    if tokens <= _FEW_TOKENS and aligned(x, weight, *(() if norm is None else (norm,))):
        ranks = _RANKS if capabilities(architecture(x.device)).clusters and count >= _RANKS else 1
        normed = x.clone() if norm is None else torch.empty_like(x)
        _ROUTES[x.dtype](
            (ranks, tokens),
            _THREADS,
            x=x,
            norm=norm,
            weight=weight,
            bias=bias,
            normed=normed,
            experts=experts,
            weights=weights,
            hidden=hidden,
            eps=eps,
            **choice,
            shared=hidden * x.element_size() + room + 4 * count,
            cluster=ranks,
            dependent=constant,
        )
        return normed, experts, weights
    normed = x.clone() if norm is None else rms_norm(x, norm, eps)
    _CHOOSES[x.dtype](
        blocks((tokens, _WARPS_THAT_CHOOSE)),
        32 * _WARPS_THAT_CHOOSE,
        # Products of 16-bit numbers are exact in float32, and the sums are float32.
        logits=torch.mm(normed, weight.T, out_dtype=torch.float32),
        bias=bias,
        experts=experts,
        weights=weights,
        tokens=tokens,
        **choice,
        shared=_WARPS_THAT_CHOOSE * room,
        dependent=True,
    )
    return normed, experts, weights


def _fake(x: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    slots = int(others[4]) + int(others[10])  # type: ignore[call-overload]
    return (
        torch.empty_like(x),
        x.new_empty(x.shape[0], slots, dtype=torch.int32),
        x.new_empty(x.shape[0], slots, dtype=torch.float32),
    )


_moe_route = operator(
    "moe_route(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, float eps, int top_k, str scoring, "
    "bool normalized, float scale, int groups, int top_groups, bool shared, Tensor? slots, Tensor(a!)? counts) "
    "-> (Tensor, Tensor, Tensor)",
    cuda=_launch,
    reference=reference.route,
    fake=_fake,
)
