"""`warpbus plan` as a person uses it, on a machine without a GPU."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from warpbus.cli.plan import plan
from warpbus.demo import model_path
from warpbus.errors import SchemeError, UsageError
from warpbus.formats.hub import pull
from warpbus.language import CATALOGUE, Catalogue, read_catalogue

ROOT = Path(__file__).resolve().parents[3]

app = typer.Typer()
app.command()(plan)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def planned(*arguments):
    return json.loads(invoke(*arguments, "--json").stdout)


def test_a_known_shape():
    found = invoke("glm-4.5-air", "--gpu", "h200", "--scheme", "w4a16-g128", "--memory", "80GB")
    assert found.exit_code == 0
    for text in ("routed experts", "GPU", "KV cache", "together", "context 100,864", "one sequence: about", "tokens/s"):
        assert text in found.stdout


def test_experts_that_do_not_fit_are_on_the_host():
    found = invoke("glm-4.5-air", "--gpu", "h100", "--scheme", "w4a16-g128", "--memory", "24GB")
    assert found.exit_code == 0
    for text in ("offloaded experts", "host", "experts in pinned memory", "from the host", "a long prompt: at most"):
        assert text in " ".join(found.stdout.split())
    plan = planned("glm-4.5-air", "--gpu", "h100", "--scheme", "w4a16-g128", "--memory", "24GB")
    assert plan["memory"]["host_bytes"] == sum(
        row["nbytes"] for row in plan["weights"] if row["name"].startswith("offl")
    )
    assert plan["link_seconds"] * plan["most_tokens_per_second"] > 0.9


def test_gpus_that_share_a_model():
    shared = ("glm-4.5-air", "--gpu", "h100", "--scheme", "w4a16-g128", "--tensor-parallel-size", 2)
    found = " ".join(invoke(*shared, "--expert-parallel").stdout.split())
    assert "glm-4.5-air on each of 2 h100" in found
    assert "one sequence: at most" in found
    assert "steps of GPUs that share a model are not forecast" in found
    alone, halves, whole = planned(*shared[:-2]), planned(*shared), planned(*shared, "--expert-parallel")
    assert (alone["gpus"], halves["gpus"], whole["gpus"]) == (1, 2, 2)

    def routed(plan):
        (row,) = [row for row in plan["weights"] if row["name"] == "routed experts"]
        return row["nbytes"]

    assert routed(whole) * 2 == routed(alone)
    # 704 of an expert's 1,408 columns are no whole groups of 128: their scales are repeated.
    assert routed(whole) < routed(halves) < 1.02 * routed(whole)
    for each in (halves, whole):
        assert 0.5 * alone["memory"]["total"] < each["memory"]["total"] < 0.65 * alone["memory"]["total"]
        assert each["memory"]["parts"]["head"] * 2 == alone["memory"]["parts"]["head"]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("chatglm2-6b", (2, "--expert-parallel"), "this model has none: leave it out"),
        ("glm-4.7-flash", (65, "--expert-parallel"), "65 GPUs: the model has 64 experts per layer"),
        ("glm-4.5-air", (2,), "each of 2 GPUs needs 11[.0-9]* GB for a context of 2,048 .* share it among more GPUs"),
        ("glm-4.5-air", (1, "--expert-parallel"), "over the GPUs of --tensor-parallel-size, which is 1"),
    ],
)
def test_what_gpus_cannot_share(model, options, message):
    with pytest.raises(UsageError, match=message):
        invoke(model, "--gpu", "h100", "--tensor-parallel-size", *options)


def test_json():
    found = planned("qwen3-30b-a3b", "--gpu", "H200", "--scheme", "w4a16-g128", "--memory", "24GB")
    assert found["model"] == "qwen3-30b-a3b"
    assert found["gpu"]["name"] == "h200"
    assert found["memory"]["available"] == 24 * 10**9
    assert found["memory"]["total"] <= 24 * 10**9
    assert 400 < found["tokens_per_second"] < found["most_tokens_per_second"]
    assert {row["place"] for row in found["weights"]} == {"GPU"}
    shorter = planned("qwen3-30b-a3b", "--gpu", "h200", "--scheme", "w4a16-g128", "--max-model-len", 4096)
    assert shorter["memory"]["context"] == shorter["memory"]["pool_tokens"] == 4096
    more = planned("qwen3-30b-a3b", "--gpu", "h200", "--scheme", "w4a16-g128", "--max-num-seqs", 4)
    assert more["memory"]["pool_tokens"] == 4 * more["memory"]["context"]


def test_a_directory_as_it_is_stored_and_as_it_could_be(tmp_path):
    as_stored, quantized = planned("demo", "--gpu", "h100"), planned("demo", "--gpu", "h100", "--scheme", "w4a16-g128")
    sizes = [{row["name"]: row["nbytes"] for row in each["weights"]} for each in (as_stored, quantized)]
    assert sizes[0]["MLPs"] > 3 * sizes[1]["MLPs"]
    assert sizes[0]["embedding"] == sizes[1]["embedding"]
    config = tmp_path / "config-only"
    config.mkdir()
    shutil.copy(model_path() / "config.json", config)
    assert planned(config, "--gpu", "h100", "--scheme", "w4a16-g128")["weights"] == quantized["weights"]


def test_a_quantized_directory_has_its_scheme(tmp_path):
    config = json.loads((model_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UsageError, match="is quantized already: leave --scheme out"):
        invoke(tmp_path, "--gpu", "h100", "--scheme", "w4a16-g128")


def test_a_downloaded_model_is_planned_by_its_name(hub, tiny_model):
    hub.add("someone/tiny", {file.name: file.read_bytes() for file in tiny_model.iterdir()}, "main")
    with pytest.raises(UsageError, match=r"^someone/tiny: is not on this machine: download it with `warpbus pull`"):
        invoke("someone/tiny", "--gpu", "h100")
    assert hub.asked == []
    pull("someone/tiny")
    named, directory = planned("someone/tiny", "--gpu", "h100"), planned(tiny_model, "--gpu", "h100")
    assert named == directory | {"model": "someone/tiny"}


def test_what_cannot_be_planned_is_said_in_one_line():
    with pytest.raises(
        UsageError, match=r"^glm-4\.5-air does not fit 4\.00 GB of h100: memory is 4\.00 GB, but .*5\.5GB"
    ):
        invoke("glm-4.5-air", "--gpu", "h100", "--scheme", "w4a16-g128", "--memory", "4GB")
    with pytest.raises(UsageError, match=r"the card has 24\.00 GB: give that or less"):
        invoke("glm-4.5-air", "--gpu", "rtx-4090", "--memory", "40GB")
    with pytest.raises(UsageError, match=r"^nowhere: is not on this machine: .*warpbus pull.*glm-4\.7-flash"):
        invoke("nowhere", "--gpu", "h100")
    with pytest.raises(UsageError, match="GPU 'gtx' is not known: choose the nearest of h100"):
        invoke("demo", "--gpu", "gtx")
    with pytest.raises(UsageError, match="--max-model-len is 9,999,999: the model's context is 512"):
        invoke("demo", "--gpu", "h100", "--max-model-len", 9999999)
    with pytest.raises(SchemeError):
        invoke("demo", "--gpu", "h100", "--scheme", "w5")


def test_without_a_gpu_one_has_to_be_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="there is no GPU here: name one with --gpu: h100"):
        invoke("demo")


def printed(text):
    """The words and figures of a plan, without borders of tables and line breaks."""
    return " ".join(re.sub("[│├┼┤└┴┘─]", " ", text).split())


def examples():
    """Each `$ warpbus plan` of the pages that is followed by what it prints: page, arguments, text."""
    for page in sorted(ROOT.glob("docs/**/*.md")):
        for block in page.read_text(encoding="utf-8").split("```")[1::2]:
            for command, text in re.findall(r"^\$ warpbus plan (.+)\n((?:[^$].*\n)+)", block, re.MULTILINE):
                yield pytest.param(command, text, id=f"{page.relative_to(ROOT)}: {command}")


@pytest.mark.parametrize(("command", "text"), list(examples()))
def test_the_plans_of_the_pages_are_those_that_are_printed(command, text):
    if text.startswith("error: "):
        with pytest.raises(UsageError) as found:
            invoke(*command.split())
        assert text == f"error: {found.value}\n"
        return
    found = printed(invoke(*command.split()).stdout)
    for part in text.split("...\n"):
        assert printed(part) in found


@pytest.mark.parametrize("scheme", [(), ("--scheme", "w4a16-g128")])
def test_the_advice_of_a_refusal_has_its_chinese(scheme):
    with pytest.raises(UsageError) as found:
        invoke("chatglm-6b", "--gpu", "rtx-3090", "--memory", "5GB", "--max-model-len", 2048, *scheme)
    chinese = Catalogue(read_catalogue(CATALOGUE.read_text(encoding="utf-8"))).gettext(str(found.value))
    assert "请给出 " in chinese
    assert "give" not in chinese
