"""The time of a token before anything is quantized: that it is measured, of which shapes, and of how many layers."""

import pytest
import torch

from warpbus.formats import Checkpoint
from warpbus.models import SHAPES, read_config
from warpbus.models.layer_spec import MLPSpec
from warpbus.qtensor import Scheme
from warpbus.quantization import speed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(make_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("speed") / "tiny"
    return read_config(Checkpoint(make_model(directory, hidden_size=128, intermediate_size=256, head_dim=64)))


@pytest.mark.parametrize("name", [None, "w8a16", "w4a16-g128", "w3a16-g128", "w4a16-g32-asym", "w8a8-int8", "w8a8-fp8"])
def test_every_scheme_is_measured(config, name):
    scheme = None if name is None else Scheme.parse(name)
    (found,) = speed.token_times(config, [scheme], device=CPU, dtype=torch.float32)
    assert 0 < found.seconds < 10
    assert found.spread >= 0


@pytest.mark.parametrize("name", [None, "w8a16", "w4a16-g64"])
def test_a_mixture_of_experts_is_measured(poet_moe, name):
    scheme = None if name is None else Scheme.parse(name)
    (found,) = speed.token_times(read_config(Checkpoint(poet_moe)), [scheme], device=CPU, dtype=torch.float32)
    assert 0 < found.seconds < 10


def test_a_token_meets_each_matrix_once(config, monkeypatch):
    met = []
    monkeypatch.setattr(speed, "project", lambda linear, x: met.append((linear.out_features, tuple(x.shape))))
    monkeypatch.setattr(speed, "_sample", lambda run, repeats, device: (met.clear(), run(), 3.0)[-1])
    assert speed.token_times(config, [None], device=CPU, dtype=torch.float32) == [speed.TokenTime(3.0, 0.0)]
    assert len(met) == 4 * config.num_layers
    assert {shape for _, shape in met} == {(1, 128), (1, 256)}


def test_another_load_meets_all_schemes_and_the_least_counts(config, monkeypatch):
    """A machine that is busy in the first half of the samples: measured one after another, the first would lose."""
    schemes = [Scheme.parse("w8a16"), Scheme.parse("w4a16-g128")]
    true = {8: 1.0, 4: 2.0}
    taken = []

    def step(config, scheme, copies, device, dtype):
        return lambda: taken.append(scheme.bits)

    def sample(run, repeats, device):
        run()
        busy = 10.0 if len(taken) < speed._ROUNDS else 1.0
        return true[taken[-1]] * busy

    monkeypatch.setattr(speed, "_step", step)
    monkeypatch.setattr(speed, "_sample", sample)
    monkeypatch.setattr(speed, "_copies", lambda *arguments: config.num_layers)
    eight, four = speed.token_times(config, schemes, device=CPU, dtype=torch.float32)
    assert (eight.seconds, four.seconds) == (1.0, 2.0)
    assert taken[2:] == [8, 4] * speed._ROUNDS
    assert eight.spread == four.spread == 0.0  # of the median, and fewer than half of the samples were disturbed


def test_layers_are_many_enough_to_leave_the_cache(config, monkeypatch):
    weights = sum(rows * columns for rows, columns in ((256, 128), (128, 128), (512, 128), (128, 256)))
    monkeypatch.setattr(speed, "_CPU_CACHE", weights)
    of_four_bits = speed._copies(config, Scheme.parse("w4a16"), CPU, torch.float32)
    assert of_four_bits == min(config.num_layers, 4)
    assert speed._copies(config, Scheme.parse("w8a16"), CPU, torch.float32) == min(config.num_layers, 2)
    # Twice the cache are half a layer of 32 bits.
    assert speed._copies(config, None, CPU, torch.float32) == 1


def test_layers_with_experts_have_their_share(monkeypatch):
    """GLM-4.7-Flash has one layer without experts, the first of 47. In the others a token reads 5 of 65 experts."""
    flash, made = SHAPES["glm-4.7-flash"], []

    def stop(shape, *arguments, **options):
        made.extend(shape.layers)
        raise StopIteration

    monkeypatch.setattr(speed, "random_model", stop)
    for copies, dense in ((1, 0), (4, 0), (47, 1)):
        made.clear()
        with pytest.raises(StopIteration):
            speed._step(flash, None, copies, CPU, torch.float32)
        assert [isinstance(layer.mlp, MLPSpec) for layer in made] == [True] * dense + [False] * (copies - dense)
    attention = sum(matrix.num_weights for matrix in flash.layers[1].matrices if matrix.name.startswith("attention."))
    monkeypatch.setattr(speed, "_CPU_CACHE", (attention + 5 * 3 * 2048 * 1536) * 4)
    assert speed._copies(flash, Scheme.parse("w8a16"), CPU, torch.float32) == 8
