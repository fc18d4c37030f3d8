"""The time of a token before anything is quantized: that it is measured, of which shapes, and of how many layers."""

import pytest
import torch

from warpbus.formats import Checkpoint
from warpbus.models import read_config
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
    seconds = speed.token_seconds(config, scheme, device=CPU, dtype=torch.float32)
    assert 0 < seconds < 10


def test_a_token_meets_each_matrix_once(config, monkeypatch):
    met = []
    monkeypatch.setattr(speed, "project", lambda linear, x: met.append((linear.out_features, tuple(x.shape))))
    monkeypatch.setattr(speed, "_best", lambda run, device: (met.clear(), run(), 3.0)[-1])
    assert speed.token_seconds(config, None, device=CPU, dtype=torch.float32) == 3.0
    assert len(met) == 4 * config.num_layers
    assert {shape for _, shape in met} == {(1, 128), (1, 256)}


def test_layers_are_many_enough_to_leave_the_cache(config, monkeypatch):
    weights = sum(rows * columns for rows, columns in ((256, 128), (128, 128), (512, 128), (128, 256)))
    monkeypatch.setattr(speed, "_CPU_CACHE", weights)
    of_four_bits = speed._copies(config, Scheme.parse("w4a16"), CPU, torch.float32)
    assert of_four_bits == min(config.num_layers, 4)
    assert speed._copies(config, Scheme.parse("w8a16"), CPU, torch.float32) == min(config.num_layers, 2)
    # Twice the cache are half a layer of 32 bits.
    assert speed._copies(config, None, CPU, torch.float32) == 1
