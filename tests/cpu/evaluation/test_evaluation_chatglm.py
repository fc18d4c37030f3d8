"""ChatGLM-6B, from a calibrated quantization to the comparison: its texts and answers stand behind [gMASK] <sop>."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from warpbus.evaluation import evaluate
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.tokenizers import load_tokenizer
from warpbus.quantization import quantize

WriteLines = Callable[..., Path]
CPU = torch.device("cpu")
TEXT = "举头望明月，低头思故乡。"
TALK = [
    {"role": "user", "content": "明月"},
    {"role": "assistant", "content": "光"},
    {"role": "user", "content": "霜"},
    {"role": "assistant", "content": "故乡"},
]


def negative_log_likelihood(directory: Path, sequences: list[tuple[list[int], list[int]]]) -> tuple[float, int]:
    """Of what follows each given beginning, summed, and the number of these tokens."""
    model = load_model(Checkpoint(directory), device=CPU, dtype=torch.float32)
    total, count = 0.0, 0
    for given, said in sequences:
        with torch.no_grad():
            scores = model.logits(model.hidden(torch.tensor([[*given, *said]])))[0].log_softmax(-1)
        total -= sum(float(scores[len(given) + at - 1, token]) for at, token in enumerate(said))
        count += len(said)
    return total, count


@pytest.fixture(scope="module")
def quantized(tiny_chatglm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantized")
    (directory / "texts.txt").write_text(TEXT * 40, encoding="utf-8")
    arguments = {"algorithm": "gptq", "calibration": directory / "texts.txt", "samples": 8, "seqlen": 32}
    quantize(tiny_chatglm, directory / "w4", scheme="w4a16-g32", device="cpu", **arguments)
    return directory / "w4"


def test_perplexity_and_choices(tiny_chatglm: Path, quantized: Path, tmp_path: Path, write_lines: WriteLines) -> None:
    tokenizer = load_tokenizer(tiny_chatglm)
    data = write_lines(tmp_path / "data.jsonl", {"text": TEXT}, {"messages": TALK})
    asked = {"messages": TALK[:1], "choices": ["光", "故乡，思故乡"]}
    questions = write_lines(tmp_path / "asked.jsonl", asked | {"answer": 0}, asked | {"answer": 1})
    found = evaluate(
        [("whole", tiny_chatglm), ("w4", quantized)], data=data, questions=questions, device=CPU, speed=False
    )
    begin = [tokenizer.special_ids["[gMASK]"], tokenizer.special_ids["<sop>"]]
    history = tokenizer.encode("[Round 0]\n问：明月\n答：光\n[Round 1]\n问：霜\n答：")
    answer = [*tokenizer.encode("故乡"), tokenizer.special_ids["<eop>"]]
    sequences = [(begin, tokenizer.encode(TEXT)), ([*history, *begin], answer)]
    for directory, each in zip((tiny_chatglm, quantized), found, strict=True):
        total, count = negative_log_likelihood(directory, sequences)
        assert each.tokens == count
        assert each.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)
        assert each.accuracy == 0.5  # one of the same two answers is right each time
    assert found[0].divergence == 0
    assert 0 < found[1].divergence < math.inf


def test_the_quantized_model_has_its_vocabulary(tiny_chatglm: Path, quantized: Path) -> None:
    for name in ("ice_text.model", "tokenizer_config.json"):
        assert (quantized / name).read_bytes() == (tiny_chatglm / name).read_bytes()
    assert load_tokenizer(quantized).special_ids == load_tokenizer(tiny_chatglm).special_ids
    assert json.loads((quantized / "config.json").read_text())["quantization_config"]
