"""Random quantized matrices for the kernels of the CPU."""

import torch

from warpbus.qtensor import QTensor, Scheme


def random_weight(name: str, n: int, k: int, dtype: torch.dtype = torch.float32) -> QTensor:
    scheme = Scheme.parse(name)
    shape = n, scheme.groups(k)
    codes = torch.randint(0, 2**scheme.bits, (n, k), dtype=torch.uint8)
    zeros = None if scheme.symmetric else torch.randint(0, 2**scheme.bits, shape, dtype=torch.uint8)
    return QTensor.from_codes(scheme, codes, (0.01 * torch.rand(shape) + 0.001).to(dtype), zeros)


def assert_same_weight(found: QTensor, weight: QTensor) -> None:
    assert (found.scheme, found.shape) == (weight.scheme, weight.shape)
    torch.testing.assert_close(found.qweight, weight.qweight, rtol=0, atol=0)
    torch.testing.assert_close(found.scales, weight.scales, rtol=0, atol=0)
    assert (found.zeros is None) == (weight.zeros is None)
    assert weight.zeros is None or torch.equal(found.zeros, weight.zeros)
