"""`warpbus push`: the card, what is uploaded and what is not, and a model that comes back from the hub."""

import json
import sys
from pathlib import Path

import pytest
from hub_standin import StandIn
from huggingface_hub import constants
from typer.testing import CliRunner

import warpbus
from warpbus.cli import app
from warpbus.engine import SamplingParams
from warpbus.errors import CheckpointError, DataError, UploadError, UsageError
from warpbus.formats.hub import find_model

NAME = "someone/poet-w4"
TOKEN = "hf_secret"


@pytest.fixture(scope="module")
def quantized(make_model, tmp_path_factory) -> Path:
    """A quantized model with a licence, code, a hidden file and a directory."""
    directory = tmp_path_factory.mktemp("push")
    model = make_model(directory / "secret-place", num_attention_heads=4)
    (model / "LICENSE").write_text("Be kind.")
    (model / "modeling_x.py").write_text("boom")
    output = directory / "out"
    warpbus.quantize(model, output, scheme="w4a16-g32", algorithm="rtn", device="cpu", head="w8a16-g32")
    (output / ".token").write_text(TOKEN)
    (output / "notes").mkdir()
    return output


@pytest.fixture
def writable(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The hub, which asks for a token."""
    hub.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in has the protocol of Git LFS
    return hub


def push(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["push", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(error: type[Exception], *arguments: object) -> str:
    done = CliRunner().invoke(app, ["push", *map(str, arguments)])
    assert isinstance(done.exception, error), done.output
    assert "\n" not in str(done.exception)
    return str(done.exception)


def card(quantized: Path, *arguments: object) -> str:
    return push(quantized, NAME, "--dry-run", *arguments)


def test_a_pushed_model_comes_back_and_works(writable: StandIn, quantized: Path):
    done = json.loads(push(quantized, NAME, "--private", "--json"))
    assert writable.created == {NAME: True}
    files = writable.models[NAME].commits[done["commit"]]
    assert done["files"] == len(files)
    assert done["bytes"] == sum(map(len, files.values()))
    expected = {file.name for file in quantized.iterdir() if file.is_file()} - {".token", "modeling_x.py"}
    assert files.keys() == expected | {"README.md"}
    for name in expected - {"warpbus-report.json"}:
        assert files[name] == (quantized / name).read_bytes()
    found = find_model(NAME)
    assert warpbus.LLM(found, device="cpu").generate("1", SamplingParams(max_tokens=4))[0].token_ids


def test_templates_of_tools_go_along_all_the_way(writable: StandIn, make_model, tmp_path: Path):
    model = make_model(tmp_path / "model")
    template = model / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    warpbus.quantize(model, tmp_path / "out", scheme="w4a16-g32", algorithm="rtn", device="cpu")
    push(tmp_path / "out", NAME)
    found = find_model(NAME)
    assert (found / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"


def test_the_second_push_sends_no_weights_again(writable: StandIn, quantized: Path):
    push(quantized, NAME)
    first = len([asked for asked in writable.asked if asked.method == "PUT"])
    assert first == len(list(quantized.glob("*.safetensors"))) + len(list(quantized.glob("*.model")))
    push(quantized, NAME)
    assert len([asked for asked in writable.asked if asked.method == "PUT"]) == first


def test_no_path_of_this_machine_is_published(writable: StandIn, quantized: Path):
    push(quantized, NAME, "--base-model", "someone/original")
    (files,) = writable.models[NAME].commits.values()
    report = json.loads(files["warpbus-report.json"])
    assert (report["model"], report["output"]) == ("someone/original", NAME)
    for name in ("README.md", "warpbus-report.json"):
        assert str(quantized.parent) not in files[name].decode()


def test_the_card_tells_how_it_was_made_and_how_to_load_it(hub: StandIn, quantized: Path):
    text = card(quantized, "--base-model", "someone/original", "--license", "mit")
    _, metadata, body = text.split("---\n", 2)
    lines = metadata.splitlines()
    assert {"base_model: someone/original", "base_model_relation: quantized", "license: mit"} <= set(lines)
    for words in (
        "| scheme | w4a16-g32 |",
        "| algorithm | rtn |",
        "| head | w8a16-g32 |",
        "Not measured.",
        f"warpbus serve {NAME}",
        f"vllm serve {NAME}",
        f'AutoModelForCausalLM.from_pretrained("{NAME}")',
        f"warpbus convert {NAME} model.gguf --to gguf",
        "The head is quantized",
    ):
        assert words in body, words
    assert hub.asked == []  # nothing is asked of the hub


def test_without_options_the_licence_file_is_named(hub: StandIn, quantized: Path):
    assert "license: other\nlicense_link: LICENSE\n" in card(quantized)
    assert "base_model" not in card(quantized)


def test_a_dry_run_prints_json(hub: StandIn, quantized: Path):
    found = json.loads(card(quantized, "--json"))
    assert found["name"] == NAME
    assert {"config.json", "README.md", "LICENSE"} <= set(found["files"])
    assert found["card"] == card(quantized)


def test_a_model_that_is_not_quantized_is_not_called_so(hub: StandIn, tiny_model: Path):
    text = card(tiny_model, "--base-model", "someone/original")
    assert "base_model_relation: finetune" in text
    assert "quantized" not in text


@pytest.mark.parametrize("scheme", ["fp8", "int8-head"])
def test_a_card_names_no_program_that_does_not_read_the_scales_of_the_cache(
    scheme: str, hub: StandIn, tiny_model: Path, tmp_path: Path, write_lines
):
    texts = write_lines(tmp_path / "texts.jsonl", {"text": "1 2 3 4 5 6 7 8"})
    warpbus.quantize(tiny_model, tmp_path / "out", scheme="w4a16-g32", calibration=texts, kv_cache=scheme, device="cpu")
    text = card(tmp_path / "out")
    assert ("vllm serve" in text) == (scheme == "fp8")
    assert "convert" not in text  # which refuses such a model


def test_a_card_offers_gguf_only_for_families_that_it_has(hub: StandIn, poet_moe: Path, tmp_path: Path):
    warpbus.quantize(poet_moe, tmp_path / "out", scheme="w4a16-g32", algorithm="rtn", device="cpu")
    assert "gguf" not in card(tmp_path / "out")


def test_a_verdict_is_in_the_card(hub: StandIn, quantized: Path, tmp_path: Path, make_model):
    texts = tmp_path / "private" / "texts.jsonl"
    texts.parent.mkdir()
    texts.write_text("\n".join(json.dumps({"text": "1 2 3 4 5 6 7 8"}) for _ in range(3)))
    model = make_model(tmp_path / "model")
    arguments = ["quantize", model, tmp_path / "out", "--algorithm", "rtn", "--scheme", "w8a16", "--device", "cpu"]
    done = CliRunner().invoke(app, [*map(str, arguments), "--evaluate", str(texts), "--json"])
    assert done.exit_code == 0, done.output
    verdict = json.loads(done.stdout)["verdict"]
    text = card(tmp_path / "out")
    assert f"| {verdict['before']['perplexity']:.3f} |" in text
    assert f"| {verdict['after']['divergence']:.4f} |" in text
    assert f"`texts.jsonl`, {verdict['after']['tokens']} tokens" in text
    assert str(tmp_path) not in text


def test_a_card_of_ones_own_is_used(writable: StandIn, quantized: Path, tmp_path: Path):
    own = tmp_path / "own"
    own.mkdir()
    for file in quantized.iterdir():
        if file.is_file():
            (own / file.name).write_bytes(file.read_bytes())
    (own / "README.md").write_text("# mine\n")
    assert push(own, NAME, "--dry-run") == "# mine\n"
    push(own, NAME)
    (files,) = writable.models[NAME].commits.values()
    assert files["README.md"] == b"# mine\n"


def test_errors_are_one_line(writable: StandIn, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert "expected config.json" in refused(CheckpointError, tmp_path, NAME)
    assert "no such directory" in refused(CheckpointError, tmp_path / "none", NAME)
    assert "no name of a model" in refused(UsageError, quantized, "modelscope:someone")
    assert "without a revision" in refused(UsageError, quantized, f"{NAME}@v1")
    assert "no name of a model" in refused(UsageError, quantized, "poet")
    assert "apache-2.0" in refused(UsageError, quantized, NAME, "--license", "a\nb: c")
    assert "no name of a model" in refused(UsageError, quantized, NAME, "--base-model", "x: y")
    writable.refused = 403
    assert "answers 403" in refused(UploadError, quantized, NAME)
    assert writable.models == {}
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "may not write" in refused(UploadError, quantized, NAME)
    monkeypatch.delenv("HF_TOKEN")
    assert "no Hugging Face token was found" in refused(UsageError, quantized, NAME)


def test_a_damaged_report_is_refused(hub: StandIn, quantized: Path, tmp_path: Path):
    own = tmp_path / "own"
    own.mkdir()
    for file in quantized.iterdir():
        if file.is_file():
            (own / file.name).write_bytes(file.read_bytes())
    (own / "warpbus-report.json").write_text("[]")
    assert "warpbus-report.json" in refused(DataError, own, NAME, "--dry-run")


MODELSCOPE = f"modelscope:{NAME}"


@pytest.fixture
def modelscope(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The hub in the place of ModelScope, which asks for a token."""
    pytest.importorskip("modelscope_hub")
    hub.token = TOKEN
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
    return hub


def test_a_model_pushed_to_modelscope_comes_back(modelscope: StandIn, quantized: Path):
    done = json.loads(push(quantized, MODELSCOPE, "--private", "--license", "mit", "--json"))
    assert (modelscope.created, modelscope.licences) == ({NAME: True}, {NAME: "mit"})
    model = modelscope.models[NAME]
    files = model.commits[model.branches["master"]]
    assert (done["files"], done["bytes"]) == (len(files), sum(map(len, files.values())))
    assert done["url"] == f"{modelscope.url}/models/{NAME}"
    expected = {file.name for file in quantized.iterdir() if file.is_file()} - {".token", "modeling_x.py"}
    assert files.keys() == expected | {"README.md"}
    for name in expected - {"warpbus-report.json"}:
        assert files[name] == (quantized / name).read_bytes()
    found = find_model(MODELSCOPE)
    assert warpbus.LLM(found, device="cpu").generate("1", SamplingParams(max_tokens=4))[0].token_ids
    # Once more: the repository is there, and so are the weights.
    sent = len([asked for asked in modelscope.asked if asked.method == "PUT"])
    assert sent >= len(list(quantized.glob("*.safetensors")))
    assert f"{done['url']}\n{done['files']} files, " in push(quantized, MODELSCOPE)
    assert len([asked for asked in modelscope.asked if asked.method == "PUT"]) == sent


def test_the_card_for_modelscope_names_it(hub: StandIn, quantized: Path):
    text = push(quantized, MODELSCOPE, "--dry-run", "--license", "mit")
    for words in (
        f"warpbus serve {MODELSCOPE}",
        f"`warpbus pull {MODELSCOPE}` downloads the model and prints where it is.",
        "vllm serve DIRECTORY",
        'AutoModelForCausalLM.from_pretrained("DIRECTORY")',
        f"warpbus convert {MODELSCOPE} model.gguf --to gguf",
    ):
        assert words in text, words
    assert hub.asked == []


def test_what_modelscope_needs_is_said(modelscope: StandIn, quantized: Path, monkeypatch: pytest.MonkeyPatch):
    assert "name it with --license" in refused(UsageError, quantized, MODELSCOPE)
    assert modelscope.created == {}
    modelscope.refused = 403
    said = refused(UploadError, quantized, MODELSCOPE, "--license", "mit")
    assert modelscope.url.partition("//")[2] in said
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "wrong")
    said = refused(UploadError, quantized, "modelscope:someone/other", "--license", "mit")
    assert "answers 401: the token's account may not write there" in said
    monkeypatch.delenv("MODELSCOPE_API_TOKEN")
    assert "set MODELSCOPE_API_TOKEN" in refused(UsageError, quantized, MODELSCOPE)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://example.com")
    assert "would be sent unencrypted" in refused(UsageError, quantized, MODELSCOPE)
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    assert "pip install 'warpbus[modelscope]'" in refused(UsageError, quantized, MODELSCOPE)
