"""Quantizing the layer of multi-token prediction: it is calibrated on what enters it, and its projection is kept."""

import json
from pathlib import Path

import pytest
import torch
from quantization_models import LENGTH, calibration, loaded, run, stop_after_layer, write_model
from safetensors.torch import save_file

from warpbus.dist import Group
from warpbus.engine import Engine
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, PredictionLayer, load_layer, load_model, read_config
from warpbus.models.convert import convert
from warpbus.models.families import family_of
from warpbus.models.layers import QuantizedLinear
from warpbus.models.saving import named_tensors
from warpbus.quantization import Calibration, Progress
from warpbus.quantization.mixed import mixed_schemes
from warpbus.quantization.options import QuantizationOptions
from warpbus.quantization.states import embed, enter_mtp

EXPERTS = {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIG = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1, **EXPERTS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two decoder layers and the layer of multi-token prediction."""
    directory = write_model(tmp_path_factory.mktemp("mtp") / "model", **CONFIG)
    settings = json.loads((directory / "config.json").read_text())
    family = family_of(settings)
    assert family is not None
    decoder, generator = Decoder(family.config(settings)), torch.Generator().manual_seed(3)
    decoder.initialize(generator, std=0.08)
    save_file(dict(named_tensors(decoder, torch.float32)), directory / "model.safetensors")
    return directory


def loaded_mtp(directory: Path) -> Decoder:
    return loaded(directory, mtp=True)


@torch.no_grad()
def divergence(model: Path, quantized: Path) -> float:
    """The mean KL divergence of the first draft's distribution, in nats, on tokens that nothing was calibrated on."""
    tokens = torch.randint(10, 380, (8, LENGTH), generator=torch.Generator().manual_seed(9))

    def drafted(directory: Path) -> torch.Tensor:
        decoder = loaded_mtp(directory)
        return decoder.logits(decoder.predict(tokens[:, 1:], decoder.hidden(tokens)[:, :-1])).log_softmax(-1)

    p, q = drafted(model), drafted(quantized)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_its_layer_is_quantized_and_its_projection_kept(model: Path, tmp_path: Path, algorithm: str) -> None:
    report = run(model, tmp_path / "out", algorithm)
    assert {result.name for result in report.layers if result.layer == 2} == {
        f"layers.2.{matrix.name}" for matrix in loaded_mtp(model).layers[2].spec.matrices
    }
    original, small = loaded_mtp(model).layers[2], loaded_mtp(tmp_path / "out").layers[2]
    assert isinstance(original, PredictionLayer)
    assert isinstance(small, PredictionLayer)
    assert torch.equal(small.projection.weight, original.projection.weight)
    for matrix in small.spec.matrices:
        linear = small.get_submodule(matrix.name)
        assert isinstance(linear, QuantizedLinear)
        assert isinstance(linear.weight.dequantize(torch.float32), torch.Tensor)
    ignored = Checkpoint(tmp_path / "out").config["quantization_config"]["ignore"]
    assert "model.layers.2.eh_proj" in ignored
    assert "model.layers.2.mlp.gate" in ignored
    assert not any("self_attn" in name or "experts" in name for name in ignored)
    assert divergence(model, tmp_path / "out") < 0.3
    engine = Engine(loaded_mtp(tmp_path / "out"), max_model_len=64, speculation="mtp:2")
    (answer,) = engine.decode([[11, 12, 13, 14, 15]], 12)
    plain = load_model(Checkpoint(tmp_path / "out"), device="cpu", dtype=torch.float32)
    assert Engine(plain, max_model_len=64).decode([[11, 12, 13, 14, 15]], 12) == [answer]
    assert engine.stats().drafted > 0


def test_what_calibration_is_worth(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "gptq")
    run(model, tmp_path / "rtn", "rtn")
    assert divergence(model, tmp_path / "gptq") < 0.8 * divergence(model, tmp_path / "rtn")


@torch.no_grad()
def test_what_enters_the_layer(model: Path) -> None:
    """The states of calibration are the inputs of the forward pass, without the last token of each sequence."""
    checkpoint = Checkpoint(model)
    config = read_config(checkpoint, mtp="required")
    data = Calibration((tuple(range(20, 50)), tuple(range(60, 80))))
    table = checkpoint.tensor("model.embed_tokens.weight")
    states = embed(data, 2048, table, config, Group(0, 1, torch.device("cpu")), torch.float32, drift=True)
    decoder = loaded_mtp(model)
    (state,) = states
    state.x = decoder.transform(decoder.embed(state.ids), state.positions, state.context)
    layer = load_layer(checkpoint, config, 2, device="cpu", dtype=torch.float32)
    enter_mtp(states, layer, checkpoint, config)
    entered: list[torch.Tensor] = []
    decoder.layers[2].register_forward_pre_hook(lambda module, inputs: entered.extend(inputs[:1]))
    for row, sequence in enumerate(data.sequences):
        tokens = torch.tensor([sequence])
        decoder.predict(tokens[:, 1:], decoder.hidden(tokens)[:, :-1])
        own = state.real[row]
        assert own.nonzero()[:, 0].tolist() == list(range(len(sequence) - 1))
        torch.testing.assert_close(state.x[row, own], entered[-1][0])


@pytest.mark.usefixtures("one_thread")
def test_processes_give_the_same_bits(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "one")
    run(model, tmp_path / "two", processes=2)
    one, two = (sorted((tmp_path / name).glob("*.safetensors")) for name in ("one", "two"))
    assert one
    assert [file.read_bytes() for file in one] == [file.read_bytes() for file in two]


def test_a_run_that_was_interrupted_goes_on_with_it(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "out"

    with pytest.raises(KeyboardInterrupt):
        run(model, output, progress=Progress(matrix=stop_after_layer(output, 1)))
    assert run(model, output).resumed_layers >= 2
    run(model, tmp_path / "whole")
    files = {
        directory: {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "warpbus-report.json"}
        for directory in (output, tmp_path / "whole")
    }
    assert files[output] == files[tmp_path / "whole"]


def test_another_format(model: Path, tmp_path: Path) -> None:
    """Its quantized matrices are converted, too, and read back; the projection is copied."""
    run(model, tmp_path / "out", "rtn")
    convert(tmp_path / "out", tmp_path / "gptq", to="gptq")
    one, other = loaded_mtp(tmp_path / "out"), loaded_mtp(tmp_path / "gptq")
    tokens = torch.arange(20, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(one.hidden(tokens), other.hidden(tokens), rtol=0, atol=0.01)  # scales in 16 bits
        hidden = one.hidden(tokens)[:, :-1]
        predicted = other.predict(tokens[:, 1:], hidden)
        torch.testing.assert_close(one.predict(tokens[:, 1:], hidden), predicted, rtol=0, atol=0.01)


def test_mixed_precision_covers_it(model: Path) -> None:
    chosen = mixed_schemes(model, 4.5, calibration=calibration(), options=QuantizationOptions(device="cpu"))
    names = {f"model.layers.2.mlp.experts.{expert}.down_proj" for expert in range(5)}
    assert all(chosen.of(name) is not None for name in names)
