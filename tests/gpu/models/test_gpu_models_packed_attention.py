"""Attention in packed rows by torch's kernel, beside a mask over whole rows in float32."""

import pytest
import torch

from warpbus.models.layers import CausalAttention
from warpbus.models.layers.packed_attention import Extents, can_pack
from warpbus.models.layers.prefixed import PrefixedAttention

pytestmark = pytest.mark.gpu


def packed_rows() -> torch.Tensor:
    """Three rows of 200 tokens: documents of several lengths, of one token too, one whole row, and padding."""
    rows = torch.full((3, 200), -1, dtype=torch.int64)
    for row, sizes in enumerate(((70, 1, 100), (200,), (3, 60, 64, 1))):
        start = 0
        for number, size in enumerate(sizes):
            rows[row, start : start + size] = number
            start += size
    return rows.cuda()


def test_stretches() -> None:
    found = Extents.of(packed_rows())
    assert found.bounds.tolist() == [0, 70, 71, 171, 200, 400, 403, 463, 527, 528, 600]
    assert found.bounds.dtype == torch.int32
    assert found.longest == 200


@pytest.mark.parametrize("prefix", [0, 5, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 128), (8, 2, 128), (6, 1, 64), (4, 2, 40)])
def test_it_is_the_mask(prefix: int, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> None:
    documents = packed_rows()
    shape = documents.shape
    positions = torch.arange(shape[1], device="cuda").expand(shape)
    drawn = torch.Generator("cuda").manual_seed(0)

    def draw(*axes: int) -> torch.Tensor:
        return torch.randn(*axes, size, generator=drawn, device="cuda").to(dtype).requires_grad_()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        context = PrefixedAttention(given[0], given[1], documents) if given else CausalAttention(documents)
        return context.attend(0, q, k, v, positions)

    inputs = [draw(*shape, heads), draw(*shape, kv_heads), draw(*shape, kv_heads)]
    if prefix:
        inputs += [draw(1, prefix, kv_heads), draw(1, prefix, kv_heads)]
    upstream = torch.randn(*shape, heads, size, generator=drawn, device="cuda").to(dtype)
    assert can_pack(inputs[0])
    found = attend(*inputs)
    assert found.dtype == dtype
    found.backward(upstream)
    # In float32 it is the mask.
    wide = [x.detach().float().requires_grad_() for x in inputs]
    expected = attend(*wide)
    assert expected.dtype == torch.float32
    expected.backward(upstream.float())
    pairs = [(found, expected), *((x.grad, y.grad) for x, y in zip(inputs, wide, strict=True))]
    for index, (own, other) in enumerate(pairs):
        assert own is not None
        assert other is not None
        error = (own.float() - other).norm() / other.norm()
        assert float(error) < (1e-2 if dtype == torch.bfloat16 else 2e-3), index


def test_autocast_decides_and_float32_has_the_mask() -> None:
    documents = packed_rows()
    positions = torch.arange(200, device="cuda").expand(3, 200)
    q, k, v = (torch.randn(3, 200, heads, 64, device="cuda") for heads in (4, 2, 2))
    assert not can_pack(q)
    context = CausalAttention(documents)
    plain = context.attend(0, q, k, v, positions)
    assert plain.dtype == torch.float32
    with torch.autocast("cuda", torch.bfloat16):
        assert can_pack(q)
        rounded = context.attend(0, q, k, v, positions)
    assert rounded.dtype == torch.bfloat16
    assert float((rounded - plain).norm() / plain.norm()) < 1e-2
