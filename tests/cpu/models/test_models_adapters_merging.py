"""`merge_lora`: the merged model is the model with its adapter, all else stays, and nothing is left of a failure."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from adapter_files import (
    VALUES,
    distance,
    loaded,
    logits,
    lora_tensors,
    modules_of,
    targets_of,
    with_lora,
    write_lora,
    write_model,
)
from quantized_files import CHATGLM, HF, all_tensors, same, write_quantized, write_thudm
from safetensors.torch import save_file

from warpbus.errors import CheckpointError, StorageError, TensorError, UsageError, WarpbusError
from warpbus.formats import Checkpoint, writer
from warpbus.models.adapters import Lora, load_adapter, merge_lora, save_lora
from warpbus.models.families import family_of

START = "base_model.model."


@pytest.mark.parametrize("family", VALUES)
def test_the_merged_model_is_the_model_with_its_adapter(family: str, tmp_path: Path) -> None:
    model, tensors = write_model(tmp_path / "model", family), lora_tensors(modules_of(family))
    write_lora(tmp_path / "lora", tensors, target_modules=targets_of(family))
    reference = with_lora(model, tmp_path / "by-hand", tensors, 6 / 4, START)
    done = merge_lora(model, tmp_path / "lora", tmp_path / "merged")
    assert distance(logits(loaded(tmp_path / "merged"), family), logits(loaded(reference), family)) < 1e-5
    assert (done.matrices, done.rank, done.bytes) == (len(modules_of(family)), 4, Checkpoint(model).total_bytes)
    assert json.loads((tmp_path / "merged" / "config.json").read_text()) == VALUES[family]
    assert (tmp_path / "merged" / "tokenizer_config.json").read_text() == (model / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_rounded_once_and_all_else_stays_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "glm", dtype)
    tensors = lora_tensors({"model.layers.0.mlp.down_proj": (64, 96)})
    write_lora(tmp_path / "lora", tensors)
    calls: list[tuple[str, int, int]] = []
    done = merge_lora(model, tmp_path / "lora", tmp_path / "merged", progress=lambda *call: calls.append(call))
    before, after = all_tensors(model), all_tensors(tmp_path / "merged")
    name = "model.layers.0.mlp.down_proj.weight"
    a, b = (tensors[f"{START}model.layers.0.mlp.down_proj.lora_{part}.weight"] for part in "AB")
    exact = before[name].double() + 1.5 * b.double() @ a.double()
    assert after[name].dtype == dtype
    assert ((after[name].double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps * 0.501 + 1e-6).all()
    ratio = (1.5 * b @ a).norm() / before[name].float().norm()
    assert done.largest_change == pytest.approx(float(ratio), rel=1e-4)
    assert same({key: before[key] for key in before if key != name}, {key: after[key] for key in after if key != name})
    total = len(before)
    assert calls == [("merging", count, total) for count in range(total + 1)]


def test_a_saved_adapter_merges_to_the_same(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "chatglm")
    write_lora(tmp_path / "lora", lora_tensors(modules_of("chatglm")))
    config = family_of(VALUES["chatglm"]).config(VALUES["chatglm"])
    lora = load_adapter(tmp_path / "lora", config)
    assert isinstance(lora, Lora)
    save_lora(tmp_path / "again", lora, config, base=str(model), rank=4, alpha=4.0)
    for name in ("lora", "again"):
        merge_lora(model, tmp_path / name, tmp_path / f"with-{name}")
    first, second = all_tensors(tmp_path / "with-lora"), all_tensors(tmp_path / "with-again")
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


@pytest.mark.parametrize("kind", ["gptq", "compressed-tensors", "thudm"])
def test_a_quantized_model_is_refused_with_advice(kind: str, tmp_path: Path) -> None:
    if kind == "thudm":
        model, _ = write_thudm(tmp_path / "model", 4)
    else:
        model, _ = write_quantized(tmp_path / "model", CHATGLM if kind == "gptq" else HF, kind, "w4a16-g32")
    write_lora(tmp_path / "lora", lora_tensors(modules_of("glm")))
    with pytest.raises(UsageError, match=rf"is quantized \({kind}\).*merge into the plain model.*warpbus quantize"):
        merge_lora(model, tmp_path / "lora", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_prefix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prefix").mkdir()
    (tmp_path / "prefix" / "config.json").write_text('{"pre_seq_len": 4}')
    with pytest.raises(UsageError, match="is a prefix of keys and values"):
        merge_lora(write_model(tmp_path / "model", "glm"), tmp_path / "prefix", tmp_path / "merged")


def test_targets(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "glm")
    lora = write_lora(tmp_path / "lora", lora_tensors(modules_of("glm")))
    around = write_model(tmp_path / "around", "glm")
    shutil.move(lora, lora := around / "lora")
    for output in (model, lora, around):
        with pytest.raises(UsageError, match="replacing it would delete"):
            merge_lora(model, lora, output, overwrite=True)
    with pytest.raises(CheckpointError, match="there is no such directory"):
        merge_lora(model, tmp_path / "none", tmp_path / "merged")
    merge_lora(model, lora, tmp_path / "merged")
    with pytest.raises(StorageError, match="exists and is not empty"):
        merge_lora(model, lora, tmp_path / "merged")
    merge_lora(model, lora, tmp_path / "merged", overwrite=True)


def test_sums_that_a_dtype_cannot_hold(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "glm", torch.float16)
    tensors = {name: tensor * 1e5 for name, tensor in lora_tensors(modules_of("glm")).items()}
    with pytest.raises(
        TensorError, match=r"\.weight: the sum with the adapter has values that torch\.float16 cannot hold"
    ):
        merge_lora(model, write_lora(tmp_path / "lora", tensors), tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora", "model"]


def test_a_model_that_its_config_does_not_describe(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "glm")
    lora = write_lora(tmp_path / "lora", lora_tensors(modules_of("glm")))
    weights = all_tensors(model)
    name = "model.layers.1.self_attn.o_proj.weight"
    save_file(weights | {name: torch.zeros(64, 64)}, model / "model.safetensors")
    with pytest.raises(TensorError, match=r"o_proj\.weight: expected .* shape \[64, 128\].*found .* \[64, 64\]"):
        merge_lora(model, lora, tmp_path / "merged")
    del weights[name]
    save_file(weights, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj\.weight"):
        merge_lora(model, lora, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora", "model"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", "glm")
    lora = write_lora(tmp_path / "lora", lora_tensors(modules_of("glm")))

    def full(*_arguments: object, **_settings: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_file", full)
    with pytest.raises(WarpbusError, match="disk full"):
        merge_lora(model, lora, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora", "model"]
