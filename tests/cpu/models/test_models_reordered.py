"""Models whose columns were reordered by activation are loaded as what their groups of columns say."""

import json
from pathlib import Path

import pytest
import torch
from quantized_files import HF, all_tensors, write_files, write_quantized
from torch import Tensor

from warpbus.errors import CheckpointError, TensorError
from warpbus.formats import Checkpoint
from warpbus.models import load_model, quantized_parameters, read_config
from warpbus.models.convert import convert
from warpbus.qtensor import Scheme, unpack

TOKENS = torch.arange(12).view(2, 6)
INDEX = {"gptq": "g_idx", "gptq-v2": "g_idx", "compressed-tensors": "weight_g_idx"}


def dense(form: str, tensors: dict[str, Tensor], prefix: str, scheme: Scheme, index: Tensor) -> Tensor:
    """The weights of a matrix, column by column."""
    if form == "compressed-tensors":
        scales = tensors[f"{prefix}.weight_scale"].float()
        codes = unpack(tensors[f"{prefix}.weight_packed"], scheme.bits, len(index))
        zeros = torch.full(scales.shape, scheme.middle_code)
        if not scheme.symmetric:
            zeros = unpack(tensors[f"{prefix}.weight_zero_point"].T, scheme.bits, len(scales)).T
    else:
        scales = tensors[f"{prefix}.scales"].float().T
        codes = unpack(tensors[f"{prefix}.qweight"].T, scheme.bits, len(index))
        zeros = unpack(tensors[f"{prefix}.qzeros"], scheme.bits, len(scales)).T.int() + (form == "gptq")
    columns = [(codes[:, i].int() - zeros[:, g].int()) * scales[:, g] for i, g in enumerate(index.tolist())]
    return torch.stack(columns, 1)


def write_reordered(directory: Path, form: str, scheme: str) -> tuple[Path, dict[str, Tensor]]:
    """A model whose matrices each have an order of their own, and the plain tensors that mean the same."""
    source, plain = write_quantized(directory.with_name("ordered"), HF, form, scheme)
    tensors, config = all_tensors(source), json.loads((source / "config.json").read_text())
    described = config["quantization_config"]
    if form == "compressed-tensors":
        described["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    else:
        described["desc_act"] = True
    generator = torch.Generator().manual_seed(9)
    for name, expected in plain.items():
        prefix = name.removesuffix(".weight")
        if f"{prefix}.weight_packed" in tensors or f"{prefix}.qweight" in tensors:
            columns = expected.shape[1]
            order = torch.randperm(columns, generator=generator)
            index = (torch.arange(columns) // 32)[order].int()
            tensors[f"{prefix}.{INDEX[form]}"] = index
            plain[name] = dense(form, tensors, prefix, Scheme.parse(scheme), index)
    return write_files(directory, config, tensors), plain


def logits(directory: Path) -> Tensor:
    model = load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)
    with torch.no_grad():
        return model(TOKENS)


@pytest.mark.parametrize("form", INDEX)
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w4a16-g32-asym", "w8a16-g32"])
def test_a_reordered_model_computes_what_its_files_say(tmp_path, form, scheme):
    directory, plain = write_reordered(tmp_path / "model", form, scheme)
    expected = logits(write_files(tmp_path / "plain", HF, plain))
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(directory), expected, rtol=1e-4, atol=1e-4)
    checkpoint = Checkpoint(directory)
    assert quantized_parameters(checkpoint, read_config(checkpoint)) == {}


@pytest.mark.parametrize("form", INDEX)
def test_it_is_dequantized_by_convert_and_has_no_other_form(tmp_path, form):
    directory, plain = write_reordered(tmp_path / "model", form, "w4a16-g32")
    convert(directory, tmp_path / "out", to="float16")
    found = all_tensors(tmp_path / "out")
    assert found.keys() == plain.keys()
    for name, expected in plain.items():
        assert torch.equal(found[name], expected.half()), name
    with pytest.raises(CheckpointError, match="convert the model to float16 or bfloat16"):
        convert(directory, tmp_path / "new", to="awq")


@pytest.mark.parametrize("value", [None, -1])
def test_columns_in_order_stay_quantized(tmp_path, value):
    source, plain = write_quantized(tmp_path / "ordered", HF, "compressed-tensors", "w4a16-g32")
    tensors, config = all_tensors(source), json.loads((source / "config.json").read_text())
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        columns = tensors[name].shape[1] * 8
        index = torch.arange(columns, dtype=torch.int32) // 32 if value is None else torch.full((columns,), value)
        tensors[name.replace("weight_packed", "weight_g_idx")] = index.int()
    directory = write_files(tmp_path / "model", config, tensors)
    checkpoint = Checkpoint(directory)
    assert len(quantized_parameters(checkpoint, read_config(checkpoint))) == 8
    torch.testing.assert_close(logits(directory), logits(write_files(tmp_path / "plain", HF, plain)), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("index", "match"),
    [
        (torch.full((64,), 7, dtype=torch.int32), "names group 7, expected 0 to 1"),
        (torch.zeros(64), "expected a vector of int32, found torch.float32"),
        (torch.zeros(2, 32, dtype=torch.int32), "expected a vector of int32"),
    ],
)
def test_damaged_groups_are_refused(tmp_path, index, match):
    source, _ = write_quantized(tmp_path / "ordered", HF, "compressed-tensors", "w4a16-g32")
    tensors, config = all_tensors(source), json.loads((source / "config.json").read_text())
    tensors["model.layers.0.self_attn.q_proj.weight_g_idx"] = index
    directory = write_files(tmp_path / "model", config, tensors)
    with pytest.raises(TensorError, match=match):
        load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)
