"""The loops of quantization on the CPU: against float64 and textbook GPTQ, and what the operators refuse."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import SchemeError, TensorError, UsageError
from warpbus.kernels.ops import gptq as ops
from warpbus.kernels.ops.gptq import clip_search
from warpbus.kernels.reference import gptq as reference
from warpbus.kernels.reference.grid import Grid, fit, search
from warpbus.qtensor import Scheme


def round_columns(weight, *others, run=ops.round_columns):
    """The codes less their zero points, and the errors."""
    centred, errors = (torch.full_like(weight, float("nan")) for _ in range(2))
    run(weight, *others, centred, errors)
    return centred, errors


def round_again(gradient, *others, run=ops.round_again):
    """The changes."""
    changes = torch.full_like(gradient, float("nan"))
    run(gradient, *others, changes)
    return changes


def fit_scales(gradient, centred, members, *others, run=ops.fit_scales):
    """The changes; the gradient is that of all columns."""
    own = gradient[:, members]
    changes = torch.full_like(own, float("nan"))
    run(own, centred, members, *others, changes)
    return changes


class Block:
    """A block of columns with grids on which codes are well spread, negative scales among them."""

    def __init__(self, parts, columns, rows, max_code=15, seed=0, groups=3, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        self.max_code = max_code
        self.weight = torch.randn(parts, columns, rows, generator=generator).to(dtype)
        self.target = self.weight + 0.1 * torch.randn(parts, columns, rows, generator=generator)
        size = (0.3 + torch.rand(parts, groups, rows, generator=generator)) * 6 / (max_code + 1)
        sign = torch.randint(0, 2, size.shape, generator=generator) * 2 - 1
        self.scales = (size * sign).bfloat16().to(dtype)
        self.zeros = torch.randint(0, max_code + 1, size.shape, generator=generator).to(dtype)
        self.groups = torch.randint(0, groups, (columns,), generator=generator, dtype=torch.int32)
        self.corner = 0.1 * torch.randn(columns, columns, generator=generator).to(dtype)
        x = torch.randn(3 * columns, columns, generator=generator).to(dtype)
        self.moments = x.T @ x / len(x)
        shape = parts, columns, rows
        self.centred = torch.randint(0, max_code + 1, shape, generator=generator) - self.zeros[:, self.groups.long()]

    def columns(self, change=lambda tensor: tensor):
        return *map(change, (self.weight, self.target)), self.corner, *self.grid(change)

    def grid(self, change=lambda tensor: tensor):
        return change(self.scales), change(self.zeros), self.groups, self.max_code

    def values(self):
        return self.centred * self.scales[:, self.groups.long()]

    def gradient(self):
        return torch.einsum("ij,pjr->pir", self.moments, self.weight - self.values())


def test_round_columns_is_what_its_contract_says():
    block = Block(2, 9, 3, dtype=torch.float64)
    centred, errors = round_columns(*block.columns(), run=reference.round_columns)
    for part in range(2):
        for row in range(3):
            for j in range(9):
                group = block.groups[j]
                scale, zero = block.scales[part, group, row], block.zeros[part, group, row]
                wanted = block.target[part, j, row] + errors[part, :j, row] @ block.corner[:j, j]
                code = min(max(round(float(wanted / scale)) + float(zero), 0), 15)
                assert centred[part, j, row] == code - zero
                assert errors[part, j, row] == pytest.approx(float(block.weight[part, j, row] - (code - zero) * scale))


@pytest.mark.parametrize("activation_order", [False, True])
def test_round_columns_with_the_unit_factor_is_textbook_gptq(activation_order):
    generator = torch.Generator().manual_seed(3)
    columns, rows, size = 256, 24, 64
    x = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64)
    x *= torch.rand(columns, generator=generator, dtype=torch.float64).mul(3).exp()
    moments = x.T @ x / len(x)
    order = moments.diagonal().argsort(descending=True) if activation_order else torch.arange(columns)
    moments = moments[order][:, order]
    weight = torch.randn(columns, rows, generator=generator, dtype=torch.float64)
    scales = 0.2 + 0.2 * torch.rand(columns // size, rows, generator=generator, dtype=torch.float64)
    groups = (order // size).int()

    # The textbook: the Cholesky factor of the inverse, the error divided by its diagonal, all columns to come updated.
    factor = torch.linalg.cholesky(torch.linalg.inv(moments), upper=True)
    left, expected = weight.clone(), torch.empty(columns, rows, dtype=torch.uint8)
    for j in range(columns):
        scale = scales[groups[j]]
        code = ((left[j] / scale).round() + 8).clamp(0, 15)
        expected[j] = code
        left[j + 1 :] -= torch.outer(factor[j, j + 1 :], (left[j] - (code - 8) * scale) / factor[j, j])

    # Ours: the unit factor of the moments themselves, H = C D C^T, and the errors of the original weights.
    lower = torch.linalg.cholesky(moments.flip(0, 1)).flip(0, 1)
    unit = lower / lower.diagonal()
    zeros = torch.full_like(scales, 8)
    codes, errors = torch.empty_like(expected), torch.empty_like(weight)
    for start in range(0, columns, 128):
        block = slice(start, start + 128)
        target = weight[block] + unit[:start, block].T @ errors[:start]
        volumes = weight[None, block], target[None]
        grid = scales[None], zeros[None], groups[block], 15
        centred, left = round_columns(*volumes, unit[block, block], *grid, run=reference.round_columns)
        codes[block], errors[block] = centred[0] + 8, left[0]
    assert torch.equal(codes, expected)


def test_round_again_is_what_its_contract_says():
    block = Block(2, 9, 3, seed=1, dtype=torch.float64)
    gradient, centred = block.gradient(), block.centred.clone()
    changes = round_again(gradient, block.moments, centred, *block.grid(), run=reference.round_again)
    for part in range(2):
        for row in range(3):
            for j in range(9):
                group = block.groups[j]
                scale, zero = block.scales[part, group, row], block.zeros[part, group, row]
                slope = gradient[part, j, row] - block.moments[:j, j] @ changes[part, :j, row]
                old = block.centred[part, j, row]
                wanted = old * scale + slope / block.moments[j, j]
                new = min(max(round(float(wanted / scale)) + float(zero), 0), 15) - zero
                assert centred[part, j, row] == new
                assert changes[part, j, row] == (new - old) * scale


def loss(block):
    left = block.weight - block.values()
    return torch.einsum("pir,ij,pjr->pr", left, block.moments, left)


def test_neither_rounding_again_nor_fitting_scales_makes_it_worse():
    block = Block(3, 32, 20, seed=2)
    losses = [loss(block)]
    for _ in range(2):
        round_again(block.gradient(), block.moments, block.centred, *block.grid())
        losses.append(loss(block))
        for group in range(3):
            members = (block.groups == group).nonzero()[:, 0]
            corner = block.moments[members][:, members]
            before = block.values()[:, members]
            scales = block.scales[:, group]
            delta = fit_scales(block.gradient(), block.centred, members, corner, scales, torch.bfloat16)
            assert torch.allclose(block.values()[:, members], before + delta, atol=1e-5)
            assert torch.equal(scales.bfloat16().float(), scales)
            losses.append(loss(block))
    for after, before in zip(losses[1:], losses, strict=False):
        assert (after <= before * (1 + 1e-5)).all()
    assert losses[-1].sum() < 0.5 * losses[0].sum()


def test_a_fitted_scale_is_the_best_one():
    block = Block(1, 16, 8, seed=4, groups=1, dtype=torch.float64)
    members = torch.arange(16)
    given = block.gradient(), block.centred, members, block.moments, block.scales[:, 0], torch.float64
    fit_scales(*given, run=reference.fit_scales)
    best = loss(block)
    for factor in (0.999, 1.001):
        block.scales *= factor
        assert (loss(block) > best).all()
        block.scales /= factor


def test_a_scale_stays_where_no_change_helps():
    block = Block(1, 16, 4, seed=5, groups=1)
    block.centred[..., 0] = 0  # no code, no slope, no curvature
    block.weight[..., 1] = block.values()[..., 1]  # already exact
    before = block.scales.clone()
    members = torch.arange(16)
    delta = fit_scales(block.gradient(), block.centred, members, block.moments, block.scales[:, 0], torch.bfloat16)
    assert torch.equal(block.scales[..., :2], before[..., :2])
    assert (delta[..., :2] == 0).all()
    assert (block.scales[..., 2:] != before[..., 2:]).any()


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_a_row_depends_on_no_other(rows):
    block = Block(3, 40, rows, seed=6)
    codes, errors = round_columns(*block.columns())
    gradient, centred, scales = block.gradient(), block.centred.clone(), block.scales.clone()
    changes = round_again(gradient, block.moments, centred, *block.grid())
    for part in range(3):
        for row in range(0, rows, 5):
            own = (slice(part, part + 1), slice(None), slice(row, row + 1))
            alone = round_columns(*block.columns(lambda tensor, own=own: tensor[own].clone()))
            assert torch.equal(alone[0], codes[own])
            assert torch.equal(alone[1], errors[own])
            again = block.centred[own].clone()
            grid = block.grid(lambda tensor, own=own: tensor[own].clone())
            assert torch.equal(round_again(gradient[own].clone(), block.moments, again, *grid), changes[own])
            assert torch.equal(again, centred[own])
    members = torch.arange(0, 40, 3)
    corner = block.moments[members][:, members]
    deltas = fit_scales(gradient, block.centred, members, corner, scales[:, 0], torch.float16)
    for part in range(3):
        own = slice(part, part + 1)
        alone = block.scales[own, 0].clone()
        assert torch.equal(
            fit_scales(gradient[own], block.centred[own], members, corner, alone, torch.float16), deltas[own]
        )
        assert torch.equal(alone, scales[own, 0])


def test_matrices_give_the_bits_that_they_give_alone():
    """Two parts of each of three matrices, which have corners, groups and members of their own."""
    each = [Block(2, 40, 7, seed=seed) for seed in (20, 21, 22)]
    alone = [round_columns(*block.columns()) for block in each]
    stacks = [torch.cat([getattr(block, name) for block in each]) for name in ("weight", "target")]
    corner, moments, groups = (torch.stack([getattr(block, name) for block in each]) for name in KINDS)
    scales, zeros = (torch.cat([getattr(block, name) for block in each]) for name in ("scales", "zeros"))
    grid = scales, zeros, groups, 15
    for index, found in enumerate(round_columns(*stacks, corner, *grid)):
        assert torch.equal(found, torch.cat([pair[index] for pair in alone]))
    gradient, centred = (torch.cat(tensors) for tensors in zip(*((b.gradient(), b.centred) for b in each), strict=True))
    expected = torch.cat([round_again(b.gradient(), b.moments, b.centred.clone(), *b.grid()) for b in each])
    assert torch.equal(round_again(gradient, moments, centred.clone(), *grid), expected)
    members = torch.stack([torch.arange(first, 40, 3)[:13] for first in range(3)])
    corners = torch.stack([b.moments[own[:, None], own] for b, own in zip(each, members, strict=True)])
    near = torch.cat([b.gradient()[:, own] for b, own in zip(each, members, strict=True)])
    changes, fitted = torch.empty_like(near), scales[:, 1].clone()
    ops.fit_scales(near, centred, members, corners, fitted, torch.bfloat16, changes)
    for index, block in enumerate(each):
        own, single = slice(2 * index, 2 * index + 2), block.scales[:, 1].clone()
        given = block.gradient(), block.centred, members[index], corners[index], single, torch.bfloat16
        assert torch.equal(changes[own], fit_scales(*given))
        assert torch.equal(fitted[own], single)


def test_matrices_that_do_not_share_the_parts_evenly_are_refused():
    block = Block(3, 4, 2)
    corner, groups = block.corner.expand(2, 4, 4).contiguous(), block.groups.expand(2, 4).contiguous()
    with pytest.raises(TensorError, match=r"^round_columns: 3 parts of 2 matrices: give as many parts of each matrix"):
        round_columns(*replaced(block.columns(), corner=corner, groups=groups))
    with pytest.raises(TensorError, match=r"^round_columns: groups has shape \[4\], expected \[2, 4\]"):
        round_columns(*replaced(block.columns(), corner=corner))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [32, 96])
def test_clip_search_is_the_search_of_the_grid(size, symmetric):
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(13, 96, generator=generator).half()
    importance = torch.rand(96, generator=generator)
    groups, costs = weight.float().unflatten(1, (-1, size)), importance.unflatten(0, (-1, size))
    scheme = Scheme(3, None, symmetric)
    expected = search(groups, scheme, torch.bfloat16, costs)
    found = clip_search(weight, importance, size, 3, symmetric, torch.bfloat16)
    assert torch.equal(found[0], expected.scales)
    assert torch.equal(found[1], expected.zeros)
    full = fit(groups, scheme, torch.bfloat16)
    assert (expected.error(groups, scheme, costs) <= full.error(groups, scheme, costs)).all()
    assert (expected.scales != full.scales).any()


@pytest.mark.parametrize("columns", [64, 4096])
def test_an_asymmetric_search_finds_the_zero_points(columns):
    # The two greatest weights of a group have one sign, so that the full range has a zero point that is no good.
    weight = torch.randn(40, columns, generator=torch.Generator().manual_seed(8))
    weight[:, ::64], weight[:, 1::64] = 4.0, 3.0
    groups, costs = weight.unflatten(1, (-1, 64)), torch.ones(columns // 64, 64)
    scheme = Scheme(2, None, False)
    found = search(groups, scheme, torch.float32, costs).error(groups, scheme, costs)
    every = [
        Grid(torch.full_like(found, 0.02 * step), torch.full_like(found, float(zero))).error(groups, scheme, costs)
        for step in range(20, 120)
        for zero in range(4)
    ]
    assert found.sum() <= 1.01 * torch.stack(every).amin(0).sum()


def test_nothing_to_do():
    for parts, columns, rows in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        block = Block(parts, max(columns, 1), rows)
        corner = block.corner[:columns, :columns]
        grid = block.scales, block.zeros, block.groups[:columns], 15
        empty = block.weight[:, :columns]
        codes, errors = round_columns(empty, empty, corner, *grid)
        assert codes.shape == errors.shape == round_again(empty, corner, empty, *grid).shape == empty.shape
    assert clip_search(torch.ones(0, 64), torch.ones(64), 32, 4, True, torch.float16)[0].shape == (0, 2)


def test_shapes_and_mutation_are_known_to_the_compiler():
    block = Block(2, 8, 3, seed=8)
    members = torch.arange(8)
    blank = torch.empty_like(block.weight)
    again = block.gradient(), block.corner, block.centred, *block.grid(), blank
    scales = block.scales[:, 0]
    tests = ("test_schema", "test_faketensor")
    opcheck(torch.ops.warpbus.round_columns.default, (*block.columns(), blank.clone(), blank), test_utils=tests)
    opcheck(torch.ops.warpbus.round_again.default, again, test_utils=tests)
    fitted = block.gradient(), block.centred, members, block.moments, scales, torch.float16, blank
    opcheck(torch.ops.warpbus.fit_scales.default, fitted, test_utils=tests)
    clipped = torch.ones(3, 64), torch.ones(64), 32, 4, True, torch.float16
    opcheck(torch.ops.warpbus.clip_search.default, clipped, test_utils=tests)


def replaced(arguments, **changes):
    return [changes.get(name, argument) for name, argument in zip(NAMES, arguments, strict=True)]


KINDS = ("corner", "moments", "groups")
NAMES = ("weight", "target", "corner", "scales", "zeros", "groups", "max_code")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.ones(4, 3)}, r"weight has shape \[4, 3\], expected a volume"),
        ({"target": torch.ones(2, 4, 2)}, r"target has shape \[2, 4, 2\], expected \[2, 4, 3\]: that of weight"),
        ({"target": torch.ones(2, 4, 3).double()}, "target is float64, expected float32"),
        ({"corner": torch.ones(4, 5)}, r"corner has shape \[4, 5\], expected \[4, 4\]: weight has 4 columns"),
        ({"zeros": torch.ones(2, 1, 3)}, r"zeros has shape \[2, 1, 3\], expected \[2, 3, 3\]"),
        ({"groups": torch.ones(4).long()}, "groups is int64, expected int32"),
        ({"groups": torch.ones(5).int()}, r"groups has shape \[5\], expected \[4\]"),
        ({"corner": torch.ones(4, 4).T}, "corner has strides"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    arguments = Block(2, 4, 3).columns()
    with pytest.raises(TensorError, match=f"^round_columns: {message}"):
        round_columns(*replaced(arguments, **changes))


def test_limits():
    with pytest.raises(TensorError, match="weight has 129 columns, expected at most 128"):
        round_columns(*Block(1, 129, 1).columns())
    with pytest.raises(UsageError, match=r"max_code is 256: give 1 to 255"):
        round_columns(*replaced(Block(1, 2, 1).columns(), max_code=256))
    block = Block(1, 4, 2)
    gradient = block.gradient()
    with pytest.raises(TensorError, match=r"^round_again: centred has shape \[1, 4, 1\]"):
        round_again(gradient, block.corner, block.centred[..., :1], *block.grid())
    members = torch.arange(4)
    with pytest.raises(TensorError, match=r"^fit_scales: scales has shape \[1, 3, 2\]"):
        fit_scales(gradient, block.centred, members, block.moments, block.scales, torch.float16)
    with pytest.raises(TensorError, match="errors is float16, expected float32, bfloat16"):
        ops.round_columns(*Block(1, 2, 3).columns(), torch.empty(1, 2, 3), torch.empty(1, 2, 3).half())
    with pytest.raises(TensorError, match=r"^round_again: changes has shape \[1, 4, 3\], expected \[1, 4, 2\]"):
        ops.round_again(gradient, block.corner, block.centred, *block.grid(), torch.empty(1, 4, 3))
    few = block.centred, members[:3], block.moments[:3, :3], block.scales[:, 0], torch.float16
    with pytest.raises(TensorError, match=r"^fit_scales: gradient has shape \[1, 4, 2\], expected \[1, 3, 2\]"):
        ops.fit_scales(gradient, *few, gradient)
    with pytest.raises(TensorError, match=r"^fit_scales: scale_dtype is torch.float64"):
        fit_scales(gradient, block.centred, members, block.moments, block.scales[:, 0], torch.float64)
    with pytest.raises(TensorError, match=r"^clip_search: 64 columns cannot be cut into groups of 48"):
        clip_search(torch.ones(2, 64), torch.ones(64), 48, 4, True, torch.float16)
    with pytest.raises(TensorError, match=r"^clip_search: importance has shape \[63\]"):
        clip_search(torch.ones(2, 64), torch.ones(63), 32, 4, True, torch.float16)
    with pytest.raises(SchemeError, match="7 bits"):
        clip_search(torch.ones(2, 64), torch.ones(64), 32, 7, True, torch.float16)


def test_shared_memory_of_a_block_fits_every_gpu():
    # Down to the diagonal of 128 columns: within the 99 KB that a block may have on sm_86, sm_89 and sm_120.
    assert ops._corner_bytes(1) == 1024
    assert ops._corner_bytes(128) == 4 * 36 * 256 <= 99 * 1024
    assert ops._fit_bytes(1) == 4 * (32 * 32 + 32 * 32 + 256)
    assert ops._fit_bytes(128) == 4 * (128 * 128 + 32 * 128 + 256) <= 99 * 1024
