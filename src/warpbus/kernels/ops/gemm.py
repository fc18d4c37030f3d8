"""`gemm`: products of 16-bit matrices on tensor cores, with bias and activation, for any sizes and layouts.

Two kernels do the work, and both sum in float32: `gemm/sm90_hgemm.cu` (wgmma, TMA) on Hopper and `gemm/sm80_hgemm.cu`
(mma.sync, cp.async) on every GPU since Ampere. Each chooses its tiles by the shape.
"""

from typing import Any

from torch import Tensor

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.jit import architecture
from warpbus.errors import DeviceError, TensorError, UsageError
from warpbus.kernels.operators import autocast, differentiable, operator
from warpbus.kernels.ops import gemm_sm80, gemm_sm90, gemv
from warpbus.kernels.ops.arguments import ACTIVATIONS, HALVES, check_alike, check_epilogue, check_rank, check_shape
from warpbus.kernels.reference import gemm as reference

VARIANTS = {
    "auto": "the fastest for the shape and the GPU; a single row goes to `gemv`",
    "sm80_hgemm": "mma.sync and cp.async, Ampere and later",
    "sm90_hgemm": "wgmma and TMA, warp-specialised and persistent, Hopper",
    "sm90_wgmma": "wgmma and TMA, one tile a block, Hopper: a step of the ladder",
}


def gemm(
    a: Tensor, b: Tensor, *, bias: Tensor | None = None, activation: str = "none", variant: str = "auto"
) -> Tensor:
    """`activation(a @ b + bias)`.

    Args:
        a, b: `[m, k]` and `[k, n]` of any sizes, float16 or bfloat16, or any dtype under `torch.autocast`; row- or
            column-major without a copy, other strides are copied first.
        bias: `[n]` in the same dtype.
        activation: one of `ACTIVATIONS`, applied in float32; gelu is the exact one.
        variant: one of `VARIANTS`.

    Returns:
        `[m, n]`, contiguous, in the dtype of `a`; summed in float32 and rounded once. The same bits at every run.
        Without an activation it can be differentiated.

    Raises:
        TensorError: other shapes, dtypes or devices.
        UsageError: no such activation or variant, or a gradient is wanted through an activation.
        DeviceError: the variant needs another GPU.
    """
    check_rank("gemm", 2, a=a, b=b)
    a, b, bias = autocast(a), autocast(b), None if bias is None else autocast(bias)
    check_alike("gemm", HALVES, a=a, b=b, **({} if bias is None else {"bias": bias}))
    check_shape("gemm", {"b": (a.shape[1], b.shape[1])}, f"a has {a.shape[1]} columns, and b needs as many rows", b=b)
    check_epilogue("gemm", b.shape[1], bias, activation)
    if variant not in VARIANTS:
        raise UsageError(f"gemm: variant is {variant!r}: give one of {', '.join(VARIANTS)}")
    return _gemm(a, b, bias, activation, variant)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none", variant: str = "auto"
) -> Tensor:
    """`activation(x @ weight.T + bias)` for x `[..., k]`, weight `[n, k]`, bias `[n]`; see `gemm`.

    Returns:
        `[..., n]`, contiguous, in the dtype of `x`.
    """
    if x.dim() == 0:
        raise TensorError("linear: x is a scalar, expected [..., k]: reshape it")
    check_rank("linear", 2, weight=weight)
    flat = x.reshape(-1, x.shape[-1])
    out = gemm(flat, weight.T, bias=bias, activation=activation, variant=variant)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _launch(a: Tensor, b: Tensor, bias: Tensor | None, activation: str, variant: str) -> Tensor:
    if 0 in (a.shape[0], a.shape[1], b.shape[1]):
        return reference.gemm(a, b, bias, activation)
    here = architecture(a.device)
    if variant == "auto":
        if a.shape[0] == 1 and b.stride(0) == 1:
            return gemv.launch(b.T, a[0], bias, activation)[None]
        variant = "sm90_hgemm" if capabilities(here).wgmma else "sm80_hgemm"
    if variant.startswith("sm90") and not capabilities(here).wgmma:
        raise DeviceError(f"gemm: variant {variant} needs sm_90a, {a.device} is {here}: use sm80_hgemm or auto")
    out = a.new_empty(a.shape[0], b.shape[1])
    if variant == "sm90_wgmma":
        if bias is not None or activation != "none":
            raise UsageError("gemm: variant sm90_wgmma has neither bias nor activation: use sm90_hgemm")
        gemm_sm90.matmul(a.contiguous(), b.contiguous(), out)
        return out
    a, b = _dense(a), _dense(b)
    bias = None if bias is None else bias.contiguous()
    launch = gemm_sm90.gemm if variant == "sm90_hgemm" else gemm_sm80.sm80_gemm
    launch(a, b, bias, ACTIVATIONS[activation], out)
    return out


def _dense(matrix: Tensor) -> Tensor:
    """A matrix with one contiguous axis: itself, or a copy."""
    rows, columns = matrix.shape
    if matrix.stride(1) == 1 and matrix.stride(0) >= columns:
        return matrix
    if matrix.stride(0) == 1 and matrix.stride(1) >= rows:
        return matrix
    return matrix.contiguous()


def _fake(a: Tensor, b: Tensor, bias: Tensor | None, activation: str, variant: str) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _reference(a: Tensor, b: Tensor, bias: Tensor | None, activation: str, variant: str) -> Tensor:
    return reference.gemm(a, b, bias, activation)


_gemm = operator(
    "gemm(Tensor a, Tensor b, Tensor? bias, str activation, str variant) -> Tensor",
    cuda=_launch,
    reference=_reference,
    fake=_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, activation, _ = inputs
    if activation != "none":
        raise UsageError(
            f"gemm: there is no gradient through activation {activation!r}: apply it after the product, or compute "
            "under torch.no_grad()"
        )
    ctx.save_for_backward(a, b)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    of_a, of_b, of_bias = ctx.needs_input_grad[:3]
    return (
        _gemm(gradient, b.T, None, "none", "auto") if of_a else None,
        _gemm(a.T, gradient, None, "none", "auto") if of_b else None,
        gradient.sum(0) if of_bias and ctx.has_bias else None,
        None,
        None,
    )


differentiable("gemm", setup=_setup, backward=_backward)
