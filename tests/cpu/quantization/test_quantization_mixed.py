"""Bits for each matrix: within the average, and where they are worth most."""

import pytest
import torch
from quantization_models import write_model

from warpbus.errors import SchemeError, UsageError
from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.models import load_model
from warpbus.qtensor import Scheme
from warpbus.quantization import Calibration, quantize, unquantized
from warpbus.quantization.mixed import mixed_schemes
from warpbus.quantization.options import QuantizationOptions
from warpbus.quantization.preflight import prepare

CPU = torch.device("cpu")
RANDOM = torch.Generator().manual_seed(4)
DATA = Calibration(tuple(tuple(torch.randint(7, 300, (24,), generator=RANDOM).tolist()) for _ in range(12)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("mixed") / "model", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def lopsided(model, tmp_path_factory):
    """What the MLP of the second layer gives is a thousandth of what it was: its bits are worth next to nothing."""
    directory = tmp_path_factory.mktemp("mixed") / "lopsided"
    directory.mkdir()
    checkpoint = Checkpoint(model)
    with CheckpointWriter(directory) as writer:
        for name in ("tokenizer.model", "tokenizer_config.json"):
            writer.copy_file(model / name)
        writer.write_json("config.json", checkpoint.config)
        for name in checkpoint.names():
            scale = 1e-3 if "layers.1.mlp.down_proj" in name else 1.0
            writer.add(name, checkpoint.tensor(name) * scale)
        writer.finish()
    return directory


def mixed(model, bits, **options):
    return mixed_schemes(model, bits, calibration=DATA, options=QuantizationOptions(device="cpu", **options))


def average(model, schemes):
    plan = prepare(model, None, schemes)
    return 8 * plan.bytes_quantized / sum(sum(each.rows) * each.columns for each in plan.matrices)


@pytest.mark.parametrize("bits", [2.2, 3.0, 3.5, 5.0])
def test_the_average_is_kept_and_used(model, bits):
    schemes = mixed(model, bits)
    # No matrix is more than a fifth of the model, and the next scheme is one bit more, or four.
    assert bits - 0.8 < average(model, schemes) <= bits


def test_a_scheme_for_all_where_the_bits_are_just_enough_or_more_than_enough(model):
    assert mixed(model, 8.125).distinct() == (Scheme(8, 128),)
    assert mixed(model, 2.125).distinct() == (Scheme(2, 128),)


def test_bits_go_where_they_are_worth_most(lopsided):
    plan = prepare(lopsided, None, mixed(lopsided, 3.5))
    bits = {matrix.name: matrix.scheme.bits for matrix in plan.matrices}
    assert bits["layers.1.mlp.down"] == bits["layers.1.mlp.gate_up"] == 2
    assert min(size for name, size in bits.items() if "layers.1.mlp" not in name) >= 3


def outputs(model):
    plan = prepare(model, None, Scheme(8, None))
    walk = unquantized.layers(plan, DATA, device=CPU, dtype=torch.float32, last=plan.config.num_layers - 1)
    for index, layer, (states,) in walk:
        found = [unquantized.output(layer, index, state) for state in states]
    return found, states


def test_it_loses_less_than_as_many_bits_elsewhere(lopsided, tmp_path):
    schemes = mixed(lopsided, 3.2)
    opposite = {
        source.removesuffix(".weight"): Scheme(6 - matrix.scheme.bits if matrix.scheme.bits in (2, 4) else 3, 128)
        for matrix in prepare(lopsided, None, schemes).matrices
        for source in matrix.sources
    }
    expected, states = outputs(lopsided)
    lost = []
    for number, each in enumerate((schemes, type(schemes)(Scheme(3, 128), opposite))):
        report = quantize(lopsided, tmp_path / str(number), scheme=each, algorithm="rtn", device="cpu")
        loaded = load_model(Checkpoint(tmp_path / str(number)), device="cpu", dtype=torch.float32)
        plan, found = prepare(lopsided, None, Scheme(8, None)), []
        walk = unquantized.layers(plan, DATA, device=CPU, dtype=torch.float32, last=0)
        (_, _, (start,)) = next(walk)
        for state in start:
            for index, layer in enumerate(loaded.layers):
                state.x = unquantized.output(layer, index, state)
            found.append(state.x)
        lost.append(unquantized.squared_error(found, expected, states))
        assert {row.scheme for row in report.layers} == {str(scheme) for scheme in each.distinct()}
    assert lost[0] < 0.7 * lost[1]


def test_groups_are_as_large_as_fit(tmp_path):
    model = write_model(tmp_path / "model", hidden_size=96, head_dim=24, intermediate_size=192, num_hidden_layers=1)
    matrices = prepare(model, None, mixed(model, 4.0)).matrices
    sizes = {matrix.linear: matrix.scheme.group_size for matrix in matrices}
    assert sizes == {"attention.qkv": 32, "attention.o": 32, "mlp.gate_up": 32, "mlp.down": 64}  # of 96 and 192 columns


def test_what_cannot_be_done(model):
    for bits in (2.0, 9.0, 16.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match=r"expected from 2\.\d+ to 8\.\d+ bits per weight"):
            mixed(model, bits)
    with pytest.raises(SchemeError):
        mixed(model, 4.5, format="awq")
