"""Quantized models from format to format: nothing changes, nothing is written that does not fit, damage is named."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import (
    CHATGLM,
    HF,
    all_tensors,
    plain_tensors,
    same,
    write_files,
    write_quantized,
    write_thudm,
)
from torch import Tensor

from warpbus.errors import CheckpointError, SchemeError, StorageError, TensorError, UsageError, WarpbusError
from warpbus.formats import Checkpoint, format_of, safetensors_io, writer
from warpbus.models import load_model, read_config
from warpbus.models.convert import convert
from warpbus.models.layers import QuantizedLinear

LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")

TOKENS = torch.arange(12).view(2, 6)
FORMS = ("compressed-tensors", "gptq", "gptq-v2", "awq")


def logits(directory: Path) -> Tensor:
    model = load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)
    with torch.no_grad():
        return model(TOKENS)


def logits_of(directory: Path, values: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    return logits(write_files(directory, values, tensors))


def close(found: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def left_over(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith(".") or path.name == "out")


@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        (form, scheme)
        for form in FORMS
        for scheme in ("w4a16-g32", "w4a16-asym", "w3a16-g32-asym", "w2a16-g32", "w8a16")
        if form != "awq" or scheme.startswith("w4")
    ],
)
def test_every_format_is_loaded(form: str, scheme: str, tmp_path: Path) -> None:
    directory, plain = write_quantized(tmp_path / "quantized", HF, form, scheme)
    model = load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)
    for linear in LINEARS:
        layer = model.layers[1].get_submodule(linear)
        assert isinstance(layer, QuantizedLinear)
        assert str(layer.scheme) == scheme
    with torch.no_grad():
        close(model(TOKENS), logits_of(tmp_path / "plain", HF, plain))


@pytest.mark.parametrize("bits", [4, 8])
def test_models_of_thudm_are_loaded_and_converted(bits: int, tmp_path: Path) -> None:
    directory, plain = write_thudm(tmp_path / "thudm", bits)
    expected = logits_of(tmp_path / "plain", CHATGLM, plain)
    close(logits(directory), expected)
    for form in FORMS[: 4 if bits == 4 else 3]:
        done = convert(directory, tmp_path / form, to=form)
        assert (done.source, done.target, done.schemes, done.matrices) == ("thudm", form, f"w{bits}a16", 8)
        checkpoint = Checkpoint(tmp_path / form)
        assert "quantization_bit" not in checkpoint.config
        prefix = "transformer.encoder.layers.1.mlp.dense_4h_to_h"
        format = format_of(checkpoint.config)
        assert format is not None
        assert format.name == form
        scheme = format.read_schemes(checkpoint.config).of(prefix)
        assert scheme is not None
        read = format.from_tensors(checkpoint, prefix, scheme)
        assert torch.equal(read.dequantize(torch.float32), plain[f"{prefix}.weight"])
        close(logits(tmp_path / form), expected)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(FORMS, 2)))
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w4a16-g32-asym"])
def test_there_and_back_is_the_same_file(first: str, second: str, scheme: str, tmp_path: Path) -> None:
    directory, _ = write_quantized(tmp_path / "first", HF, first, scheme, keep="layers.1.self_attn.o_proj")
    there = convert(directory, tmp_path / "second", to=second)
    assert (there.source, there.target, there.schemes) == (first, second, scheme)
    assert (there.scales_rounded, there.ffn) == (0, (160, 160))
    assert (tmp_path / "second" / "tokenizer_config.json").is_file()
    convert(tmp_path / "second", tmp_path / "back", to=first)
    assert same(all_tensors(tmp_path / "back"), all_tensors(directory))
    assert Checkpoint(tmp_path / "back").config == Checkpoint(directory).config
    convert(tmp_path / "back", tmp_path / "again", to=second)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("second", "again")]
    assert files[0] == files[1]


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_other_bits_between_the_formats_that_have_them(bits: int, tmp_path: Path) -> None:
    directory, plain = write_quantized(tmp_path / "ct", HF, "compressed-tensors", f"w{bits}a16-g32-asym")
    convert(directory, tmp_path / "v1", to="gptq")
    convert(tmp_path / "v1", tmp_path / "v2", to="gptq-v2")
    convert(tmp_path / "v2", tmp_path / "back", to="compressed-tensors")
    assert same(all_tensors(tmp_path / "back"), all_tensors(directory))
    close(logits(tmp_path / "v2"), logits_of(tmp_path / "plain", HF, plain))


def test_several_schemes_go_to_gptq_and_back(tmp_path: Path) -> None:
    schemes = {"layers.0.mlp.down": "w8a16-g32", "": "w4a16-g32"}
    directory, plain = write_quantized(tmp_path / "ct", HF, "compressed-tensors", schemes)
    done = convert(directory, tmp_path / "gptq", to="gptq")
    assert sorted(done.schemes.split(" + ")) == ["w4a16-g32", "w8a16-g32"]
    close(logits(tmp_path / "gptq"), logits_of(tmp_path / "plain", HF, plain))
    convert(tmp_path / "gptq", tmp_path / "back", to="compressed-tensors")
    assert same(all_tensors(tmp_path / "back"), all_tensors(directory))
    with pytest.raises(SchemeError, match=r"AWQ format has one scheme"):
        convert(directory, tmp_path / "out", to="awq")
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
def test_back_to_plain_weights(to: str, tmp_path: Path) -> None:
    directory, plain = write_quantized(tmp_path / "awq", HF, "awq", "w4a16-g32")
    done = convert(directory, tmp_path / "plain", to=to, pad_ffn=192)
    assert (done.target, done.scales, done.ffn) == (to, 0, (160, 192))
    found = all_tensors(tmp_path / "plain")
    dtype = getattr(torch, to)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert torch.equal(found[name], plain[name].to(dtype))
    config = Checkpoint(tmp_path / "plain").config
    assert "quantization_config" not in config
    assert (config["torch_dtype"], config["intermediate_size"]) == (to, 192)


@pytest.mark.parametrize("values", [HF, {**HF, "model_type": "qwen3"}, CHATGLM], ids=lambda each: each["model_type"])
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w4a16-g32-asym", "w4a16-asym", "w4a16"])
def test_a_widened_model_is_the_same_function(values: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    directory, plain = write_quantized(tmp_path / "ct", values, "compressed-tensors", scheme)
    for form, size in (("gptq", "auto"), ("awq", 224), ("compressed-tensors", "384")):
        done = convert(directory, tmp_path / form, to=form, pad_ffn=size)
        expected = 256 if size == "auto" else int(size)
        assert done.ffn == (160, expected)
        assert read_config(Checkpoint(tmp_path / form)).layers[0].mlp.ffn_size == expected
        close(logits(tmp_path / form), logits_of(tmp_path / f"plain-{form}", values, plain))


def test_widening_layers_that_are_not_quantized(tmp_path: Path) -> None:
    directory, plain = write_quantized(tmp_path / "ct", HF, "compressed-tensors", "w3a16-g32", keep="layers.0.mlp")
    convert(directory, tmp_path / "gptq", to="gptq", pad_ffn="auto")
    close(logits(tmp_path / "gptq"), logits_of(tmp_path / "plain", HF, plain))
    described = Checkpoint(tmp_path / "gptq").config["quantization_config"]
    assert [name for name in described["dynamic"] if "gate_up" in name] == [r"-:^model\.layers\.0\.mlp\.gate_up_proj$"]


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w8a8-fp8"])
def test_eight_bit_activations_stay_where_they_can(scheme: str, tmp_path: Path) -> None:
    directory, _ = write_quantized(tmp_path / "w8a8", HF, "compressed-tensors", scheme)
    convert(directory, tmp_path / "wide", to="compressed-tensors", pad_ffn=200)
    close(logits(tmp_path / "wide"), logits(directory))
    with pytest.raises(SchemeError, match=rf"^model\.layers\.0\..*: the GPTQ format has no {scheme}"):
        convert(directory, tmp_path / "out", to="gptq")


def test_scales_of_other_types(tmp_path: Path) -> None:
    directory, _ = write_quantized(tmp_path / "bf16", HF, "compressed-tensors", "w4a16-g32", scale_dtype=torch.bfloat16)
    done = convert(directory, tmp_path / "exact", to="gptq")
    assert (done.scales_rounded, done.scales > 1000) == (0, True)  # of this size, bfloat16 fits into float16
    assert all_tensors(tmp_path / "exact")["model.layers.0.self_attn.o_proj.scales"].dtype == torch.float16
    directory, _ = write_quantized(tmp_path / "f32", HF, "compressed-tensors", "w4a16-g32", scale_dtype=torch.float32)
    done = convert(directory, tmp_path / "rounded", to="awq")
    assert done.scales // 2 < done.scales_rounded <= done.scales
    assert f"{done.scales_rounded:,} of {done.scales:,} scales were rounded" in done.summary()


@pytest.mark.parametrize(("scale", "shown"), [(1e-9, "1e-09"), (1e6, "1e+06")])
def test_scales_that_float16_cannot_hold(scale: float, shown: str, tmp_path: Path) -> None:
    directory, _ = write_quantized(tmp_path / "bf16", HF, "compressed-tensors", "w4a16-g32", scale_dtype=torch.float32)
    change(directory, "model.layers.1.mlp.down_proj.weight_scale", (3, 4), scale)
    with pytest.raises(
        TensorError, match=rf"^model\.layers\.1\.mlp\.down_proj: a scale is {shown}".replace("+", r"\+")
    ):
        convert(directory, tmp_path / "out", to="gptq")
    assert left_over(tmp_path) == []


def test_a_tensor_that_float16_makes_zeros_of(tmp_path: Path) -> None:
    directory, _ = write_quantized(tmp_path / "bf16", HF, "compressed-tensors", "w4a16-g32")
    tensors = {name: tensor.float() for name, tensor in all_tensors(directory).items() if "norm" in name}
    tensors = all_tensors(directory) | tensors | {"model.norm.weight": torch.full((64,), 1e-9)}
    safetensors_io.write_file(directory / "model.safetensors", tensors)
    with pytest.raises(
        TensorError, match=r"^model\.norm\.weight: all its values are so small that torch\.float16 makes 0"
    ):
        convert(directory, tmp_path / "out", to="float16")
    assert left_over(tmp_path) == []
    convert(directory, tmp_path / "plain", to="bfloat16")


def change(directory: Path, name: str, place: tuple[int, ...], value: float) -> None:
    tensors = {each: tensor.clone() for each, tensor in all_tensors(directory).items()}
    tensors[name][place] = value
    safetensors_io.write_file(directory / "model.safetensors", tensors)


def test_zero_points_of_0_go_anywhere_but_to_version_1(tmp_path: Path) -> None:
    directory, _ = write_quantized(tmp_path / "v2", HF, "gptq-v2", "w4a16-g32-asym")
    change(directory, "model.layers.1.mlp.down_proj.qzeros", (0, 0), 0x11111110)
    with pytest.raises(SchemeError, match=r"^model\.layers\.1\.mlp\.down_proj: has zero points 0, .* use gptq-v2"):
        convert(directory, tmp_path / "out", to="gptq")
    assert left_over(tmp_path) == []
    convert(directory, tmp_path / "awq", to="awq")
    convert(tmp_path / "awq", tmp_path / "back", to="gptq-v2")
    assert same(all_tensors(tmp_path / "back"), all_tensors(directory))


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    directory, plain = write_quantized(tmp_path / "ct", {**HF, "intermediate_size": 164}, "compressed-tensors", "w4a16")
    with pytest.raises(SchemeError, match=r"down_proj: 164 columns of 4 bits do not fill whole words.* pad the FFN"):
        convert(directory, tmp_path / "out", to="gptq")
    assert left_over(tmp_path) == []
    convert(directory, tmp_path / "gptq", to="gptq", pad_ffn="auto")
    close(logits(tmp_path / "gptq"), logits_of(tmp_path / "plain", {**HF, "intermediate_size": 164}, plain))
    directory, _ = write_quantized(tmp_path / "w3", HF, "compressed-tensors", "w3a16-g32")
    with pytest.raises(SchemeError, match=r"^model\.layers\.0\..*: the AWQ format has weights of 4 bits only"):
        convert(directory, tmp_path / "out", to="awq")
    with pytest.raises(SchemeError, match="200 columns cannot be cut into groups of 32"):
        convert(directory, tmp_path / "out", to="compressed-tensors", pad_ffn=200)
    assert left_over(tmp_path) == []


def test_arguments(tmp_path: Path) -> None:
    directory, _ = write_quantized(tmp_path / "awq", HF, "awq", "w4a16-g32")
    plain = write_files(tmp_path / "plain", HF, plain_tensors(HF))
    empty = write_files(tmp_path / "empty", Checkpoint(directory).config, plain_tensors(HF))
    cases: list[tuple[Path, dict[str, Any], type[WarpbusError], str]] = [
        (directory, {"to": "ggml"}, UsageError, "--to ggml: expected one of compressed-tensors, gptq, gptq-v2, awq"),
        (directory, {"to": "awq"}, UsageError, "is already in format awq"),
        (directory, {"to": "gptq", "pad_ffn": "wide"}, UsageError, "--pad-ffn wide: expected auto, none, or a size"),
        (directory, {"to": "gptq", "pad_ffn": 128}, UsageError, "--pad-ffn 128: .* a size from 160"),
        (directory, {"to": "gptq", "pad_ffn": 2**30}, UsageError, "--pad-ffn 1073741824"),
        (plain, {"to": "gptq"}, UsageError, "is not quantized, .* use warpbus quantize"),
        (empty, {"to": "gptq"}, CheckpointError, "declares quantization awq, but no matrix is quantized"),
        (tmp_path / "none", {"to": "gptq"}, CheckpointError, "there is no such directory"),
    ]
    for model, arguments, error, message in cases:
        with pytest.raises(error, match=message) as caught:
            convert(model, tmp_path / "out", **arguments)
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(UsageError, match="replacing it would delete"):
        convert(directory, directory, to="gptq", overwrite=True)
    within = shutil.copytree(directory, plain / "within")
    for target in ("gptq", "float16"):
        with pytest.raises(UsageError, match=r"replacing it would delete .*within, which is read"):
            convert(within, plain, to=target, overwrite=True)
    assert (within / "config.json").is_file()
    with pytest.raises(StorageError, match="exists and is not empty"):
        convert(directory, tmp_path / "plain", to="gptq")
    convert(directory, tmp_path / "plain", to="gptq", overwrite=True)
    assert Checkpoint(tmp_path / "plain").config["quantization_config"]["quant_method"] == "gptq"


def test_a_difference_is_an_error_and_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = write_quantized(tmp_path / "ct", HF, "compressed-tensors", "w4a16-g32")
    convert(directory, tmp_path / "out", to="gptq")
    before = all_tensors(tmp_path / "out")

    def forgetful(file: Path, tensors: dict[str, Tensor]) -> int:
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed["model.layers.1.mlp.down_proj.qweight"][2, 3] ^= 1 << 17
        return safetensors_io.write_file(file, changed)

    monkeypatch.setattr(writer, "write_file", forgetful)
    with pytest.raises(
        StorageError, match=r"out: model\.layers\.1\.mlp\.down_proj\.weight: the data read back differs"
    ):
        convert(directory, tmp_path / "out", to="gptq-v2", overwrite=True)
    assert left_over(tmp_path) == ["out"]
    assert same(all_tensors(tmp_path / "out"), before)  # what was there before is there still
    with pytest.raises(StorageError, match="the output was discarded"):
        convert(directory, tmp_path / "other", to="gptq")
    assert not (tmp_path / "other").exists()


def test_damaged_sources_are_named(tmp_path: Path) -> None:
    directory, _ = write_quantized(tmp_path / "gptq", HF, "gptq", "w4a16-g32")
    change(directory, "model.layers.0.self_attn.k_proj.g_idx", (5,), 99)
    with pytest.raises(TensorError, match=r"^model\.layers\.0\.self_attn\.k_proj\.g_idx: names group 99"):
        convert(directory, tmp_path / "out", to="awq")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["group_size"] = 10**12
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="groups of 1000000000000 are not supported"):
        convert(directory, tmp_path / "out", to="awq")
    assert left_over(tmp_path) == []


def test_biases_of_zeros_that_auto_gptq_wrote(tmp_path: Path) -> None:
    values = {**HF, "model_type": "llama"}
    directory, plain = write_quantized(tmp_path / "gptq", values, "gptq", "w4a16-g32")
    tensors = all_tensors(directory)
    biases = {f"model.layers.{index}.mlp.down_proj.bias": torch.zeros(64).half() for index in range(2)}
    config = Checkpoint(directory).config
    old = write_files(tmp_path / "old", config, tensors | biases)
    close(logits(old), logits_of(tmp_path / "plain", values, plain))
    convert(old, tmp_path / "awq", to="awq")
    convert(tmp_path / "awq", tmp_path / "back", to="gptq")
    assert same(all_tensors(tmp_path / "back"), tensors)
    biases["model.layers.1.mlp.down_proj.bias"][3] = 1
    used = write_files(tmp_path / "used", config, tensors | biases)
    with pytest.raises(CheckpointError, match=r"unexpected weights model\.layers\.1\.mlp\.down_proj\.bias:"):
        convert(used, tmp_path / "out", to="awq")


@pytest.mark.parametrize("form", ["gptq", "gptq-v2", "awq"])
def test_transformers_understands_the_configurations(form: str, tmp_path: Path) -> None:
    """Only the configuration: what reads the weights is a package of its own."""
    quantizers = pytest.importorskip("transformers.quantizers.auto")
    directory, _ = write_quantized(tmp_path / "model", HF, form, "w4a16-g32")
    described = Checkpoint(directory).config["quantization_config"]
    read = quantizers.AutoQuantizationConfig.from_dict(described)
    assert (read.bits, read.group_size) == (4, 32)
    assert read.format == {"gptq": "gptq", "gptq-v2": "gptq_v2", "awq": "gemm"}[form]


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
def test_router_biases_stay_in_float32(to: str, poet_moe: Path, tmp_path: Path) -> None:
    convert(poet_moe, tmp_path / "fp8", to="fp8-block")
    convert(tmp_path / "fp8", tmp_path / "plain", to=to)
    before, after = Checkpoint(poet_moe), Checkpoint(tmp_path / "plain")
    biases = [name for name in before.names() if name.endswith("e_score_correction_bias")]
    assert biases
    for name in biases:
        assert torch.equal(after.tensor(name), before.tensor(name))
    assert after.tensor("model.norm.weight").dtype == getattr(torch, to)


def test_progress_names_each_step(tmp_path: Path) -> None:
    directory, _ = write_quantized(tmp_path / "ct", HF, "compressed-tensors", "w4a16-g32")
    seen: list[tuple[str, int, int]] = []
    convert(directory, tmp_path / "out", to="gptq", progress=lambda *step: seen.append(step))
    assert list(dict.fromkeys(what for what, _, _ in seen)) == ["checking", "converting", "reading back"]
    assert all(done <= total for _, done, total in seen)
    assert [done for what, done, total in seen if done == total] == [12, 25, 25]
