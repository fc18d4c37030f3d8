"""`moe_mlp` on a CPU: the experts of a mixture of experts with activations in 8 bits, by the C++ kernels in `csrc/cpu`.

Slots are sorted by expert, each chosen expert is read once for all of its tokens, and a token's experts are summed in
the order of its slots. Rounding is that of `cpu_codes`: of the entering rows, and of the inner features.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warpbus.cuda.host_compiler import CpuVariant
from warpbus.errors import TensorError
from warpbus.kernels.ops.cpu_codes import CpuCodes, fuses_gates
from warpbus.kernels.ops.cpu_library import DTYPES, CpuMatrix, Task, as_float, pointer


class _ExpertsTask(Task):
    """`Experts` of csrc/cpu/experts.h."""

    _fields_ = (
        *((name, CpuMatrix) for name in ("gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("x", "experts", "weights", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "slots", "count", "threads")),
    )


@dataclass(frozen=True)
class CpuExperts:
    """The matrices of a layer's experts, of one shape and scheme, one behind the other. Pinned memory works, too.

    Attributes:
        weights: codes `[experts * tiles, bytes]` and scales `[experts * tiles, groups, 16]`; its `shape` is `(n, k)` of
            one expert.
        count: experts.
    """

    weights: CpuCodes
    count: int

    @classmethod
    def stack(cls, parts: Sequence[CpuCodes]) -> "CpuExperts":
        """Copy the matrices of all experts into one.

        Raises:
            TensorError: they differ in shape, scheme or dtype.
        """
        first = parts[0]
        for number, part in enumerate(parts):
            if (part.shape, part.scheme, part.scales.dtype) != (first.shape, first.scheme, first.scales.dtype):
                raise TensorError(
                    f"experts: expert {number} is {list(part.shape)} {part.scheme} {part.scales.dtype}, expert 0 is "
                    f"{list(first.shape)} {first.scheme} {first.scales.dtype}: expected all alike"
                )
        codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
        zeros = None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
        return cls(replace(first, codes=codes, scales=scales, zeros=zeros), len(parts))

    def expert(self, number: int) -> CpuCodes:
        """The matrix of one expert: a view."""
        each = self.weights
        codes, scales = (part.chunk(self.count)[number] for part in (each.codes, each.scales))
        zeros = None if each.zeros is None else each.zeros.chunk(self.count)[number]
        return replace(each, codes=codes, scales=scales, zeros=zeros)


def cpu_moe_mlp(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: CpuExperts,
    down: CpuExperts,
    *,
    residual: Tensor | None = None,
    variant: CpuVariant | None = None,
) -> Tensor:
    """`residual + sum of weights * expert(x)` over each token's experts, where an expert is
    `down @ (silu(gate) * up)`.

    Only the experts of some token are read.

    Args:
        x: float32, bfloat16 or float16 `[tokens, hidden]`, on the CPU. It is rounded to 8 bits; see `cpu_codes`.
        experts: int32 or int64 `[tokens, slots]`, each below `gate_up.count`. A negative one adds nothing.
        weights: `[tokens, slots]`.
        gate_up: of all experts, `[2 * ffn, hidden]` each, the gate first; ffn is a multiple of 16.
        down: of all experts, `[hidden, ffn]` each.
        residual: `[tokens, hidden]`.
        variant: of the kernels; by default the fastest that this CPU runs.

    Returns:
        `[tokens, hidden]` in the dtype of x; computed in float32 and rounded once. The same bits at every run, and for
        a token alone or in any batch.

    Raises:
        TensorError: other shapes, dtypes or devices, or an expert that does not exist.
    """
    _check(x, experts, weights, gate_up, down, residual)
    tokens, slots = experts.shape
    rows, chosen, factors, before = as_float(x), experts.int().contiguous(), as_float(weights), as_float(residual)
    out = torch.empty(x.shape)
    if tokens:
        _ExpertsTask(
            *(gate_up.weights.matrix, down.weights.matrix, pointer(rows), pointer(chosen), pointer(factors)),
            *(pointer(before), pointer(out), tokens, slots, gate_up.count, torch.get_num_threads()),
        ).run("experts", variant)
    return out.to(x.dtype)


def _check(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: CpuExperts, down: CpuExperts, residual: Tensor | None
) -> None:
    (wide, hidden), (back, ffn) = gate_up.weights.shape, down.weights.shape
    if gate_up.count != down.count or wide != 2 * ffn or back != hidden or not fuses_gates(gate_up.weights):
        raise TensorError(
            f"cpu_moe_mlp: gate_up of {gate_up.count} experts {[wide, hidden]}, down of {down.count} {[back, ffn]}: "
            "expected as many experts, [2 * ffn, hidden] and [hidden, ffn], ffn a multiple of 16"
        )
    given = {"x": x, "experts": experts, "weights": weights} | ({} if residual is None else {"residual": residual})
    for name, tensor in given.items():
        if tensor.device.type != "cpu" or tensor.dim() != 2:
            raise TensorError(
                f"cpu_moe_mlp: {name} has shape {list(tensor.shape)} on {tensor.device}, expected two axes on the CPU"
            )
    if x.dtype not in DTYPES or experts.dtype not in (torch.int32, torch.int64):
        raise TensorError(
            f"cpu_moe_mlp: x is {x.dtype} and experts are {experts.dtype}, expected float32, bfloat16 or float16, and "
            "int32 or int64"
        )
    tokens = len(experts)
    expected = {"x": (tokens, hidden), "residual": (tokens, hidden), "weights": tuple(experts.shape)}
    for name, shape in expected.items():
        if name in given and given[name].shape != shape:
            raise TensorError(
                f"cpu_moe_mlp: {name} has shape {list(given[name].shape)}, expected {list(shape)} for {tokens} tokens "
                f"and experts of {hidden} features"
            )
    if experts.numel() and int(experts.max()) >= gate_up.count:
        raise TensorError(f"cpu_moe_mlp: a token has expert {int(experts.max())}, there are {gate_up.count}")
