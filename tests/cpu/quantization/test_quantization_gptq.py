"""GPTQ against a slow reference, against brute force, and against rounding to nearest."""

import itertools

import pytest
import torch

from warpbus.errors import NumericError, SchemeError
from warpbus.qtensor import Scheme
from warpbus.quantization.algorithms import gptq, rtn
from warpbus.quantization.algorithms.factored import FactoredStack, factored
from warpbus.quantization.algorithms.gptq import gptq_matrices, gptq_rows

SCHEMES = [
    f"w{bits}a16{group}{asym}" for bits in (2, 3, 4, 8) for group in ("-g32", "-g128", "") for asym in ("", "-asym")
]


def correlated(columns, seed=0, tokens=None):
    """The moments of inputs that share a few directions and differ in size, as those of a real layer do."""
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens or 4 * columns
    shared = torch.randn(tokens, max(1, columns // 8), generator=generator)
    mixing = torch.randn(max(1, columns // 8), columns, generator=generator)
    x = shared @ mixing / (columns // 8 or 1) ** 0.5 + 0.5 * torch.randn(tokens, columns, generator=generator)
    x = x * torch.rand(columns, generator=generator).mul(2).exp()
    return x.T @ x / tokens


def random(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(100 + seed))


def loss(weight, quantized, hessian):
    change = (quantized.dequantize(torch.float32) - weight).double()
    return float(((change @ hessian.double()) * change).sum())


def obq(weight, hessian, quantized, order, damping=0.01):
    """Column by column in float64 with the inverse updated each time, on the grid of `quantized`; gives the codes."""
    scheme, columns = quantized.scheme, weight.shape[1]
    h = hessian.double()
    inverse = torch.linalg.inv(h + damping * h.diagonal().mean() * torch.eye(columns, dtype=torch.float64))
    w = weight.double().clone()
    size = columns // quantized.scales.shape[1]
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    for column in order:
        scale = quantized.scales[:, column // size].double()
        zero = scheme.middle_code if quantized.zeros is None else quantized.zeros[:, column // size].double()
        code = ((w[:, column] / scale).round() + zero).clamp(0, scheme.max_code)
        codes[:, column] = code.to(torch.uint8)
        error = (w[:, column] - (code - zero) * scale) / inverse[column, column]
        w -= torch.outer(error, inverse[column])
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        inverse[column] = inverse[:, column] = 0
        inverse[column, column] = 1
    return codes


@pytest.mark.parametrize("text", ["w4a16-g32", "w3a16-g64-asym", "w2a16-g128", "w8a16"])
@pytest.mark.parametrize("activation_order", [True, False])
def test_agrees_with_a_slow_reference(text, activation_order):
    columns = 256  # two blocks
    weight, hessian = random(32, columns), correlated(columns)
    found = gptq(
        weight, hessian, Scheme.parse(text), scale_dtype=torch.float32, activation_order=activation_order, sweeps=0
    )
    order = torch.argsort(hessian.diagonal(), descending=True) if activation_order else torch.arange(columns)
    expected = obq(weight, hessian, found, order.tolist())
    # A weight halfway between two codes may go either way, and then those after it follow.
    assert (found.codes() == expected).float().mean() > 0.99
    other = torch.where(expected == found.codes(), 0.0, 1.0).sum(1)
    assert (other == 0).sum() >= 28


@pytest.mark.parametrize("text", SCHEMES)
def test_loses_less_than_rounding_to_nearest(text):
    scheme = Scheme.parse(text)
    weight, hessian = random(48, 256, seed=1), correlated(256, seed=1)
    nearest = loss(weight, rtn(weight, scheme, scale_dtype=torch.bfloat16), hessian)
    assert loss(weight, gptq(weight, hessian, scheme, scale_dtype=torch.bfloat16), hessian) < 0.75 * nearest


@pytest.mark.parametrize("text", SCHEMES)
def test_uncorrelated_inputs_mean_rounding_to_nearest(text):
    scheme, weight = Scheme.parse(text), random(16, 256, seed=2)
    expected = rtn(weight, scheme, scale_dtype=torch.float16)
    found = gptq(weight, torch.eye(256), scheme, scale_dtype=torch.float16, clip=False, sweeps=0)
    assert torch.equal(found.qweight, expected.qweight)
    assert torch.equal(found.scales, expected.scales)
    assert (found.zeros is None) == (expected.zeros is None)
    if found.zeros is not None:
        assert torch.equal(found.zeros, expected.zeros)


def test_comes_close_to_brute_force():
    """One row of four weights of 2 bits: 256 possible codes on a given grid."""
    scheme = Scheme.parse("w2a16")
    sums = torch.zeros(3)
    for seed in range(40):
        weight, hessian = random(1, 4, seed), correlated(4, seed, tokens=64)
        found = gptq(weight, hessian, scheme, scale_dtype=torch.float32, clip=False, sweeps=0)
        codes = torch.tensor(list(itertools.product(range(4), repeat=4)), dtype=torch.float32)
        changes = (codes - scheme.middle_code) * found.scales - weight
        best = float(((changes @ hessian) * changes).sum(1).min())
        nearest = loss(weight, rtn(weight, scheme, scale_dtype=torch.float32), hessian)
        assert best <= loss(weight, found, hessian) * (1 + 1e-5)
        sums += torch.tensor([best, loss(weight, found, hessian), nearest])
    assert sums[1] < 1.25 * sums[0]
    assert sums[1] < 0.7 * sums[2]


def test_rows_do_not_depend_on_each_other():
    weight, hessian, scheme = random(32, 128, seed=3), correlated(128, seed=3), Scheme.parse("w4a16-g32-asym")
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    whole = gptq(weight, hessian, scheme, scale_dtype=torch.float16)
    shuffled = gptq(weight[order], hessian, scheme, scale_dtype=torch.float16)
    assert (whole.codes()[order] == shuffled.codes()).float().mean() > 0.999
    assert torch.equal(whole.scales[order], shuffled.scales)


def test_the_order_of_the_columns_does_not_matter():
    """With one scale per row; and with groups, as long as the groups stay together."""
    weight, hessian = random(32, 128, seed=4), correlated(128, seed=4)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    blocks = torch.randperm(4, generator=torch.Generator().manual_seed(2))
    within_groups = torch.cat([block * 32 + torch.randperm(32) for block in blocks])
    for text, permutation in (("w3a16", order), ("w3a16-g32", within_groups)):
        scheme = Scheme.parse(text)
        plain = gptq(weight, hessian, scheme, scale_dtype=torch.float32)
        permuted = gptq(weight[:, permutation], hessian[permutation][:, permutation], scheme, scale_dtype=torch.float32)
        assert (plain.codes()[:, permutation] == permuted.codes()).float().mean() > 0.99
        assert loss(weight, plain, hessian) == pytest.approx(
            loss(weight[:, permutation], permuted, hessian[permutation][:, permutation]), rel=0.02
        )


def test_the_size_of_the_hessian_does_not_matter():
    weight, hessian, scheme = random(16, 128, seed=5), correlated(128, seed=5), Scheme.parse("w4a16-g32")
    plain, doubled = (gptq(weight, h, scheme, scale_dtype=torch.float16, sweeps=0) for h in (hessian, 1024 * hessian))
    assert torch.equal(plain.qweight, doubled.qweight)


def test_activation_order_and_clipping_pay():
    """On heavy-tailed weights and inputs of very different size."""
    scheme = Scheme.parse("w3a16-g128")
    weight = random(64, 256, seed=6)
    weight = weight * weight.abs()
    hessian = correlated(256, seed=6)
    losses = [
        loss(
            weight,
            gptq(weight, hessian, scheme, scale_dtype=torch.float16, activation_order=order, clip=clip),
            hessian,
        )
        for order, clip in ((False, False), (True, False), (True, True))
    ]
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("text", ["w4a16-g32", "w3a16-asym"])
def test_columns_that_never_had_an_input(text):
    scheme = Scheme.parse(text)
    weight, hessian = random(16, 128, seed=7), correlated(128, seed=7)
    dead = torch.tensor([0, 5, 127])
    hessian[dead] = 0
    hessian[:, dead] = 0
    found = gptq(weight, hessian, scheme, scale_dtype=torch.float16, clip=False, sweeps=0)
    expected = rtn(weight, scheme, scale_dtype=torch.float16)
    assert torch.equal(found.codes()[:, dead], expected.codes()[:, dead])
    assert loss(weight, found, hessian) < loss(weight, expected, hessian)


def test_no_input_at_all_means_rounding_to_nearest():
    weight, scheme = random(8, 64), Scheme.parse("w4a16-g64")
    found = gptq(weight, torch.zeros(64, 64), scheme, scale_dtype=torch.float16, clip=False, sweeps=0)
    assert torch.equal(found.qweight, rtn(weight, scheme, scale_dtype=torch.float16).qweight)


def test_fewer_tokens_than_columns():
    """The moments are singular then; damping makes up for it."""
    weight, scheme = random(16, 256, seed=8), Scheme.parse("w4a16-g128")
    hessian = correlated(256, seed=8, tokens=20)
    found = gptq(weight, hessian, scheme, scale_dtype=torch.float16)
    assert loss(weight, found, hessian) < 0.3 * loss(weight, rtn(weight, scheme, scale_dtype=torch.float16), hessian)


def test_a_hessian_that_cannot_be_factored_is_refused():
    hessian = correlated(64)
    hessian[0, 1] = hessian[1, 0] = 1e4
    with pytest.raises(NumericError, match=r"^layers\.3\.mlp\.down: .*not positive definite: raise --damping .*data$"):
        gptq(random(4, 64), hessian, Scheme.parse("w4a16"), scale_dtype=torch.float16, name="layers.3.mlp.down")


def test_a_singular_hessian_without_damping_is_refused():
    hessian = torch.ones(64, 64)
    with pytest.raises(NumericError, match="not positive definite"):
        gptq(random(4, 64), hessian, Scheme.parse("w4a16"), scale_dtype=torch.float16, damping=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused(value):
    weight, hessian = random(4, 64), correlated(64)
    weight[1, 1] = value
    with pytest.raises(NumericError, match=r"^q: NaN or infinity among its weights"):
        gptq(weight, hessian, Scheme.parse("w4a16"), scale_dtype=torch.float16, name="q")
    hessian[3, 3] = value
    with pytest.raises(NumericError, match=r"^q: its Hessian has NaN or infinity"):
        gptq(random(4, 64), hessian, Scheme.parse("w4a16"), scale_dtype=torch.float16, name="q")


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(SchemeError, match=r"^q: 96 columns"):
        gptq(random(4, 96), torch.eye(96), Scheme.parse("w4a16-g64"), scale_dtype=torch.float16, name="q")


def test_arguments_are_left_alone():
    weight, hessian = random(8, 128, seed=9), correlated(128, seed=9)
    copies = weight.clone(), hessian.clone()
    gptq(weight, hessian, Scheme.parse("w4a16-g32"), scale_dtype=torch.float16, activation_order=False)
    assert torch.equal(weight, copies[0])
    assert torch.equal(hessian, copies[1])


@pytest.mark.parametrize("text", ["w3a16-g32", "w4a16-g64-asym", "w8a16", "w2a16-asym"])
@pytest.mark.parametrize("drifts", [False, True])
def test_parts_give_the_bits_that_they_give_alone(text, drifts):
    """So that a result does not depend on which parts a process was dealt."""
    scheme, columns = Scheme.parse(text), 256
    weight = random(5 * 7, columns, seed=10).view(5, 7, columns)
    weight[3, 2:] = 0  # a last part is filled up with zeros
    hessian = factored(correlated(columns, seed=10), name="q")
    drift = 0.02 * random(columns, columns, seed=11) if drifts else None
    together, losses = gptq_rows(weight, hessian, scheme, scale_dtype=torch.float16, drift=drift)
    for index, part in enumerate(weight):
        alone, lost = gptq_rows(part[None], hessian, scheme, scale_dtype=torch.float16, drift=drift)
        rows = together.rows(7 * index, 7 * index + 7)
        assert torch.equal(alone.qweight, rows.qweight)
        assert torch.equal(alone.scales, rows.scales)
        assert (alone.zeros is None) == (rows.zeros is None) == scheme.symmetric
        if alone.zeros is not None and rows.zeros is not None:
            assert torch.equal(alone.zeros, rows.zeros)
        assert torch.equal(lost[0], losses[index])
    pairs, _ = gptq_rows(weight[:2], hessian, scheme, scale_dtype=torch.float16, drift=drift)
    assert torch.equal(pairs.qweight, together.rows(0, 14).qweight)


@pytest.mark.parametrize(("text", "columns"), [("w3a16-g32", 256), ("w4a16-g64-asym", 1152), ("w8a16", 200)])
@pytest.mark.parametrize("drifts", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_matrices_give_the_bits_that_they_give_alone(text, columns, drifts, clip):
    """Experts that are solved at once, each with inputs, and so an order of columns, of its own."""
    scheme = Scheme.parse(text)
    weight = random(3 * 2 * 7, columns, seed=20).view(3, 2, 7, columns)
    hessians = [factored(correlated(columns, seed=30 + index), name="q") for index in range(3)]
    assert not torch.equal(hessians[0].order, hessians[1].order)
    stack = FactoredStack(3)
    for index, hessian in enumerate(hessians):
        stack.put(index, hessian)
    drift = 0.02 * random(3 * columns, columns, seed=21).view(3, columns, columns) if drifts else None
    options = {"scale_dtype": torch.float16, "clip": clip}
    found = gptq_matrices(weight, stack.tensors, scheme, drift=drift, names=["a", "b", "c"], **options)
    for index, (quantized, losses) in enumerate(found):
        own = None if drift is None else drift[index]
        alone, lost = gptq_rows(weight[index], hessians[index], scheme, drift=own, **options)
        assert torch.equal(alone.qweight, quantized.qweight)
        assert torch.equal(alone.scales, quantized.scales)
        assert scheme.symmetric or torch.equal(alone.zeros, quantized.zeros)
        assert torch.equal(lost, losses)


def test_the_matrix_that_does_not_fit_is_named():
    stack = FactoredStack(2)
    for index in range(2):
        stack.put(index, factored(correlated(64, seed=index), name="q"))
    weight = random(2 * 4, 64, seed=5).view(2, 1, 4, 64)
    weight[1] *= 1e9
    with pytest.raises(NumericError, match=r"^second: "):
        gptq_matrices(
            weight, stack.tensors, Scheme.parse("w4a16-g32"), scale_dtype=torch.float16, names=["first", "second"]
        )


@pytest.mark.parametrize("text", ["w3a16-g32", "w4a16-g64-asym", "w8a16"])
@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("sweeps", [0, 2])
def test_losses_are_those_of_the_undamped_moments(text, dead, sweeps):
    scheme, moments = Scheme.parse(text), correlated(128, seed=12)
    if dead:
        moments[[3, 90]] = 0
        moments[:, [3, 90]] = 0
    weight = random(3 * 6, 128, seed=12).view(3, 6, 128)
    # Scales that are stored exactly: the loss is that of the matrix as it is stored.
    found, losses = gptq_rows(weight, factored(moments, name="q"), scheme, scale_dtype=torch.bfloat16, sweeps=sweeps)
    assert losses.dtype == torch.float64
    values = found.dequantize(torch.float32).double().view(3, 6, 128)
    wide = moments.double()
    for index, part in enumerate(weight.double()):
        change = values[index] - part
        assert float(losses[index, 0]) == pytest.approx(float(((change @ wide) * change).sum()), rel=2e-3)
        assert float(losses[index, 1]) == pytest.approx(float(((part @ wide) * part).sum()), rel=1e-4)


def test_what_was_aimed_at_is_what_the_losses_speak_of():
    moments, drift = correlated(64, seed=13), 0.05 * random(64, 64, seed=14)
    weight, scheme = random(8, 64, seed=13), Scheme.parse("w4a16-g32")
    hessian = factored(moments, name="q")
    found, losses = gptq_rows(weight[None], hessian, scheme, scale_dtype=torch.float32, drift=drift)
    damped = moments.double() + 0.01 * moments.diagonal().mean() * torch.eye(64)
    target = weight.double() + 0.5 * weight.double() @ drift.double() @ torch.linalg.inv(damped)
    change = found.dequantize(torch.float32).double() - target
    assert float(losses[0, 0]) == pytest.approx(float(((change @ moments.double()) * change).sum()), rel=2e-3)
    assert float(losses[0, 1]) == pytest.approx(float(((target @ moments.double()) * target).sum()), rel=1e-3)
    assert not torch.equal(
        found.qweight, gptq_rows(weight[None], hessian, scheme, scale_dtype=torch.float32)[0].qweight
    )


@pytest.mark.parametrize("columns", [1, 3, 127, 129, 300, 513])
def test_sizes_next_to_the_blocks(columns):
    weight, hessian = random(5, columns, seed=15), correlated(columns, seed=15, tokens=4 * columns + 8)
    scheme = Scheme.parse("w4a16")
    found = gptq(weight, hessian, scheme, scale_dtype=torch.float32, sweeps=0)
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    assert (found.codes() == obq(weight, hessian, found, order.tolist())).float().mean() > 0.98
    assert found.shape == (5, columns)


def test_a_weight_of_16_bits_is_that_of_32():
    weight, hessian, scheme = random(8, 64, seed=16).half(), correlated(64, seed=16), Scheme.parse("w3a16-g32")
    one, other = (gptq(each, hessian, scheme, scale_dtype=torch.float16) for each in (weight, weight.float()))
    assert torch.equal(one.qweight, other.qweight)
    assert torch.equal(one.scales, other.scales)


def test_weights_too_large_for_the_scales_are_refused():
    weight = random(4, 64, seed=17) * 1e8
    with pytest.raises(NumericError, match=r"^q: its weights are too large for scales in torch\.float16"):
        gptq(weight, correlated(64), Scheme.parse("w2a16"), scale_dtype=torch.float16, name="q")


def test_no_weight_at_all():
    """What fills a last part up: zeros, whatever the grid."""
    found, losses = gptq_rows(
        torch.zeros(2, 3, 64), factored(correlated(64), name="q"), Scheme.parse("w4a16-g32"), scale_dtype=torch.float16
    )
    assert not found.dequantize(torch.float32).any()
    assert bool((found.scales > 0).all())
    assert losses.tolist() == [[0.0, 0.0], [0.0, 0.0]]
