"""The main job on the packaged model: quantize it, compare it, load it elsewhere, let it write."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import warpbus
from warpbus.cli import app
from warpbus.demo import calibration_path, data_path, model_path, showcase
from warpbus.demo.poems import is_quatrain
from warpbus.evaluation import score
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.documents import read_documents
from warpbus.models.templates import load_template
from warpbus.models.tokenizers import load_tokenizer

PROMPT = [{"role": "user", "content": "写一首题为《春夜》的五言绝句。"}]
# A quarter of the demo's: at 3 bits, GPTQ loses 0.42 of what rounding loses. It would lose less with more samples.
SAMPLES = 64


def load(directory):
    return load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def poet():
    path = model_path()
    checkpoint = Checkpoint(path)
    tokenizer = load_tokenizer(path)
    return tokenizer, load_template(path, checkpoint.config, tokenizer)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """The packaged model at 3 and 4 bits by both algorithms, as the demo makes them of more samples."""
    root = tmp_path_factory.mktemp("quantized")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(showcase, "CALIBRATION_SAMPLES", SAMPLES)
        return showcase.quantize_all(root, "cpu", lambda what, done, total: None)


def test_gptq_loses_at_most_half_of_rounding_and_two_percent_at_four_bits(poet, quantized):
    tokenizer, template = poet
    documents = read_documents(data_path("validation.jsonl"), tokenizer, template, length=512, limit=120)
    compared = (showcase.ORIGINAL, "w3a16-g128-rtn", "w3a16-g128-gptq", "w4a16-g128-gptq")
    scores = score({name: load(quantized[name]) for name in compared}, documents)
    original = scores[showcase.ORIGINAL].perplexity
    lost = {name: found.perplexity / original - 1 for name, found in scores.items()}
    assert lost["w3a16-g128-gptq"] <= 0.5 * lost["w3a16-g128-rtn"]
    assert 0 < lost["w4a16-g128-gptq"] <= 0.02
    assert scores["w3a16-g128-gptq"].divergence < scores["w3a16-g128-rtn"].divergence


def test_saved_and_loaded_again_it_gives_the_same_logits_bit_for_bit(poet, quantized, tmp_path):
    _, template = poet
    ids = torch.tensor([template.render(PROMPT)])
    first = load(quantized[showcase.BEST])
    warpbus.quantize(model_path(), tmp_path / "again", calibration=calibration_path(), samples=SAMPLES, device="cpu")
    second = load(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(first(ids), second(ids))
        assert torch.equal(first(ids), load(quantized[showcase.BEST])(ids))


def test_transformers_writes_the_same_text(poet, quantized, monkeypatch):
    monkeypatch.setenv("WARPBUS_CPU_ACTIVATIONS", "float")  # transformers rounds no activations
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    directory = quantized[showcase.BEST]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    llm = warpbus.LLM(directory, device="cpu")
    for title in ("春夜", "登高", "送友人", "江雪"):
        prompt = llm.render([{"role": "user", "content": f"写一首题为《{title}》的诗。"}])
        ours = llm.generate([prompt], warpbus.SamplingParams(temperature=0, max_tokens=60))[0].token_ids
        theirs = oracle.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False)[0, len(prompt) :]
        assert ours == theirs.tolist()


def test_it_writes_quatrains(quantized):
    llm = warpbus.LLM(quantized[showcase.BEST], device="cpu")
    titles = ("春夜", "登楼", "秋思", "送别", "山居", "江雪", "闻笛", "早行")
    prompts = [llm.render([{"role": "user", "content": f"写一首题为《{title}》的七言绝句。"}]) for title in titles]
    completions = llm.generate(prompts, warpbus.SamplingParams(temperature=0.7, top_p=0.9, max_tokens=80, seed=0))
    assert sum(is_quatrain(completion.text, 7) for completion in completions) >= 6
    assert all(completion.finish_reason == "stop" for completion in completions)


def test_the_demo_runs_from_start_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(showcase, "CALIBRATION_SAMPLES", 6)
    monkeypatch.setattr(showcase, "DOCUMENTS", 4)
    monkeypatch.setattr(showcase, "RECIPES", (("rtn", "w3a16-g128"), ("gptq", "w4a16-g128")))
    ran = CliRunner().invoke(app, ["demo", "--output", str(tmp_path / "out"), "--device", "cpu"])
    assert ran.exit_code == 0, ran.output
    for expected in ("original", "w4a16-g128-gptq", "What next?", "warpbus chat"):
        assert expected in ran.output
    for name in ("comparison.png", "comparison.html"):
        assert (tmp_path / "out" / name).stat().st_size > 10_000


def test_one_answer_as_json():
    ran = CliRunner().invoke(app, ["chat", "demo", "--prompt", "《春夜》", "--seed", "3", "--json", "--device", "cpu"])
    assert ran.exit_code == 0, ran.output
    answer = json.loads(ran.stdout)
    assert answer["finish_reason"] == "stop"
    assert len(answer["text"]) >= 12


def test_perplexity_of_a_page_of_text():
    """A `.txt` is read as it is; English is spelled in letters, which the poet has hardly seen."""
    ran = CliRunner().invoke(
        app,
        ["eval", "demo", "--data", str(data_path("wikitext-page.txt")), "--limit", "2", "--no-speed", "--json"],
    )
    assert ran.exit_code == 0, ran.output
    (found,) = json.loads(ran.stdout)
    assert 100 < found["perplexity"] < 1e9
    assert found["tokens"] > 900


def test_the_package_holds_all_that_the_demo_needs():
    for path in (model_path(), calibration_path(), data_path("validation.jsonl"), data_path("next-verse.jsonl")):
        assert path.exists()
    assert sum(file.stat().st_size for file in Path(model_path()).iterdir()) < 50e6
