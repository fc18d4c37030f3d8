"""Perplexity and divergence against a slow computation, one document at a time."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from warpbus.errors import DataError, NumericError
from warpbus.evaluation import likelihood, score
from warpbus.evaluation.likelihood import batches
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, load_model
from warpbus.models.documents import Document

CPU = torch.device("cpu")


def random_documents(count: int, longest: int) -> list[Document]:
    generator = torch.Generator().manual_seed(5)
    documents = []
    for _ in range(count):
        size = int(torch.randint(2, longest + 1, (1,), generator=generator))
        ids = torch.randint(1, 250, (size,), generator=generator).tolist()
        documents.append(Document(ids, (torch.rand(size, generator=generator) < 0.6).tolist()))
    return documents


@pytest.fixture(scope="module")
def models(make_model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    directory = tmp_path_factory.mktemp("scored")
    paths = {name: make_model(directory / name, seed=seed) for seed, name in enumerate(("first", "second"))}
    return {name: load_model(Checkpoint(path), device=CPU, dtype=torch.float32) for name, path in paths.items()}


@torch.no_grad()
def slowly(model: Decoder, reference: Decoder, documents: list[Document]) -> tuple[float, float, float, int]:
    """Perplexity, divergence, agreement and tokens in float64, one token at a time."""

    def distribution(decoder: Decoder, ids: list[int]) -> Tensor:
        return decoder(torch.tensor([ids]))[0, -1].double().log_softmax(-1)

    nll, divergence, agreements, tokens = 0.0, 0.0, 0, 0
    for document in documents:
        for index in range(1, len(document.ids)):
            if not document.answers[index]:
                continue
            own = distribution(model, document.ids[:index])
            other = distribution(reference, document.ids[:index])
            nll -= float(own[document.ids[index]])
            divergence += float((other.exp() * (other - own)).sum())
            agreements += int(own.argmax() == other.argmax())
            tokens += 1
    return float(torch.tensor(nll / tokens).exp()), divergence / tokens, agreements / tokens, tokens


def test_scores_by_the_number_of_tokens_before(models: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likelihood, "_RANGES", (0, 4, 8, 30))
    documents = random_documents(6, 12)
    reference = models["first"]
    found = score(models, documents)
    for name, model in models.items():
        by_position = found[name].by_position
        assert by_position is not None
        assert list(by_position) == ["0-3", "4-7", "8-29"]
        for (start, end), (perplexity, divergence) in zip(((0, 4), (4, 8), (8, 30)), by_position.values(), strict=True):
            cut = [
                Document(each.ids, [answer and start <= at < end for at, answer in enumerate(each.answers)])
                for each in documents
            ]
            expected = slowly(model, reference, cut)
            assert perplexity == pytest.approx(expected[0], rel=1e-4)
            assert divergence == pytest.approx(expected[1], rel=1e-3, abs=1e-6)
    short = [document.cut(4) for document in documents]
    assert score(models, short)["second"].by_position is None  # there is one range


def test_scores_are_those_of_a_slow_computation(models: dict[str, Decoder]) -> None:
    documents = random_documents(7, 12)
    seen: list[tuple[int, int]] = []
    scores = score(models, documents, lambda done, total: seen.append((done, total)))
    assert list(scores) == ["first", "second"]
    for name, found in scores.items():
        perplexity, divergence, agreement, tokens = slowly(models[name], models["first"], documents)
        assert found.perplexity == pytest.approx(perplexity, rel=1e-5)
        assert found.divergence == pytest.approx(divergence, rel=1e-4, abs=1e-9)
        assert found.agreement == pytest.approx(agreement)
        assert found.tokens == tokens > 20
    assert (scores["first"].divergence, scores["first"].agreement) == (0.0, 1.0)
    assert scores["second"].divergence > 0.1
    assert scores["second"].agreement < 0.9
    assert seen[-1] == (7, 7)


def test_batches_change_nothing(models: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    documents = random_documents(20, 30)
    expected = score(models, documents)
    alone = [score(models, [document]) for document in documents if any(document.answers[1:])]
    tokens = sum(scores["second"].tokens for scores in alone)
    mean = sum(scores["second"].divergence * scores["second"].tokens for scores in alone) / tokens
    assert mean == pytest.approx(expected["second"].divergence, rel=1e-5)
    whole = expected["second"]
    of_documents = zip(whole.likelihoods, whole.divergences, whole.counts, strict=True)
    answered = [each for each in of_documents if each[2]]
    for (loss, divergence, count), own in zip(answered, (scores["second"] for scores in alone), strict=True):
        assert loss == pytest.approx(count * math.log(own.perplexity), rel=1e-5)
        assert divergence == pytest.approx(count * own.divergence, rel=1e-4)
        assert count == own.tokens
    # Scores of the vocabulary a few tokens at a time.
    monkeypatch.setattr(likelihood, "_HELD", 7 * models["first"].config.vocab_size)
    pieces = score(models, documents)
    for name, found in expected.items():
        assert pieces[name].perplexity == pytest.approx(found.perplexity, rel=1e-6)
        assert pieces[name].divergence == pytest.approx(found.divergence, rel=1e-6)
        assert (pieces[name].agreement, pieces[name].tokens) == (found.agreement, found.tokens)


def test_batches_hold_every_document_once() -> None:
    documents = random_documents(30, 20)
    seen: list[int] = []
    for picked, ids, predicted in batches(documents, CPU, tokens=64):
        assert ids.shape == predicted.shape
        assert ids.shape[1] == max(len(documents[index].ids) for index in picked)
        assert ids.numel() <= 64
        assert not predicted[:, 0].any()
        for row, index in enumerate(picked):
            document = documents[index]
            size = len(document.ids)
            assert ids[row, :size].tolist() == document.ids
            assert predicted[row, 1:size].tolist() == document.answers[1:]
            assert not predicted[row, size:].any()
        seen += picked
    assert sorted(seen) == list(range(30))


def test_a_document_longer_than_a_batch_stands_alone() -> None:
    documents = [Document([1] * 9, [True] * 9), Document([2] * 9, [True] * 9)]
    assert [picked for picked, _, _ in batches(documents, CPU, tokens=4)] == [[1], [0]]


def test_nothing_to_predict(models: dict[str, Decoder]) -> None:
    with pytest.raises(DataError, match="nothing to predict"):
        score(models, [Document([1, 2, 3], [True, False, False])])


def test_a_broken_model_is_named(models: dict[str, Decoder], make_model, tmp_path: Path) -> None:
    broken = load_model(Checkpoint(make_model(tmp_path / "broken")), device=CPU, dtype=torch.float32)
    broken.final_norm.weight.data.fill_(float("nan"))
    with pytest.raises(NumericError, match=r"^broken: its scores are NaN or infinite"):
        score({**models, "broken": broken}, random_documents(3, 9))
