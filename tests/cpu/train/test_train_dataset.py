"""Packed rows: nothing lost, nothing mixed, and the same batches however a run is cut."""

import json
import multiprocessing
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from warpbus.errors import DataError
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.layers import CausalAttention
from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.train import dataset
from warpbus.train.dataset import IGNORED, Batches, Documents, PackedBatch, assemble, pack, tokenize

WriteLines = Callable[..., Path]


def documents_of(*documents: list[tuple[int, bool]]) -> Documents:
    flat = [token for document in documents for token in document]
    sizes = [len(document) for document in documents]
    return Documents(
        np.array([token for token, _ in flat], np.int32),
        np.array([reported for _, reported in flat], np.bool_),
        np.array([0, *np.cumsum(sizes)], np.int64),
    )


def random_documents(count: int, longest: int, seed: int = 0, vocab: int = 90) -> Documents:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, longest + 1, count)
    total = int(sizes.sum())
    answers = rng.random(total) < 0.6
    answers[np.cumsum(sizes) - 1] = True
    tokens = rng.integers(1, vocab, total, dtype=np.int32)
    return Documents(tokens, answers, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


@given(st.lists(st.integers(2, 12), min_size=1, max_size=40), st.integers(12, 20), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_every_document_is_in_one_row_whole(sizes: list[int], length: int, seed: int) -> None:
    offsets = np.array([0, *np.cumsum(sizes)], np.int64)
    tokens = np.arange(offsets[-1], dtype=np.int32)
    documents = Documents(tokens, np.ones(len(tokens), np.bool_), offsets)
    order = np.random.default_rng(seed).permutation(len(sizes))
    rows = pack(documents, order, length)
    assert np.concatenate(rows).tolist() == order.tolist()
    assert all(sum(sizes[index] for index in row) <= length for row in rows)
    packed = assemble(documents, rows, length)
    expected = [token for index in order for token in tokens[offsets[index] : offsets[index + 1]]]
    assert packed.tokens[packed.documents >= 0].tolist() == expected


def test_targets_positions_and_documents_of_a_row() -> None:
    documents = documents_of(
        [(11, False), (12, False), (13, True), (14, True)],
        [(21, True), (22, True)],
        [(31, False), (32, True), (33, False)],
    )
    rows = assemble(documents, pack(documents, [0, 1, 2], 8), 8)
    none = IGNORED
    # A document's first token is no target, though an answer: nothing in it comes before.
    assert rows.tokens.tolist() == [[11, 12, 13, 14, 21, 22, 0, 0], [31, 32, 33, 0, 0, 0, 0, 0]]
    assert rows.targets.tolist() == [[none, 13, 14, none, 22, none, none, none], [32, *[none] * 7]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 0, 1, 0, 0], [0, 1, 2, 0, 0, 0, 0, 0]]
    assert rows.documents.tolist() == [[0, 0, 0, 0, 1, 1, -1, -1], [0, 0, 0, *[-1] * 5]]


def test_a_row_that_a_document_fills() -> None:
    documents = documents_of([(1, True), (2, True), (3, True)], [(4, True), (5, True), (6, True)])
    rows = assemble(documents, pack(documents, [1, 0], 3), 3)
    assert rows.tokens.tolist() == [[4, 5, 6], [1, 2, 3]]
    assert rows.targets.tolist() == [[5, 6, IGNORED], [2, 3, IGNORED]]


@torch.no_grad()
def test_packed_rows_lose_what_documents_lose_alone(tiny_model: Path) -> None:
    model = load_model(Checkpoint(tiny_model), device="cpu", dtype=torch.float32).double()
    documents = random_documents(9, 14)
    rows = assemble(documents, pack(documents, range(9), 24), 24)
    assert len(rows.tokens) < 9
    logits = model(rows.tokens, rows.positions, CausalAttention(rows.documents))
    packed = F.cross_entropy(logits.flatten(0, 1), rows.targets.flatten(), reduction="sum", ignore_index=IGNORED)
    alone = 0.0
    for start, end in zip(documents.offsets, documents.offsets[1:], strict=False):
        ids = torch.tensor(documents.tokens[start:end], dtype=torch.int64)
        losses = F.cross_entropy(model(ids[None])[0, :-1], ids[1:], reduction="none")
        alone += float(losses[torch.from_numpy(documents.answers[start + 1 : end])].sum())
    # The rotary angles are computed in float32.
    assert float(packed) == pytest.approx(alone, rel=1e-6)


def flat(rows: PackedBatch) -> list[list[int]]:
    return rows.tokens.tolist()


def test_epochs_are_different_shuffles_of_all_documents() -> None:
    documents = documents_of(*[[(10 * index, True), (10 * index + 1, True)] for index in range(8)])
    batches = Batches(documents, 4, 2, seed=3)
    assert batches.steps_per_epoch() == 2
    steps = [flat(rows) for rows in batches.steps(0, 6)]
    epochs = [[row for step in steps[start : start + 2] for row in step] for start in (0, 2, 4)]
    for epoch in epochs:
        assert sorted(token for row in epoch for token in row) == sorted(documents.tokens.tolist())
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [flat(rows) for rows in batches.steps(0, 6)] == steps
    assert [flat(rows) for rows in Batches(documents, 4, 2, seed=4).steps(0, 6)] != steps


@pytest.mark.parametrize("rows_per_step", [1, 3, 20])
def test_a_run_goes_on_as_if_it_had_not_stopped(rows_per_step: int) -> None:
    """Also where an epoch's rows do not fill whole steps, or not even one."""
    batches = Batches(random_documents(31, 10), 16, rows_per_step, seed=1)
    whole = [flat(rows) for rows in batches.steps(0, 12)]
    assert len(whole) == 12
    assert all(len(rows) == rows_per_step for rows in whole)
    for start in (1, 5, 11, 12):
        assert [flat(rows) for rows in batches.steps(start, 12)] == whole[start:]


def test_processes_share_the_rows() -> None:
    batches = Batches(random_documents(40, 10), 16, 6, seed=1)
    whole = [flat(rows) for rows in batches.steps(0, 7)]
    parts = [[flat(rows) for rows in batches.steps(0, 7, rank, 3)] for rank in range(3)]
    for step, rows in enumerate(whole):
        shared = [parts[rank][step] for rank in range(3)]
        assert [len(part) for part in shared] == [2, 2, 2]
        assert sorted(row for part in shared for row in part) == sorted(rows)


def config_of(model: Path) -> dict[str, object]:
    return json.loads((model / "config.json").read_text(encoding="utf-8"))


def conversation(question: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_tokenize_keeps_what_there_is_to_learn(blank_model: Path, tmp_path: Path, write_lines: WriteLines) -> None:
    long = conversation("床前明月光" * 10, "霜")
    asked = {"messages": [{"role": "user", "content": "写诗"}]}
    records = [{"text": "明月光"}, conversation("写诗", "明月"), long, asked, {"text": ""}, {"text": "月"}]
    path = write_lines(tmp_path / "a.jsonl", *records)
    documents = tokenize(path, blank_model, config_of(blank_model), length=20)
    tokenizer = load_tokenizer(blank_model)
    template = find_template(blank_model, config_of(blank_model), tokenizer)
    assert template is not None
    ids, answers = template.spans(records[1]["messages"])  # type: ignore[arg-type]
    assert len(documents) == 3
    end = tokenizer.special_ids["<|endoftext|>"]
    texts = [*tokenizer.encode("明月光"), end], [*tokenizer.encode("月"), end]
    assert documents.tokens.tolist() == [*texts[0], *ids, *texts[1]]
    assert documents.answers.tolist() == [True] * 4 + answers + [True] * 2
    assert documents.offsets.tolist() == [0, 4, 4 + len(ids), 6 + len(ids)]
    assert (documents.truncated, documents.dropped) == (0, 3)
    cut = tokenize(path, blank_model, config_of(blank_model), length=len(ids) - 1)
    assert (len(cut), cut.truncated, cut.dropped) == (3, 1, 3)
    assert tokenize(path, blank_model, config_of(blank_model), length=3).tokens.tolist()[:3] == texts[0][:3]


def test_processes_tokenize_alike(blank_model: Path, tmp_path: Path, write_lines: WriteLines) -> None:
    path = write_lines(tmp_path / "a.jsonl", *[conversation("写诗", "明月" * (1 + index % 7)) for index in range(4200)])
    config = config_of(blank_model)
    alone = tokenize(path, blank_model, config, length=64)
    together = tokenize(path, blank_model, config, length=64, workers=2)
    assert len(alone) == 4200
    assert alone.digest() == together.digest()
    assert (alone.offsets == together.offsets).all()
    with path.open("a", encoding="utf-8") as file:
        file.write("{\n")
    with pytest.raises(DataError, match=r"a\.jsonl:4201: not JSON"):
        tokenize(path, blank_model, config, length=64, workers=2)


def test_processes_leave_ctrl_c_to_the_first(
    blank_model: Path, tmp_path: Path, write_lines: WriteLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", conversation("写诗", "明月"))
    ignored: list[bool] = []
    chunks = dataset._chunks

    def looked_at(lines: Any, size: int) -> Iterator[Any]:
        for child in multiprocessing.active_children():
            status = Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8")
            mask = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
            ignored.append(bool(mask >> (signal.SIGINT - 1) & 1))
        yield from chunks(lines, size)

    monkeypatch.setattr(dataset, "_chunks", looked_at)
    before = signal.getsignal(signal.SIGINT)
    assert len(tokenize(path, blank_model, config_of(blank_model), length=64, workers=2)) == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert ignored == [True, True]


def test_tokenize_a_text(blank_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("床前明月光疑是地上霜举", encoding="utf-8")
    documents = tokenize(path, blank_model, config_of(blank_model), length=5)
    assert documents.offsets.tolist() == [0, 5, 10]
    assert documents.answers.all()


def test_a_digest_tells_data_apart() -> None:
    documents = random_documents(5, 9)
    assert documents.digest() == random_documents(5, 9).digest()
    assert documents.digest() != random_documents(5, 9, seed=1).digest()
    changed = Documents(documents.tokens, ~documents.answers, documents.offsets)
    assert documents.digest() != changed.digest()


def test_nothing_to_learn(blank_model: Path, tmp_path: Path, write_lines: WriteLines) -> None:
    unanswered = write_lines(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "写诗"}]})
    for path, said in ((unanswered, "nothing to learn in it"), (tmp_path / "none.jsonl", "no such file")):
        with pytest.raises(DataError, match=said) as raised:
            tokenize(path, blank_model, config_of(blank_model), length=20)
        assert str(path) in str(raised.value)


def test_every_document_of_chatglm6b_has_its_prompt(
    tiny_chatglm: Path, tmp_path: Path, write_lines: WriteLines
) -> None:
    tokenizer = load_tokenizer(tiny_chatglm)
    gmask, sop = tokenizer.prompt_suffix
    talk = [{"role": "user", "content": "明月"}, {"role": "assistant", "content": "光"}] * 2
    long = [{"role": "user", "content": "月光" * 60}, {"role": "assistant", "content": "光"}]
    lines = write_lines(tmp_path / "a.jsonl", {"messages": talk}, {"text": "举头望明月"}, {"messages": long})
    (tmp_path / "a.txt").write_text("床前明月光，疑是地上霜。" * 20, encoding="utf-8")
    for path, count in ((lines, 2), (tmp_path / "a.txt", None)):
        # A prompt that leaves no room for its answer is left out.
        documents = tokenize(path, tiny_chatglm, config_of(tiny_chatglm), length=60)
        assert count in (None, len(documents))
        for start, end in zip(documents.offsets, documents.offsets[1:], strict=False):
            tokens, answers = documents.tokens[start:end].tolist(), documents.answers[start:end].tolist()
            assert (tokens.count(gmask), tokens.count(sop)) == (1, 1)
            at = tokens.index(sop) + 1
            assert tokens[at - 2] == gmask
            assert answers == [False] * at + [True] * (len(tokens) - at)
            assert at < len(tokens) <= 60
            # An answer and a text of a line end with <eop>, pieces of a .txt do not.
            assert (tokens[-1] == tokenizer.special_ids["<eop>"]) is (path == lines)


def test_a_text_ends_with_the_first_stop_token_without_an_eos_token(
    blank_model: Path, tmp_path: Path, write_lines: WriteLines
) -> None:
    shutil.copytree(blank_model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    path = write_lines(tmp_path / "a.jsonl", {"text": "明月"})
    ends = {}
    for stop in (3, [7, 2]):
        config = {**config_of(blank_model), "eos_token_id": stop}
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
        ends[str(stop)] = int(tokenize(path, tmp_path / "model", config, length=20).tokens[-1])
    assert ends == {"3": 3, "[7, 2]": 7}
