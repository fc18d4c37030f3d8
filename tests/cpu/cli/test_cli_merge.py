"""`warpbus merge` as a person uses it."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from warpbus.cli import app
from warpbus.engine import LLM, SamplingParams
from warpbus.errors import StorageError, UsageError
from warpbus.formats import Checkpoint
from warpbus.models import load_model, read_config, tensor_map
from warpbus.models.adapters import Lora, LowRank, save_lora

RUN = "from warpbus.cli import main; main()"


@pytest.fixture(scope="module")
def adapter(tiny_glm, tmp_path_factory):
    """A LoRA that changes every qkv of the tiny model."""
    config, generator = read_config(Checkpoint(tiny_glm)), torch.Generator().manual_seed(0)
    parts = {
        f"layers.{index}.attention.qkv": LowRank(
            torch.randn(2, config.hidden_size, generator=generator),
            torch.randn(sum(config.attention.qkv_rows), 2, generator=generator),
        )
        for index in range(config.num_layers)
    }
    directory = tmp_path_factory.mktemp("adapters") / "lora"
    save_lora(directory, Lora("lora", parts), config, base=str(tiny_glm), rank=2, alpha=4)
    return directory


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_merges_and_says_what_was_done(tiny_glm, adapter, tmp_path):
    found = invoke("merge", tiny_glm, adapter, tmp_path / "out")
    assert found.exit_code == 0
    modules = len(load_file(adapter / "adapter_model.safetensors")) // 2
    assert f"is in {modules} matrices (rank 2, changed by at most" in found.stdout
    assert "merging" in found.stderr
    parameter = "layers.0.attention.qkv.weight"
    names = tensor_map(read_config(Checkpoint(tiny_glm)))[parameter]
    before = torch.cat([Checkpoint(tiny_glm).tensor(name) for name in names])
    model = load_model(Checkpoint(tmp_path / "out"), device="cpu", dtype=torch.float32)
    assert not torch.equal(model.get_parameter(parameter), before)
    # The output is a whole model: it has its tokenizer, and generates.
    answer = LLM(tmp_path / "out", device="cpu").generate("床前", SamplingParams(temperature=0, max_tokens=4))[0]
    assert answer.token_ids


def test_the_merged_model_says_what_the_adapter_beside_the_model_says(tiny_glm, adapter, tmp_path):
    assert invoke("merge", tiny_glm, adapter, tmp_path / "out").exit_code == 0
    params = SamplingParams(temperature=0, max_tokens=12)
    beside = LLM(tiny_glm, device="cpu", adapters={"poet": str(adapter)})
    plain, adapted = (beside.generate([5, 6, 7], params, adapter=name)[0].token_ids for name in (None, "poet"))
    merged = LLM(tmp_path / "out", device="cpu").generate([5, 6, 7], params)[0].token_ids
    assert adapted == merged
    assert adapted != plain
    assert len(merged) > 3


def test_json(tiny_glm, adapter, tmp_path):
    found = invoke("merge", tiny_glm, adapter, tmp_path / "out", "--json")
    report = json.loads(found.stdout)
    assert (report["model"], report["adapter"], report["output"]) == tuple(
        map(str, (tiny_glm, adapter, tmp_path / "out"))
    )
    assert report["rank"] == 2
    assert report["bytes"] == Checkpoint(tmp_path / "out").total_bytes
    assert report["largest_change"] > 0


def test_an_output_is_replaced_only_when_asked(tiny_glm, adapter, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(StorageError, match="exists and is not empty"):
        invoke("merge", tiny_glm, adapter, tmp_path / "out")
    refused = CliRunner().invoke(app, ["merge", str(tiny_glm), str(adapter), str(tmp_path / "out")])
    assert refused.stderr == ""  # no bar of nothing before the error
    assert invoke("merge", tiny_glm, adapter, tmp_path / "out", "--overwrite").exit_code == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_what_was_merged_is_quantized_as_any_model(tiny_glm, adapter, tmp_path):
    assert invoke("merge", tiny_glm, adapter, tmp_path / "merged").exit_code == 0
    quantized = tmp_path / "quantized"
    found = invoke(
        "quantize", tmp_path / "merged", quantized, "--algorithm", "rtn", "--scheme", "w8a16", "--device", "cpu"
    )
    assert found.exit_code == 0
    with pytest.raises(UsageError, match="merge into the plain model"):
        invoke("merge", quantized, adapter, tmp_path / "again")


def test_mistakes_are_one_line_and_an_exit_code(tiny_glm, adapter, tmp_path):
    tensors = load_file(adapter / "adapter_model.safetensors")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    name = min(tensors)
    save_file(tensors | {name: tensors[name] * float("nan")}, broken / "adapter_model.safetensors")
    command = [sys.executable, "-c", RUN, "merge", str(tiny_glm), str(broken), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{name}: holds NaN or infinity" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]
