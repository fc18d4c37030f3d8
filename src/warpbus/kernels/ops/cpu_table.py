"""`wna16` on a CPU with activations in floating point, by PyTorch's operators; `cpu_codes` rounds them to 8 bits.

Decoding reads the codes themselves, and never a matrix of floating-point weights.

A product of a quantized matrix and a vector is a sum of the matrix's columns, each weighted by an element of the
vector: what `torch.ops.quantized` calls an embedding bag. Its kernels (FBGEMM, compiled at run time for AVX2 and
AVX-512) read rows of 2, 4 or 8 bits and sum in float32, so that

    y[n] = sum over groups g of scale[n, g] * (sum over columns c in g of x[c] * (code[n, c] - zero[n, g]))

is one call for all the inner sums, a bag for each group, and an elementwise product with the scales. A zero point is
one more code of its group, with the weight -sum(x[c]). Nothing is rounded to 16 bits in between.

Every combination of bits, group and symmetry and every n and k take this path on an x86 CPU with AVX2 or AVX-512. One
row of x and a matrix that is in no cache, in float32 (13824 x 2048, 2 cores of a shared AMD EPYC 9005, torch 2.13):

| bits of the scheme | stored in | times as fast as the dense product |
|---|---|---|
| 2 | 2 | 3.5 |
| 3, 4 | 4 | 4 to 5 |
| 5, 6, 8 | 8 | 4 to 6 |

torch's own operators for such weights do not fit. `_weight_int4pack_mm_for_cpu` and `_weight_int8pack_mm` are fast in
bfloat16 alone, where they round x, the scales and the result to 8 bits (0.4 ms for the matrix above; ours takes 1.1);
for float32 they take 22 and 11 ms where the dense product takes 5, and the second knows no groups.
`_dyn_quant_matmul_4bit` quantizes x.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.cuda.memory_size import rounded_up
from warpbus.errors import TensorError
from warpbus.kernels.ops.cpu_codes import stored_bits
from warpbus.kernels.ops.cpu_library import check_operands
from warpbus.kernels.ops.packed import check_weight_only
from warpbus.qtensor import QTensor, Scheme, pack, unpack

_CHUNK = 512  # rows of the weight whose codes lie together: one column of them is what the kernel reads at a time
_ALIGNMENT = 16  # rows; a vector register holds so many float32
_FEW_ROWS = 16  # of x: for more, one dequantization costs less than reading the codes for each row

_Bag = Callable[..., Tensor]


@dataclass(frozen=True)
class CpuTable:
    """A `QTensor` transposed for the CPU; `unpack` gives it back exactly.

    Attributes:
        table: uint8 `[chunks * columns, bytes]`. A row holds the codes of one column for the rows of a chunk, as
            `qtensor.pack` does, then a scale and an offset for all of them: 1 and the negated middle code. With zero
            points each group has one column more, which holds them.
        scales: `[chunks, groups, rows of a chunk]` in the dtype of the `QTensor`'s; 0 beyond the last row.
        scheme, shape: of the `QTensor`.
    """

    table: Tensor
    scales: Tensor
    scheme: Scheme
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.table.nbytes + self.scales.nbytes

    @property
    def columns(self) -> int:
        """Columns of a chunk, those of the zero points included."""
        return len(self.table) // len(self.scales)

    def unpack(self) -> QTensor:
        """The matrix that was packed."""
        n, k = self.shape
        chunks, groups, chunk = self.scales.shape
        bits = stored_bits(self.scheme)
        words = self.table[:, : chunk * bits // 8].contiguous().view(torch.int32)
        codes = unpack(words, bits, chunk).view(chunks, groups, -1, chunk)
        size = k // groups
        parts = [part.permute(0, 3, 1, 2).reshape(chunks * chunk, -1)[:n] for part in codes.split(size, dim=2)]
        scales = self.scales.transpose(1, 2).reshape(chunks * chunk, groups)[:n].contiguous()
        return QTensor.from_codes(self.scheme, parts[0], scales, None if self.scheme.symmetric else parts[1])


def pack_table(weight: QTensor) -> CpuTable | None:
    """Reorder a matrix on the CPU for `table_linear`; None on other CPUs than x86 with AVX2.

    Takes as much memory as the matrix, and a few MB in between.

    Raises:
        TensorError: the weight has a w8a8 scheme.
    """
    check_weight_only("pack_table", weight.scheme)
    bits = stored_bits(weight.scheme)
    if _bag(bits) is None:
        return None
    n, k = weight.shape
    groups = weight.scales.shape[1]
    chunks = -(-n // _CHUNK)
    chunk = rounded_up(-(-n // chunks), _ALIGNMENT)
    size = k // groups + (0 if weight.scheme.symmetric else 1)
    tail = torch.tensor([1.0, -weight.scheme.middle_code], dtype=torch.float32 if bits == 8 else torch.float16)
    code_bytes = chunk * bits // 8
    table = torch.empty(chunks, groups, size, code_bytes + tail.nbytes, dtype=torch.uint8)
    table[..., code_bytes:] = tail.view(torch.uint8)
    scales = weight.scales.new_zeros(chunks, groups, chunk)
    for index in range(chunks):
        part = weight.rows(index * chunk, min(n, (index + 1) * chunk))
        rows = part.shape[0]
        codes = torch.zeros(groups, size, chunk, dtype=torch.uint8)
        codes[:, : k // groups, :rows] = part.codes().view(rows, groups, -1).permute(1, 2, 0)
        if part.zeros is not None:
            codes[:, -1, :rows] = part.zeros.T
        table[index, ..., :code_bytes] = pack(codes, bits).view(torch.uint8)[..., :code_bytes]
        scales[index, :, :rows] = part.scales.T
    return CpuTable(table.flatten(0, 2), scales, weight.scheme, weight.shape)


def table_linear(x: Tensor, weight: CpuTable, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    Few rows of `x` are multiplied by the codes, each as if it were alone: a row has the same bits in every such batch.
    Many rows, and an `x` that wants a gradient, are multiplied by the dequantized weight, a chunk of it at a time.

    Args:
        x: float32, bfloat16 or float16 `[..., k]`, on the CPU.
        weight: `[n, k]`.
        bias: `[n]`, of such a dtype.

    Returns:
        `[..., n]` in the dtype of `x`. Computed in float32 and rounded once; only for many rows of bfloat16 the weights
        are rounded to it, too. The same bits at every run.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    n, k = weight.shape
    check_operands("table_linear", x, weight.shape, bias=bias)
    rows = x.reshape(-1, k)
    few = 0 < len(rows) <= _FEW_ROWS and not (torch.is_grad_enabled() and x.requires_grad)
    out = (_by_codes if few else _by_weights)(rows, weight, bias)
    return out.to(x.dtype).view(*x.shape[:-1], n)


def _by_codes(x: Tensor, weight: CpuTable, bias: Tensor | None) -> Tensor:
    m = len(x)
    chunks, groups, chunk = weight.scales.shape
    grouped = x.float().view(m, groups, -1)
    if not weight.scheme.symmetric:
        grouped = torch.cat((grouped, -grouped.sum(-1, keepdim=True)), dim=-1)
    # All rows of x take their turn at a chunk while its codes are in the cache.
    factors = grouped.expand(chunks, m, groups, -1).reshape(-1).contiguous()  # the kernel looks at no strides
    indices, offsets = _bags(chunks, m, groups, weight.columns)
    sums = _call(weight, indices, offsets, factors).view(chunks, m, groups, chunk)
    out = sums.mul_(weight.scales[:, None]).sum(2)
    out = out.transpose(0, 1).reshape(m, -1)[:, : weight.shape[0]]
    return out if bias is None else out + bias


def _by_weights(x: Tensor, weight: CpuTable, bias: Tensor | None) -> Tensor:
    chunks, groups, chunk = weight.scales.shape
    # Where products of bfloat16 are fast they are the fastest; those of float16 are slower than float32's.
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    x = x.to(dtype)
    indices, _ = _bags(chunks, 1, groups, weight.columns)
    one_each = indices[: weight.columns]
    products = []
    for index, columns in enumerate(indices.split(weight.columns)):
        codes = _call(weight, columns, one_each, None).view(groups, -1, chunk)
        if not weight.scheme.symmetric:
            codes = codes[:, :-1] - codes[:, -1:]
        first, last = index * chunk, min((index + 1) * chunk, weight.shape[0])
        dequantized = codes.mul_(weight.scales[index, :, None]).flatten(0, 1)[:, : last - first]
        added = None if bias is None else bias[first:last].to(dtype)
        products.append(F.linear(x, dequantized.to(dtype).T, added))
    return torch.cat(products, dim=1)


def _call(weight: CpuTable, indices: Tensor, offsets: Tensor, factors: Tensor | None) -> Tensor:
    """Sums of the table's rows `indices` times `factors`, float32; a bag begins at each of `offsets`."""
    bag = _bag(stored_bits(weight.scheme))
    if bag is None:
        raise TensorError("table_linear: the weight was packed for another CPU: pack it here")
    return bag(weight.table, indices, offsets, per_sample_weights=factors)


@functools.lru_cache(maxsize=256)
def _bags(chunks: int, m: int, groups: int, columns: int) -> tuple[Tensor, Tensor]:
    """The table's rows for `m` rows of x, chunk by chunk, and where among them each group begins."""
    rows = torch.arange(chunks * columns, dtype=torch.int32).view(chunks, 1, columns)
    indices = rows.expand(chunks, m, columns).reshape(-1).contiguous()
    return indices, torch.arange(0, len(indices), columns // groups, dtype=torch.int32)


@functools.cache
def _bag(bits: int) -> _Bag | None:
    """torch's kernel for rows of so many bits, where this CPU has a fast one."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    kind = "byte" if bits == 8 else f"{bits}bit"
    bag: _Bag | None = getattr(torch.ops.quantized, f"embedding_bag_{kind}_rowwise_offsets", None)
    return bag
