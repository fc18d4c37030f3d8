"""Random quantized matrices on the GPU, as the tests of several kernels multiply with."""

import torch

from warpbus.qtensor import QTensor, Scheme


def quantized(scheme: str, n: int, k: int) -> QTensor:
    """A matrix `[n, k]`: codes of every value, float32 scales of 0.001 to 0.021, any zero points if asymmetric."""
    parsed = Scheme.parse(scheme)
    shape = n, parsed.groups(k)
    codes = torch.randint(0, parsed.max_code + 1, (n, k), dtype=torch.uint8, device="cuda")
    scales = torch.rand(shape, device="cuda") * 0.02 + 0.001
    zeros = torch.randint(0, parsed.max_code + 1, shape, dtype=torch.uint8, device="cuda")
    return QTensor.from_codes(parsed, codes, scales, None if parsed.symmetric else zeros)
