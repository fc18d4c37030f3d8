"""The int4 and int8 checkpoints of ChatGLM-6B, ChatGLM2-6B and ChatGLM3-6B as their authors publish them: read only.

`quantization_bit` in `config.json` is 4 or 8. A linear layer `prefix` of `out` rows and `in` columns is stored as

    prefix.weight        int8 [out, in], or [out, in / 2] with two signed numbers of 4 bits in a byte
    prefix.weight_scale  float16 [out]

and read as `weight[o, i] = number[o, i] * scale[o]`. In a byte the number of the even column is the high nibble. Only
the four linear layers of a decoder layer are quantized; what is not has the same names without a scale.

A number `n` is the code `n + 2**(bits - 1)` of the symmetric scheme with one scale per row.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.reading import matrix_shape, read_scales, read_tensor, require
from warpbus.qtensor import QTensor, Scheme, Schemes

PARTS = (".weight", ".weight_scale")
_KEY = "quantization_bit"


def detect(config: dict[str, Any]) -> bool:
    """Whether a `config.json` describes this format; 0 there means a model that is not quantized."""
    return bool(config.get(_KEY))


def read_schemes(config: dict[str, Any]) -> Schemes:
    """The scheme of the quantized layers: `w4a16` or `w8a16`.

    Raises:
        CheckpointError: if it is not understood.
    """
    bits: int = require(config, "", _KEY, (4, 8))
    require(config, "", "quantization_embeddings", (False, None))
    return Schemes(Scheme(bits, None))


def is_quantized(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether the linear layer `prefix` is stored quantized."""
    return f"{prefix}.weight_scale" in checkpoint


def from_tensors(checkpoint: Checkpoint, prefix: str, scheme: Scheme) -> QTensor:
    """Read a quantized matrix.

    Raises:
        TensorError: if one of its tensors is missing or has the wrong shape or type.
    """
    out, width = matrix_shape(checkpoint, f"{prefix}.weight")
    stored = read_tensor(checkpoint, f"{prefix}.weight", (out, width), torch.int8)
    scales = read_scales(checkpoint, f"{prefix}.weight_scale", (out,))
    if scheme.bits == 4:
        # A signed nibble and its code differ in the sign bit; ours has the even column in the low nibble.
        flipped = stored.view(torch.uint8) ^ 0x88
        codes, columns = (flipped >> 4) | (flipped << 4), 2 * width
    else:
        codes, columns = stored.view(torch.uint8) ^ 0x80, width
    return QTensor(scheme, _words(codes), scales.reshape(out, 1).contiguous(), None, (out, columns))


def _words(codes: Tensor) -> Tensor:
    """Bytes uint8 `[out, n]` as the words int32 `[out, ceil(n / 4)]` that they make."""
    return F.pad(codes, (0, -codes.shape[1] % 4)).contiguous().view(torch.int32)
