"""Candidates tried on sample layers: what is measured there, and that the choice is a good one for the whole model."""

from dataclasses import replace

import pytest
import torch
from quantization_models import write_model

from warpbus.cuda.cpu import cpu_model
from warpbus.errors import DataError, SchemeError, UsageError
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.qtensor import Scheme
from warpbus.quantization import Calibration, quantize, unquantized
from warpbus.quantization.options import QuantizationOptions
from warpbus.quantization.preflight import prepare
from warpbus.quantization.trials import sample_layers, split, try_candidates

CPU = torch.device("cpu")
RANDOM = torch.Generator().manual_seed(3)
ON_CPU = QuantizationOptions(device="cpu")
DATA = Calibration(tuple(tuple(torch.randint(7, 300, (24,), generator=RANDOM).tolist()) for _ in range(24)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("trials") / "model")


@pytest.fixture(scope="module")
def found(model):
    return try_candidates(model, calibration=DATA, options=ON_CPU)


def files(directory):
    return {file.name: file.stat().st_mtime_ns for file in directory.rglob("*")}


def outputs_of_layer(directory, index):
    """Of the layer of a model for DATA that came through the layers before it."""
    plan = prepare(directory, None, Scheme(8, None))
    for number, layer, (states,) in unquantized.layers(plan, DATA, device=CPU, dtype=torch.float32, last=index):
        if number == index:
            return [unquantized.output(layer, index, state) for state in states], states
    raise AssertionError


def test_more_bits_and_better_algorithms_have_smaller_errors(found):
    errors = {(trial.scheme, trial.algorithm): trial.error for trial in found.trials}
    assert len(errors) == 14
    assert errors["w8a16", "gptq"] < errors["w4a16-g32", "gptq"] < errors["w4a16-g128", "gptq"]
    assert errors["w4a16-g128", "gptq"] < errors["w3a16-g128", "gptq"] < errors["w3a16-g128", "rtn"]
    assert errors["w8a16", "rtn"] < errors["w8a8-int8", "rtn"]  # which also rounds the activations
    assert found.chosen.scheme == "w8a16"
    assert found.layers == (0, 1)


def test_what_else_a_trial_says(found, model):
    for trial in found.trials:
        assert trial.nbytes == trial.memory == prepare(model, None, Scheme.parse(trial.scheme)).bytes_after
        assert trial.token_seconds > 0
        assert trial.seconds > 0
    assert found.device == f"{cpu_model()}, threads: {torch.get_num_threads()}"
    speeds = {
        trial.scheme: {other.token_seconds for other in found.trials if other.scheme == trial.scheme}
        for trial in found.trials
    }
    assert all(len(each) == 1 for each in speeds.values())


def test_the_error_is_that_of_the_layers_outputs(tmp_path):
    """Of a model of one layer, rounded to nearest, the whole run gives the same layer as the trial."""
    model = write_model(tmp_path / "one", num_hidden_layers=1)
    (trial,) = try_candidates(model, calibration=DATA, scheme=Scheme(4, 128), algorithm="rtn", options=ON_CPU).trials
    quantize(model, tmp_path / "out", algorithm="rtn", device="cpu")
    judged = split(DATA)[1]
    plan = prepare(model, None, Scheme(4, 128))
    (walked,) = unquantized.layers(plan, judged, device=CPU, dtype=torch.float32, last=0)
    _, layer, (states,) = walked
    expected = [unquantized.output(layer, 0, state) for state in states]
    rounded = load_model(Checkpoint(tmp_path / "out"), device="cpu", dtype=torch.float32).layers[0]
    got = [unquantized.output(rounded, 0, state) for state in states]
    lost = unquantized.squared_error(got, expected, states) ** 0.5
    assert trial.error == pytest.approx(lost, rel=1e-3)


def test_fp4_is_tried_by_the_algorithms_that_fit_it(model):
    found = try_candidates(model, calibration=DATA, scheme=Scheme.parse("w4a16-nvfp4"), options=ON_CPU)
    errors = {trial.algorithm: trial.error for trial in found.trials}
    assert set(errors) == {"gptq", "rtn"}
    assert 0 < errors["gptq"] < errors["rtn"]


def test_nothing_is_written(model):
    before = files(model.parent)
    try_candidates(model, calibration=DATA, scheme=Scheme(4, 128), algorithm="gptq", options=ON_CPU)
    assert files(model.parent) == before


def test_limits_to_what_may_be_tried(model, found):
    only = try_candidates(model, calibration=DATA, scheme=Scheme(2, 64), algorithm="awq", options=ON_CPU)
    assert [(trial.scheme, trial.algorithm) for trial in only.trials] == [("w2a16-g64", "awq")]
    rounded = try_candidates(model, calibration=DATA, algorithm="rtn", options=ON_CPU)
    expected = [(trial.scheme, trial.error) for trial in found.trials if trial.algorithm == "rtn"]
    assert [trial.scheme for trial in rounded.trials] == [scheme for scheme, _ in expected]
    assert [trial.error for trial in rounded.trials] == pytest.approx([error for _, error in expected], rel=1e-4)
    of_format = try_candidates(model, calibration=DATA, algorithm="rtn", options=replace(ON_CPU, format="awq"))
    assert {Scheme.parse(trial.scheme).bits for trial in of_format.trials} == {4}


def test_the_memory_that_is_allowed(model):
    asked = []

    def running(config, dtype, scheme):
        asked.append((config.num_layers, dtype))
        return scheme.bits * 100

    found = try_candidates(model, calibration=DATA, algorithm="rtn", memory=400, running=running, options=ON_CPU)
    assert set(asked) == {(2, torch.float32)}
    assert Scheme.parse(found.chosen.scheme).bits == 4
    with pytest.raises(UsageError, match="allow more"):
        try_candidates(model, calibration=DATA, algorithm="rtn", memory=299, running=running, options=ON_CPU)


def test_what_cannot_be_tried(model):
    with pytest.raises(UsageError, match="goal is 'best'"):
        try_candidates(model, calibration=DATA, goal="best", options=ON_CPU)
    with pytest.raises(UsageError, match="no way to quantize to w4a16 by smoothquant"):
        try_candidates(model, calibration=DATA, scheme=Scheme(4, None), algorithm="smoothquant", options=ON_CPU)
    with pytest.raises(SchemeError, match="q_proj"):
        try_candidates(model, calibration=DATA, scheme=Scheme(2, 128), options=replace(ON_CPU, format="awq"))
    with pytest.raises(DataError):
        try_candidates(model, calibration=Calibration(()), scheme=Scheme(4, 128), options=ON_CPU)


def test_candidates_are_judged_on_what_they_have_not_seen():
    seen, unseen = split(DATA)
    assert set(seen.sequences) | set(unseen.sequences) == set(DATA.sequences)
    assert not set(seen.sequences) & set(unseen.sequences)
    one = Calibration(DATA.sequences[:1])
    assert split(one) == (one, one)
    long = Calibration(tuple((index,) * 5000 for index in range(40)))
    seen, unseen = split(long)
    assert [len(seen.sequences), len(unseen.sequences)] == [7, 2]


@pytest.mark.parametrize(("layers", "sampled"), [(1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (40, (0, 20, 39))])
def test_the_sample_layers(layers, sampled):
    assert sample_layers(layers) == sampled
