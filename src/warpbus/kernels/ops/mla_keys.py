"""`mla_keys`: the keys of every head of multi-head latent attention, for prompts."""

from torch import Tensor

from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import HALVES, blocks, check_alike, check_rank, contiguous_aligned, per_dtype
from warpbus.kernels.reference.mla import mla_keys as reference

_KEYS = per_dtype(
    "mla/keys.cu",
    "mla_keys",
    "const ELEMENT* expanded, const ELEMENT* rotary, ELEMENT* out, long long chunks, int heads, int nope, int rope, "
    "int stride, long long rotary_stride",
    HALVES,
)
_CHUNK, _THREADS = 8, 256  # elements of a thread, and threads of a block


def mla_keys(expanded: Tensor, rotary: Tensor, nope: int) -> Tensor:
    """Each head's own features of the keys, and the rotary key that all heads share, one behind the other.

    Args:
        expanded: `[tokens, heads, features]`: of each head the first `nope` features are of the key.
        rotary: `[tokens, rope]`, in the same dtype.
        nope: own features of a key.

    Returns:
        `[tokens, heads, nope + rope]`, contiguous. Where there is no kernel (on a GPU: other dtypes than float16 and
        bfloat16, or numbers of features that are no multiples of 8), torch's operators do the work.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    check_rank("mla_keys", 3, expanded=expanded)
    check_rank("mla_keys", 2, rotary=rotary)
    check_alike("mla_keys", expanded=expanded, rotary=rotary)
    tokens, heads, features = expanded.shape
    if len(rotary) != tokens or not 0 <= nope <= features:
        raise TensorError(
            f"mla_keys: expanded has shape {[tokens, heads, features]}, rotary {list(rotary.shape)}, nope is {nope}: "
            f"expected {tokens} rotary keys, and nope of the {features} features"
        )
    keys: Tensor = _keys(expanded, rotary, nope)
    return keys


def _launch(expanded: Tensor, rotary: Tensor, nope: int) -> Tensor:
    (tokens, heads, features), rope = expanded.shape, rotary.shape[1]
    if expanded.dtype not in HALVES or any(each % _CHUNK for each in (features, nope, rope)):
        return reference(expanded, rotary, nope)
    expanded = contiguous_aligned(expanded)
    if rotary.stride(1) != 1 or rotary.stride(0) % _CHUNK or rotary.data_ptr() % 16:
        rotary = contiguous_aligned(rotary)
    out = expanded.new_empty(tokens, heads, nope + rope)
    chunks = out.numel() // _CHUNK
    if chunks:
        _KEYS[out.dtype](
            blocks((chunks, _THREADS)),
            _THREADS,
            expanded=expanded,
            rotary=rotary,
            out=out,
            chunks=chunks,
            heads=heads,
            nope=nope,
            rope=rope,
            stride=features,
            rotary_stride=rotary.stride(0),
            dependent=True,
        )
    return out


_keys = operator(
    "mla_keys(Tensor expanded, Tensor rotary, int nope) -> Tensor",
    cuda=_launch,
    reference=reference,
    fake=lambda expanded, rotary, nope: expanded.new_empty(*expanded.shape[:2], nope + rotary.shape[1]),
)
