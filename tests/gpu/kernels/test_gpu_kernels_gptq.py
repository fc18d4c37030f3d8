"""The loops of quantization on a GPU: each decision against float64, at GLM's shapes, in parts, in graphs."""

import pytest
import torch

from warpbus.kernels.ops import gptq as ops
from warpbus.kernels.ops.gptq import clip_search
from warpbus.kernels.reference import gptq as reference
from warpbus.kernels.reference.grid import Grid, fit
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

TIE = 1e-3  # of a step: so near to halfway between two codes, rounding may choose either
SHAPES = [
    (1, 1, 1, 15),
    (2, 15, 3, 255),
    (1, 16, 31, 3),
    (3, 17, 33, 7),
    (2, 127, 129, 15),
    (1, 128, 4096, 15),
    (8, 128, 512, 15),
    (8, 128, 576, 255),
    (8, 128, 3424, 7),
    (8, 100, 512, 15),
]


def blank(shape, dtype):
    """NaN within something larger, so that what is written is a view with gaps, and that larger thing."""
    parts, columns, rows = shape
    whole = torch.full((parts, columns + 3, rows + 1), float("nan"), dtype=dtype, device="cuda")
    return whole[:, 2:-1, :-1], whole


def fit_scales(gradient, centred, members, *others, dtype=torch.float32):
    """The changes; the gradient is that of all columns."""
    own = torch.empty(len(gradient), len(members) + 2, gradient.shape[2], device="cuda")[:, 1:-1]
    own.copy_(gradient[:, members])
    changes, _ = blank(own.shape, dtype)
    ops.fit_scales(own, centred, members, *others, changes)
    return changes


class Solve:
    """A block of columns out of a larger solve, so that every tensor but the outputs is a view with gaps."""

    def __init__(self, parts, columns, rows, max_code, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator, device="cuda")

        def integers(low, high, *shape):
            return torch.randint(low, high, shape, generator=generator, device="cuda")

        total, groups = columns + 37, 5
        block = slice(20, 20 + columns)
        self.max_code = max_code
        self.weight = random(parts, total, rows)[:, block]
        self.target = random(parts, total, rows + 1)[:, block, 1:].mul_(0.1).add_(self.weight)
        sign = integers(0, 2, parts, groups, rows) * 2 - 1
        self.scales = ((random(parts, groups, rows).abs() + 0.5) * sign * 4 / (max_code + 1)).bfloat16().float()
        self.zeros = integers(0, max_code + 1, parts, groups, rows).float()
        self.groups = integers(0, groups, columns).int()
        self.factor = 0.1 * random(total, total)
        self.corner = self.factor[block, block]
        x = random(2 * total, total)
        self.moments = (x.T @ x / len(x))[block, block]
        centred = integers(0, max_code + 1, parts, columns, rows) - self.zeros[:, self.groups.long()]
        self.centred = torch.empty(parts, total, rows, device="cuda")[:, block].copy_(centred)
        self.gradient = torch.empty(parts, total, rows, device="cuda")[:, block]
        left = (self.weight - self.centred * self.scales[:, self.groups.long()]).double()
        self.gradient.copy_(torch.matmul(self.moments.double(), left))

    def grid(self):
        return self.scales, self.zeros, self.groups, self.max_code

    def rounded(self, dtype=torch.float32):
        """The codes less their zero points, and the errors."""
        (centred, whole), (errors, _) = (blank(self.weight.shape, each) for each in (torch.float32, dtype))
        ops.round_columns(self.weight, self.target, self.corner, *self.grid(), centred, errors)
        assert int(whole.isnan().sum()) == whole.numel() - centred.numel()  # nothing beside it is written
        return centred, errors

    def again(self, dtype=torch.float32):
        """The changes, and the codes less their zero points that `round_again` leaves."""
        centred, (changes, whole) = self.centred.clone(), blank(self.gradient.shape, dtype)
        ops.round_again(self.gradient, self.moments, centred, *self.grid(), changes)
        assert int(whole.isnan().sum()) == whole.numel() - changes.numel()
        return changes, centred

    def columns(self):
        """Scale and zero point of each weight, in float64."""
        return (tensor[:, self.groups.long()].double() for tensor in (self.scales, self.zeros))


def poison(*shape):
    """NaN in the memory that the next outputs of this shape are given."""
    held = [torch.full(shape, float("nan"), device="cuda") for _ in range(2)]
    del held


def check_codes(codes, wanted, zero, max_code):
    """Codes are those nearest to `wanted`, in steps of the grid, but for ties."""
    nearest = (wanted.round() + zero).clamp(0, max_code)
    from_tie = ((wanted - wanted.floor()) - 0.5).abs()
    assert ((codes == nearest) | ((from_tie < TIE) & ((codes - nearest).abs() <= 1))).all()
    assert (codes == nearest).double().mean() > 0.99


@pytest.mark.parametrize("shape", SHAPES)
def test_round_columns(shape):
    solve = Solve(*shape)
    centred, errors = solve.rounded()
    scale, zero = solve.columns()
    exact = solve.weight.double() - centred.double() * scale
    assert (errors - exact).abs().max() <= 2**-23 * exact.abs().max()
    before = solve.corner.double().triu(1).T
    wanted = solve.target.double() + torch.matmul(before, errors.double())
    check_codes(centred.double() + zero, wanted / scale, zero, solve.max_code)


@pytest.mark.parametrize(("columns", "rows"), [(128, 352), (100, 33), (16, 5)])
def test_matrices_give_the_bits_that_they_give_alone(columns, rows):
    """Two parts of each of three matrices, which have corners, groups and members of their own."""
    each = [Solve(2, columns, rows, 15, seed=seed) for seed in range(3)]
    whole = Solve(6, columns, rows, 15)
    for name in ("weight", "target", "scales", "zeros", "centred", "gradient"):
        setattr(whole, name, torch.cat([getattr(solve, name) for solve in each]))
    for name in ("corner", "moments", "groups"):
        setattr(whole, name, torch.stack([getattr(solve, name) for solve in each]))
    for dtype in (torch.float32, torch.bfloat16):
        for found, alone in (
            (whole.rounded(dtype), [solve.rounded(dtype) for solve in each]),
            (whole.again(dtype), [solve.again(dtype) for solve in each]),
        ):
            for index, tensor in enumerate(found):
                assert torch.equal(tensor, torch.cat([pair[index] for pair in alone]))
    members = torch.stack([torch.randperm(columns, device="cuda")[: columns // 2] for _ in each])
    corners = torch.stack([solve.moments[own[:, None], own] for solve, own in zip(each, members, strict=True)])
    near = torch.cat([solve.gradient[:, own] for solve, own in zip(each, members, strict=True)])
    scales, changes = whole.scales[:, 1].clone(), torch.empty_like(near)
    ops.fit_scales(near, whole.centred, members, corners, scales, torch.bfloat16, changes)
    for index, solve in enumerate(each):
        own, single = slice(2 * index, 2 * index + 2), solve.scales[:, 1].clone()
        given = solve.gradient, solve.centred, members[index], corners[index], single, torch.bfloat16
        assert torch.equal(changes[own], fit_scales(*given))
        assert torch.equal(scales[own], single)


@pytest.mark.parametrize("shape", SHAPES)
def test_round_again(shape):
    solve = Solve(*shape, seed=1)
    changes, centred = solve.again()
    scale, zero = solve.columns()
    assert torch.equal(changes, (centred - solve.centred) * scale.float())
    moments = solve.moments.double()
    pending = solve.gradient.double() - torch.matmul(moments.triu(1).T, changes.double())
    wanted = solve.centred.double() * scale + pending / moments.diagonal()[:, None]
    check_codes(centred.double() + zero, wanted / scale, zero, solve.max_code)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_carried_over_in_bfloat16_is_rounded_last(shape):
    solve = Solve(*shape, seed=9)
    for run in (solve.rounded, solve.again):
        carried = 0 if run == solve.again else 1
        wide, narrow = run(), run(torch.bfloat16)
        assert torch.equal(narrow[carried], wide[carried].bfloat16())
        assert torch.equal(narrow[1 - carried], wide[1 - carried])


def test_only_what_the_contract_names_is_read():
    solve = Solve(2, 70, 40, 15, seed=2)
    whole = solve.rounded(), solve.again()
    solve.corner.masked_fill_(torch.ones_like(solve.corner).tril().bool(), float("nan"))
    solve.moments.masked_fill_(torch.ones_like(solve.moments).tril(-1).bool(), float("nan"))
    for found, expected in zip((*solve.rounded(), *solve.again()), (*whole[0], *whole[1]), strict=True):
        assert torch.equal(found, expected)


def test_nothing_but_the_block_is_written():
    solve = Solve(2, 33, 50, 15, seed=3)
    total = solve.centred._base
    total[:, :20], total[:, 53:] = 7, 8
    changes, _ = blank(solve.gradient.shape, torch.float32)
    ops.round_again(solve.gradient, solve.moments, solve.centred, *solve.grid(), changes)
    assert (total[:, :20] == 7).all()
    assert (total[:, 53:] == 8).all()


def part_of(solve, parts, rows):
    """The same solve with some of its parts and rows alone, at other addresses."""
    own = object.__new__(Solve)
    own.__dict__.update(solve.__dict__)
    for name in ("weight", "target", "scales", "zeros", "centred", "gradient"):
        setattr(own, name, getattr(solve, name)[parts, :, rows].contiguous())
    return own


def all_results(solve):
    members = (solve.groups == 0).nonzero()[:, 0]
    scales = solve.scales[:, 0].clone()
    corner = solve.moments[members][:, members]
    delta = fit_scales(solve.gradient, solve.centred, members, corner, scales, torch.float16)
    return *solve.rounded(), *solve.again(), delta, scales[:, None]


@pytest.mark.parametrize(
    ("parts", "rows"), [(slice(0, 1), slice(None)), (slice(3, 8), slice(7, 8)), (slice(2, 4), slice(100, 409))]
)
def test_a_row_depends_on_no_other(parts, rows):
    solve = Solve(8, 128, 3424, 15, seed=4)
    whole = all_results(solve)
    for found, expected in zip(all_results(part_of(solve, parts, rows)), whole, strict=True):
        assert torch.equal(found, expected[parts, :, rows])


def test_rows_of_the_corner_at_any_address():
    solve = Solve(2, 64, 96, 15, seed=5)
    expected = solve.rounded(), solve.again()
    solve.corner, solve.moments = solve.corner.contiguous(), solve.moments.contiguous()
    assert solve.corner.data_ptr() % 16 == 0
    for found, other in zip((*solve.rounded(), *solve.again()), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(found, other)


def test_the_same_bits_at_every_run_and_on_a_second_stream():
    solve = Solve(8, 128, 576, 15, seed=6)
    first = all_results(solve)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second = all_results(solve)
    torch.cuda.current_stream().wait_stream(stream)
    for other in (second, all_results(solve)):
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_in_a_graph():
    solve, other = Solve(2, 128, 512, 15, seed=7), Solve(2, 128, 512, 15, seed=8)
    solve.rounded()
    centred, errors = (torch.empty_like(solve.weight) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.round_columns(solve.weight, solve.target, solve.corner, *solve.grid(), centred, errors)
    for name in ("weight", "target", "scales", "zeros", "groups", "corner"):
        getattr(solve, name).copy_(getattr(other, name))
    graph.replay()
    expected = other.rounded()
    assert torch.equal(centred, expected[0])
    assert torch.equal(errors, expected[1])


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 32, 64, 100, 128, 300])
def test_fit_scales(size, scale_dtype):
    parts, rows = 3, 517
    generator = torch.Generator("cuda").manual_seed(size)
    total = size + 50
    members = torch.randperm(total, generator=generator, device="cuda")[:size]
    x = torch.randn(2 * total, total, generator=generator, device="cuda")
    moments = x.T @ x / len(x)
    scales = (torch.rand(parts, 2, rows, generator=generator, device="cuda") + 0.1).to(scale_dtype).float()
    centred = torch.randint(-8, 8, (parts, total, rows), generator=generator, device="cuda").float()
    weight = centred * scales[:, 1:] * 1.1 + torch.randn(parts, total, rows, generator=generator, device="cuda")
    centred[..., 0] = 0
    gradient = torch.matmul(moments, weight - centred * scales[:, 1:])
    corner = moments[members][:, members].contiguous()
    before = scales.clone()
    delta = fit_scales(gradient, centred, members, corner, scales[:, 1], scale_dtype)

    again = before.clone()
    narrow = fit_scales(gradient, centred, members, corner, again[:, 1], scale_dtype, dtype=torch.bfloat16)
    assert torch.equal(narrow, delta.bfloat16())
    assert torch.equal(again, scales)
    assert torch.equal(scales[:, 0], before[:, 0])
    assert torch.equal(scales.to(scale_dtype).float(), scales)
    own, step = centred[:, members].double(), (scales - before)[:, 1].double()
    assert torch.allclose(delta.double(), own * step[:, None], atol=1e-6)
    slope = (own * gradient[:, members].double()).sum(1)
    curvature = (own * torch.matmul(corner.double(), own)).sum(1)
    assert (step[:, 0] == 0).all()
    assert (step * (step * curvature - 2 * slope) <= 1e-6 * slope.abs()).all()
    wanted = before[:, 1].double() + slope / curvature.clamp(min=1e-30)
    moved = step != 0
    assert moved[:, 1:].float().mean() > 0.9
    # Half a unit in the last place of the stored dtype, and what sums in float32 leave of the slope.
    off = (scales[:, 1].double() - wanted).abs() / wanted.abs()
    assert off[moved].max() <= torch.finfo(scale_dtype).eps / 2 + 1e-4


CLIPS = [
    (1, 32, 32),
    (13, 192, 64),
    (128, 4096, 128),
    (64, 4096, 4096),
    (33, 13_696, 128),
    (9, 13_696, 13_696),
    (5, 75, 5),
]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("dtype", "scale_dtype"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float16)])
@pytest.mark.parametrize(("rows", "columns", "size"), CLIPS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_clip_search(rows, columns, size, bits, symmetric, dtype, scale_dtype):
    generator = torch.Generator("cuda").manual_seed(columns + bits)
    weight = torch.randn(rows, columns + 3, generator=generator, device="cuda").mul_(0.02).to(dtype)[:, 1 : columns + 1]
    weight[0, :size] = 0
    importance = torch.randn(columns, generator=generator, device="cuda").mul_(2).exp_()
    poison(rows, columns // size)
    found = clip_search(weight, importance, size, bits, symmetric, scale_dtype)
    again = clip_search(weight[rows // 2 :].contiguous(), importance, size, bits, symmetric, scale_dtype)
    expected = reference.clip_search(weight.cpu(), importance.cpu(), size, bits, symmetric, scale_dtype)
    for one, two, three in zip(found, again, expected, strict=True):
        assert torch.equal(one[rows // 2 :], two)
        # Where two candidates have nearly the same error, the order of the sum decides.
        assert (one.cpu() == three).double().mean() > 0.95
    scheme = Scheme(bits, None, symmetric)
    groups, costs = weight.float().unflatten(1, (-1, size)), importance.unflatten(0, (-1, size))
    errors, full = (grid.error(groups, scheme, costs) for grid in (Grid(*found), fit(groups, scheme, scale_dtype)))
    assert (errors <= full * (1 + 1e-5)).all()
    assert found[0][0, 0] == 1


def test_clip_search_of_bfloat16():
    weight = torch.randn(64, 512, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    importance = torch.ones(512, device="cuda")
    for size in (32, 512):
        found = clip_search(weight, importance, size, 4, True, torch.bfloat16)
        same = clip_search(weight.float(), importance, size, 4, True, torch.bfloat16)
        assert torch.equal(found[0], same[0])
