"""Models by their names, as a person and a program use them: `warpbus pull`, the verbs, the Python API."""

import json
import sys
from pathlib import Path

import pytest
from hub_standin import StandIn
from typer.testing import CliRunner

import warpbus
from warpbus.cli import app, main
from warpbus.cli.models import model_directory, model_name
from warpbus.demo import model_path
from warpbus.engine import SamplingParams
from warpbus.errors import UnknownArchitectureError, UsageError
from warpbus.formats.hub import find_model

NAME = "someone/tiny"


@pytest.fixture
def listed(hub: StandIn, tiny_model: Path) -> StandIn:
    """The hub, with a model of which there is more than the weights, under both hubs' default branches."""
    files = {file.name: file.read_bytes() for file in tiny_model.iterdir()} | {"README.md": b"# tiny"}
    for branch in ("main", "master"):
        hub.add(NAME, files, branch)
    return hub


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_pull_says_where_the_model_is(listed: StandIn, tiny_model: Path) -> None:
    said = invoke("pull", NAME)
    directory = Path(said.splitlines()[0])
    assert {file.name for file in directory.iterdir()} == {file.name for file in tiny_model.iterdir()}
    assert "MB downloaded" in said
    assert "nothing new" in invoke("pull", NAME)


def test_pull_as_json(listed: StandIn) -> None:
    pulled = json.loads(invoke("pull", NAME, "--json"))
    assert pulled["downloaded_bytes"] == pulled["bytes"]
    assert pulled["commit"] == Path(pulled["directory"]).name
    assert json.loads(invoke("pull", f"{NAME}@main", "--json")) == pulled | {"revision": "main", "downloaded_bytes": 0}


def test_pull_from_modelscope(listed: StandIn) -> None:
    pytest.importorskip("modelscope_hub")
    first = json.loads(invoke("pull", NAME, "--source", "modelscope", "--json"))
    again = json.loads(invoke("pull", f"modelscope:{NAME}@master", "--json"))
    assert first == again | {"revision": None, "downloaded_bytes": first["bytes"]}
    assert (again["revision"], again["downloaded_bytes"], again["name"]) == ("master", 0, NAME)


def test_errors_are_one_line(
    listed: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["warpbus", "pull", "someone/else"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: someone/else: there is no such directory, and no such model on 127.0.0.1")
    assert said.count("\n") == 1


def test_verbs_take_names(listed: StandIn, tmp_path: Path) -> None:
    output = tmp_path / "tiny-w4"
    invoke("quantize", NAME, output, "--scheme", "w4a16-g32", "--algorithm", "rtn", "--device", "cpu")
    listed.asked.clear()
    answer = json.loads(
        invoke("chat", NAME, "--prompt", "春夜", "--max-tokens", 4, "--temperature", 0, "--device", "cpu", "--json")
    )
    assert 1 <= answer["tokens"] <= 4
    listed.add("someone/tiny-w4", {file.name: file.read_bytes() for file in output.iterdir()})
    invoke("convert", "someone/tiny-w4", tmp_path / "tiny-gptq", "--to", "gptq")
    assert (tmp_path / "tiny-gptq/config.json").is_file()
    assert {asked.path.split("/")[3] for asked in listed.asked if "/api/" in asked.path} == {"someone"}
    assert not any("someone/tiny/" in asked.path for asked in listed.asked)


def test_the_python_api_takes_names(listed: StandIn, tiny_model: Path, tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    llm = warpbus.LLM(NAME, device="cpu", progress=lambda done, total: reported.append((done, total)))
    assert reported
    greedy = SamplingParams(temperature=0, max_tokens=8)
    expected = warpbus.LLM(tiny_model, device="cpu").generate(["床前"], greedy)[0].token_ids
    assert llm.generate(["床前"], greedy)[0].token_ids == expected
    warpbus.quantize(f"{NAME}@main", tmp_path / "w8", scheme="w8a16-g32", algorithm="rtn", device="cpu")
    assert (tmp_path / "w8/config.json").is_file()


def test_what_cannot_be_loaded_is_not_downloaded(listed: StandIn, tiny_model: Path, tmp_path: Path) -> None:
    files = {file.name: file.read_bytes() for file in tiny_model.iterdir()}
    listed.add("someone/other", {**files, "config.json": b'{"model_type": "mamba"}'})
    unknown = r"someone/other: config\.json: model_type: 'mamba' is not supported: expected one of "
    for arguments in (["chat"], ["serve"], ["quantize", tmp_path / "out", "--algorithm", "rtn", "--device", "cpu"]):
        with pytest.raises(UnknownArchitectureError, match=unknown):
            invoke(arguments[0], "someone/other", *arguments[1:])
    with pytest.raises(UnknownArchitectureError, match=unknown):
        warpbus.LLM("someone/other", device="cpu")
    with pytest.raises(UnknownArchitectureError, match=unknown):
        warpbus.quantize("someone/other", tmp_path / "out", algorithm="rtn", device="cpu")
    shared = ["serve", NAME, "--device", "cpu", "--tensor-parallel-size"]
    with pytest.raises(UsageError, match=rf"{NAME}: 3 GPUs: the model has 2 heads .*: use at most 2 GPUs"):
        invoke(*shared, 3)
    assert {asked.path.rpartition("/")[2] for asked in listed.files_asked()} == {"config.json"}
    listed.asked.clear()
    with pytest.raises(UsageError, match="--tensor-parallel-size is 0"):
        invoke(*shared, 0)
    assert listed.asked == []


def test_what_models_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "glm").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_name("demo") == "glm-poet"
    assert model_directory("demo") == find_model("demo") == model_path()
    assert model_name("glm/.") == model_name(f"{tmp_path}/glm/") == "glm"
    assert model_name("modelscope:ZhipuAI/chatglm2-6b@v1") == "chatglm2-6b"
    assert model_name("no-such") == "no-such"
    assert model_directory("no-such") == Path("no-such")
