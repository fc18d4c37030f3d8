"""`--adapter` of `warpbus chat` and `warpbus serve`: which model answers with it, and what is refused."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from warpbus.cli.adapters import adapters_by_model, one_adapter
from warpbus.cli.chat import chat
from warpbus.cli.serve import serve
from warpbus.engine import LLM, SamplingParams
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.models import read_config
from warpbus.models.adapters import Lora, LowRank, save_lora
from warpbus.server import listening

ADAPTERS = ("poet", None)


def save(directory, model, seed=0):
    """A LoRA of a model's first qkv that changes what it says."""
    config = read_config(Checkpoint(model))
    draw = torch.Generator().manual_seed(seed)
    rows = sum(config.attention.qkv_rows)
    low = LowRank(torch.randn(4, config.hidden_size, generator=draw), torch.randn(rows, 4, generator=draw))
    lora = Lora(directory.name, {"layers.0.attention.qkv": low})
    save_lora(directory, lora, config, base=str(model), rank=4, alpha=4)
    return directory


@pytest.fixture(scope="module")
def wide(make_model, tmp_path_factory):
    """A model of another size."""
    return make_model(tmp_path_factory.mktemp("wide") / "wide", hidden_size=96, num_hidden_layers=1)


@pytest.fixture(scope="module")
def li_bai(tiny_glm, tmp_path_factory):
    return save(tmp_path_factory.mktemp("adapters") / "li-bai", tiny_glm)


@pytest.fixture(scope="module")
def du_fu(wide, tmp_path_factory):
    return save(tmp_path_factory.mktemp("adapters") / "du-fu", wide)


def test_a_conversation_has_an_adapter(tiny_glm, li_bai):
    app = typer.Typer()
    app.command()(chat)
    flags = ("--device", "cpu", "--temperature", "0", "--max-tokens", "12", "--prompt", "明月")
    found = CliRunner().invoke(app, [str(tiny_glm), *flags, "--adapter", str(li_bai)])
    llm = LLM(tiny_glm, device="cpu", adapters={"poet": li_bai})
    params = SamplingParams(temperature=0, max_tokens=12)
    with_it, without = (llm.chat([{"role": "user", "content": "明月"}], params, adapter=name) for name in ADAPTERS)
    assert (found.exit_code, found.stdout) == (0, with_it.text + "\n")
    assert with_it.text != without.text


def test_an_adapter_is_called_like_its_directory(li_bai, tmp_path):
    assert one_adapter(li_bai) == ("li-bai", str(li_bai))
    with pytest.raises(UsageError, match="nowhere: there is no such directory"):
        one_adapter(tmp_path / "nowhere")


def test_the_only_model_gets_them_all(tiny_glm, li_bai, du_fu):
    """What fits, its engine finds out."""
    found = adapters_by_model([f"a={li_bai}", f"org/b={du_fu}", f"tiny:c={li_bai}"], {"tiny": tiny_glm})
    assert found == {"tiny": (("a", str(li_bai)), ("org/b", str(du_fu)), ("c", str(li_bai)))}
    assert adapters_by_model([], {"tiny": tiny_glm}) == {"tiny": ()}


def test_of_several_models_the_one_that_it_fits_gets_it(tiny_glm, wide, li_bai, du_fu):
    models = {"wide": wide, "tiny": tiny_glm}
    found = adapters_by_model([f"a={li_bai}", f"b={du_fu}"], models)
    assert found == {"wide": (("b", str(du_fu)),), "tiny": (("a", str(li_bai)),)}
    twice = {"one": tiny_glm, "two": tiny_glm}
    assert adapters_by_model([f"two:a={li_bai}"], twice) == {"one": (), "two": (("a", str(li_bai)),)}
    with pytest.raises(UsageError, match="it fits one and two: say which by one:a="):
        adapters_by_model([f"a={li_bai}"], twice)
    with pytest.raises(UsageError, match=r"it fits none of the models \(one: .*; two: "):
        adapters_by_model([f"a={du_fu}"], twice)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("li-bai", "expected NAME=DIR"),
        ("={li_bai}", "expected NAME=DIR"),
        ("tiny:={li_bai}", "expected NAME=DIR"),
        ("tiny={li_bai}", "something else is called tiny"),
        ("a={li_bai}", "something else is called a"),
        ("b=no-such-directory", "there is no directory 'no-such-directory'"),
    ],
)
def test_what_names_nothing_is_refused(tiny_glm, li_bai, text, message):
    with pytest.raises(UsageError, match=message):
        adapters_by_model([f"a={li_bai}", text.format(li_bai=li_bai)], {"tiny": tiny_glm})


def test_the_server_gets_them_with_their_models(tiny_glm, wide, li_bai, du_fu, monkeypatch):
    app = typer.Typer()
    app.command()(serve)
    calls = []

    def keep(wanted, *_, ready, **__):
        calls.append(wanted)
        ready("http://127.0.0.1:8000")

    monkeypatch.setattr(listening, "serve", keep)
    flags = ("--adapter", f"poet={li_bai}", "--adapter", f"wide:other={du_fu}")
    result = CliRunner().invoke(app, [str(tiny_glm), str(wide), *flags])
    assert result.exit_code == 0, result.output
    assert [(one.name, one.adapters) for one in calls[0]] == [
        ("tiny", (("poet", str(li_bai)),)),
        ("wide", (("other", str(du_fu)),)),
    ]
    assert "adapters of tiny, to be asked for by name: poet\nadapters of wide, " in result.stderr
