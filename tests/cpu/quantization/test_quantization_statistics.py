"""What is known of a layer's inputs: means, maxima, and the drift from the unquantized model."""

import pytest
import torch
from torch import Tensor

from warpbus.errors import NumericError
from warpbus.quantization.statistics import DRIFT, MAX_ABS, MEAN_ABS, MOMENTS, Collector, Statistics

ALL = frozenset({MOMENTS, DRIFT, MEAN_ABS, MAX_ABS})


def inputs(tokens: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))


def test_means_and_maxima() -> None:
    x = inputs(100, 8)
    original = x + inputs(100, 8, seed=1) / 10
    collector = Collector(8, ALL)
    for part in torch.arange(100).split([1, 30, 0, 69]):
        collector.add(x[part], original[part])
    (found,) = collector.total()
    wide = x.double()
    assert found.tokens == 100
    for statistic, expected in (
        (found.moments, wide.T @ wide / 100),
        (found.drift, (original.double() - wide).T @ wide / 100),
        (found.mean_abs, wide.abs().mean(0)),
        (found.max_abs, wide.abs().amax(0)),
    ):
        assert statistic is not None
        assert statistic.dtype == torch.float32
        assert torch.allclose(statistic.double(), expected, rtol=1e-5, atol=1e-6)


def test_only_what_is_asked_for() -> None:
    for name in (MOMENTS, MEAN_ABS, MAX_ABS):
        collector = Collector(4, frozenset({name}))
        collector.add(inputs(5, 4))
        (found,) = collector.total()
        given = {key for key in ALL if getattr(found, key) is not None}
        assert given == {name}


def test_nothing_may_be_asked_for() -> None:
    """Rounding to nearest is tried so: only that tokens come is looked at."""
    collector = Collector(4, frozenset())
    collector.add(torch.ones(3, 4))
    assert collector.total() == [Statistics(3)]


def test_moments_of_more_columns_than_a_panel_are_symmetric() -> None:
    x = inputs(40, 1300)
    collector = Collector(1300, frozenset({MOMENTS}))
    collector.add(x)
    moments = collector.total()[0].moments
    assert moments is not None
    assert torch.allclose(moments, x.T @ x / 40, atol=1e-5)
    assert torch.equal(moments, moments.T)


def test_drift_is_the_mean_over_the_tokens_that_come_with_an_original() -> None:
    x, original = inputs(90, 6), inputs(90, 6, seed=1)
    collector = Collector(6, ALL)
    for share, rows in enumerate(torch.arange(90).split(30)):
        collector.add(x[rows[:20]], original[rows[:20]], share=share)
        collector.add(x[rows[20:]], share=share)
    (found,) = collector.total()
    compared = torch.arange(90) % 30 < 20
    assert found.tokens == 90
    assert found.moments is not None
    assert found.drift is not None
    assert torch.allclose(found.moments, x.T @ x / 90, atol=1e-5)
    assert torch.allclose(found.drift, (original - x)[compared].T @ x[compared] / 60, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_large_16_bit_inputs_neither_overflow_nor_drift(dtype: torch.dtype) -> None:
    collector = Collector(4, frozenset({MOMENTS, MEAN_ABS, MAX_ABS}))
    x = torch.full((1000, 4), 60000.0, dtype=dtype)
    for _ in range(100):
        collector.add(x)
    (found,) = collector.total()
    value = float(x[0, 0])
    assert found.moments is not None
    assert found.mean_abs is not None
    assert found.max_abs is not None
    # Equal products are the worst for a sum in float32: each addition rounds the same way.
    assert torch.allclose(found.moments, torch.full((4, 4), value**2), rtol=1e-3)
    assert torch.allclose(found.mean_abs, torch.full((4,), value), rtol=1e-5)
    assert found.max_abs.tolist() == [value] * 4


def test_shares_add_up_to_what_one_gives() -> None:
    x, original = inputs(64, 6), inputs(64, 6, seed=1)
    collectors = [Collector(6, ALL) for _ in range(3)]
    for part in range(8):
        rows = slice(8 * part, 8 * part + 8)
        collectors[0].add(x[rows], original[rows])
        collectors[1].add(x[rows], original[rows], share=part)
        collectors[2].add(x[rows][:3], original[rows][:3], share=part)
        collectors[2].add(x[rows][3:], original[rows][3:], share=part)
    one, *others = [collector.total()[0] for collector in collectors]
    for other in others:
        assert other.tokens == one.tokens == 64
        for key in ALL:
            assert torch.allclose(getattr(other, key), getattr(one, key), rtol=1e-5, atol=1e-6)


def test_shares_without_tokens_leave_no_trace() -> None:
    x = inputs(20, 6)
    found = []
    for empty in (False, True):
        collector = Collector(6, ALL)
        for share, rows in ((1, slice(0, 12)), (5, slice(12, 20))):
            if empty:
                collector.add(x[:0], x[:0], share=share - 1)
            collector.add(x[rows], x[rows], share=share)
        found += collector.total()
    for key in ALL:
        assert torch.equal(getattr(found[0], key), getattr(found[1], key))


def test_shares_come_in_rising_order() -> None:
    collector = Collector(4, frozenset({MOMENTS}))
    collector.add(inputs(3, 4), share=5)
    collector.add(inputs(3, 4), share=2)
    with pytest.raises(ValueError, match=r"share 2: the next of this process is one of 6 to 7"):
        collector.total()


def test_no_token_is_refused() -> None:
    collector = Collector(4, ALL, names=["layers.0.mlp.down"])
    collector.add(inputs(0, 4), inputs(0, 4))
    with pytest.raises(NumericError, match=r"^layers\.0\.mlp\.down: no token entered it: give calibration data$"):
        collector.total()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("needed", [{MOMENTS}, {MEAN_ABS}, {MAX_ABS}, ALL])
def test_values_that_are_no_numbers_are_refused(value: float, needed: set[str]) -> None:
    collector = Collector(4, frozenset(needed), names=["layers.1.attention.o"])
    x = torch.ones(5, 4)
    x[2, 1] = value
    collector.add(x, x)
    with pytest.raises(
        NumericError, match=r"^layers\.1\.attention\.o: NaN or infinity.*undamaged checkpoint$"
    ) as raised:
        collector.total()
    assert "\n" not in str(raised.value)


def test_a_number_that_is_none_is_refused_wherever_it_comes() -> None:
    """Also if tokens without it come afterwards, in the same share or in others."""
    bad = torch.ones(5, 4)
    bad[0, 3] = float("nan")
    for place in range(4):
        collector = Collector(4, frozenset({MAX_ABS}), names=["q"])
        for step in range(4):
            collector.add(bad if step == place else torch.ones(5, 4), share=step // 2)
        with pytest.raises(NumericError, match=r"^q: NaN or infinity"):
            collector.total()


def test_an_original_that_is_no_number_is_refused() -> None:
    collector = Collector(4, frozenset({MOMENTS, DRIFT}), names=["layers.1.attention.o"])
    collector.add(torch.ones(5, 4), torch.full((5, 4), float("inf")))
    with pytest.raises(NumericError, match=r"^layers\.1\.attention\.o: NaN or infinity"):
        collector.total()


def test_no_drift_where_no_token_is_compared() -> None:
    """As of an expert that only tokens reach that the unquantized model does not see."""
    collector = Collector(4, frozenset({MOMENTS, DRIFT}))
    collector.add(torch.randn(6, 4))
    (found,) = collector.total()
    assert found.drift is not None
    assert torch.equal(found.drift, torch.zeros(4, 4))
    assert found.tokens == 6


def test_several_layers_at_once() -> None:
    """The bits of each are those of a collector of its own; one of them gets no token of a share."""
    tokens = [inputs(48, 6, seed) for seed in range(3)]
    together = Collector(6, ALL, names=["a", "b", "c"])
    alone = [Collector(6, ALL) for _ in tokens]
    for share in range(4):
        for layer, x in enumerate(tokens):
            own = x[12 * share : 12 * share + (0 if (share, layer) == (1, 2) else 12)]
            together.add(own, 2 * own[:5], share=share, layer=layer)
            alone[layer].add(own, 2 * own[:5], share=share)
    for found, collector in zip(together.total(), alone, strict=True):
        (expected,) = collector.total()
        assert found.tokens == expected.tokens
        for key in ALL:
            assert torch.equal(getattr(found, key), getattr(expected, key))


def test_the_layer_that_is_refused_is_named() -> None:
    collector = Collector(4, frozenset({MOMENTS}), names=["one", "other"])
    collector.add(inputs(5, 4), layer=0)
    with pytest.raises(NumericError, match=r"^other: no token entered it"):
        collector.total()
    collector = Collector(4, frozenset({MOMENTS}), names=["one", "other"])
    collector.add(inputs(5, 4), layer=0)
    collector.add(torch.full((1, 4), float("nan")), layer=1)
    with pytest.raises(NumericError, match=r"^other: NaN or infinity"):
        collector.total()
