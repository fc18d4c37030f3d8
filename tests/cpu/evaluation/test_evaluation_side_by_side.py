"""Models side by side, from their directories."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from warpbus.cuda.cpu import cpu_model
from warpbus.errors import CheckpointError, DataError, UsageError
from warpbus.evaluation import Evaluation, choice_accuracy, confidence, evaluate, read_questions, score
from warpbus.evaluation.side_by_side import checkpoint_dtype
from warpbus.evaluation.speed import Speed
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.documents import read_documents
from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.quantization import quantize

WriteLines = MakeModel = Callable[..., Path]
CPU = torch.device("cpu")
TURNS = [{"role": "user", "content": "写诗"}, {"role": "assistant", "content": "床前明月光，疑是地上霜。"}]


@pytest.fixture
def data(tmp_path: Path, write_lines: WriteLines) -> Path:
    return write_lines(tmp_path / "data.jsonl", {"messages": TURNS}, {"text": "举头望明月，低头思故乡。" * 4})


@pytest.fixture
def questions(tmp_path: Path, write_lines: WriteLines) -> Path:
    asked = [{"role": "user", "content": "下一句：床前明月光"}]
    return write_lines(
        tmp_path / "questions.jsonl",
        {"messages": asked, "choices": ["疑是地上霜", "低头思故乡"], "answer": 0},
        {"messages": asked, "choices": ["疑是地上霜", "低头思故乡"], "answer": 1},
    )


@pytest.fixture(scope="module")
def pair(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Path]]:
    """A model, and itself in 4 bits."""
    directory = tmp_path_factory.mktemp("pair")
    original = make_model(directory / "original", hidden_size=128, intermediate_size=128)
    quantize(original, directory / "small", scheme="w4a16-g32", algorithm="rtn", device="cpu")
    return [("original", original), ("small", directory / "small")]


@pytest.mark.parametrize("scheme", ["w4a16-nvfp4", "w8a8-fp8", None])
def test_weights_have_the_name_of_what_the_file_holds(
    pair: list[tuple[str, Path]], data: Path, tmp_path: Path, scheme: str | None
) -> None:
    model = pair[0][1]
    if scheme is not None:
        quantize(model, tmp_path / "small", scheme=scheme, algorithm="rtn", device="cpu")
        model = tmp_path / "small"
    (found,) = evaluate([("it", model)], data=data, device=CPU, speed=False)
    assert found.scheme == {"w4a16-nvfp4": "w4a16-nvfp4, dequantized", None: "float32"}.get(scheme, scheme)


def test_what_is_gathered_is_what_was_measured(
    pair: list[tuple[str, Path]], data: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, str, str]] = []

    def measured(model: Path, *, device: str, dtype: str) -> Speed:
        asked.append((model, device, dtype))
        return Speed(100.0 * len(asked), 1000, "cpu")

    monkeypatch.setattr("warpbus.evaluation.side_by_side.measure_speed", measured)
    shown: list[tuple[str, int, int]] = []
    found = evaluate(pair, data=data, questions=questions, device=CPU, progress=lambda *what: shown.append(what))
    checkpoints = [Checkpoint(path) for _, path in pair]
    models = {
        name: load_model(checkpoint, device=CPU, dtype=torch.float32)
        for (name, _), checkpoint in zip(pair, checkpoints, strict=True)
    }
    tokenizer = load_tokenizer(pair[0][1])
    template = find_template(pair[0][1], checkpoints[0].config, tokenizer)
    assert template is not None
    scores = score(models, read_documents(data, tokenizer, template, length=512))
    sure = confidence(scores["small"], scores["original"])
    assert sure is not None
    for index, (name, path) in enumerate(pair):
        assert found[index] == Evaluation(
            name=name,
            model=str(path),
            scheme=("float32", "w4a16-g32")[index],
            perplexity=scores[name].perplexity,
            divergence=scores[name].divergence,
            agreement=scores[name].agreement,
            accuracy=choice_accuracy(models[name], template, read_questions(questions)),
            tokens=scores[name].tokens,
            disk_bytes=checkpoints[index].total_bytes,
            weight_bytes=found[index].weight_bytes,
            tokens_per_second=100.0 * (index + 1),
            peak_bytes=1000,
            device=cpu_model(),
            date=found[index].date,
            change_interval=list(sure.change) if index else None,
            divergence_interval=list(sure.divergence) if index else None,
        )
    assert (found[0].divergence, found[0].agreement) == (0.0, 1.0)
    assert found[1].divergence > 0
    # The tied head is counted once.
    parameters = models["original"].config.num_parameters
    assert found[0].weight_bytes == found[0].disk_bytes == 4 * parameters
    assert found[1].weight_bytes < found[0].weight_bytes / 2
    assert asked == [(pair[0][1], "cpu", "auto"), (pair[1][1], "cpu", "auto")]
    assert [what for what, done, _ in shown if done == 0] == ["loading", "choices", "speed"]
    finished = [what for what, done, total in shown if done == total]
    assert finished == ["loading", "perplexity and divergence", "choices", "speed"]


def test_what_is_not_asked_for_is_none(pair: list[tuple[str, Path]], data: Path) -> None:
    found = evaluate(pair[:1], data=data, device=CPU, speed=False)[0]
    assert (found.accuracy, found.tokens_per_second, found.peak_bytes) == (None, None, None)
    fewer = evaluate(pair[:1], data=data, device=CPU, speed=False, limit=1)[0]
    assert fewer.tokens == len("床前明月光，疑是地上霜。") + 1 < found.tokens
    cut = evaluate(pair[:1], data=data, device=CPU, speed=False, length=20)[0]
    assert cut.tokens < found.tokens
    rounded = evaluate(pair[:1], data=data, device=CPU, speed=False, dtype=torch.bfloat16)[0]
    assert rounded.weight_bytes == found.weight_bytes / 2
    assert rounded.perplexity == pytest.approx(found.perplexity, rel=0.1)


def test_documents_end_where_the_shortest_positions_do(
    make_model: MakeModel, tmp_path: Path, write_lines: WriteLines
) -> None:
    short = make_model(tmp_path / "short", max_position_embeddings=16)
    path = write_lines(tmp_path / "a.jsonl", {"text": "明月" * 50})
    assert evaluate([("short", short)], data=path, device=CPU, speed=False)[0].tokens == 15


def test_only_one_vocabulary_can_be_compared(
    make_model: MakeModel, tiny_model: Path, blank_model: Path, tmp_path: Path, data: Path
) -> None:
    larger = make_model(tmp_path / "larger", vocab_size=320)
    with pytest.raises(DataError, match=r"^larger has a vocabulary of 320 tokens, tiny one of 301: only models of one"):
        evaluate([("tiny", tiny_model), ("larger", larger)], data=data, device=CPU, speed=False)
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    # The piece 明 becomes another character of as many bytes.
    vocabulary = (other / "tokenizer.model").read_bytes()
    (other / "tokenizer.model").write_bytes(vocabulary.replace("明".encode(), "暗".encode()))
    with pytest.raises(DataError, match=r"^other has another tokenizer than tiny"):
        evaluate([("tiny", tiny_model), ("other", other)], data=data, device=CPU, speed=False)


def test_names_are_different(tiny_model: Path, data: Path) -> None:
    with pytest.raises(UsageError, match="two models are named"):
        evaluate([("tiny", tiny_model), ("tiny", tiny_model)], data=data, device=CPU, speed=False)


def test_bad_input_is_named_before_anything_is_loaded(
    tiny_model: Path, tmp_path: Path, data: Path, write_lines: WriteLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warpbus.evaluation.side_by_side.load_model", pytest.fail)
    models = [("tiny", tiny_model)]
    unanswered = write_lines(tmp_path / "u.jsonl", {"messages": TURNS[:1]})
    with pytest.raises(DataError, match=r"u\.jsonl: nothing to predict in it"):
        evaluate(models, data=unanswered, device=CPU, speed=False)
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        evaluate(models, data=data, questions=tmp_path / "none.jsonl", device=CPU, speed=False)
    with pytest.raises(CheckpointError, match="there is no such directory"):
        evaluate([*models, ("none", tmp_path / "none")], data=data, device=CPU, speed=False)
    plain = tmp_path / "plain"
    shutil.copytree(tiny_model, plain)
    (plain / "tokenizer_config.json").write_text(json.dumps({}), encoding="utf-8")
    texts = write_lines(tmp_path / "texts.jsonl", {"text": "明月"})
    with pytest.raises(DataError, match="questions are conversations, but plain has no chat template"):
        evaluate([("plain", plain)], data=texts, questions=data, device=CPU, speed=False)


def test_the_dtype_is_that_of_the_largest_tensor(pair: list[tuple[str, Path]]) -> None:
    assert [checkpoint_dtype(Checkpoint(path)) for _, path in pair] == [torch.float32, torch.float32]
