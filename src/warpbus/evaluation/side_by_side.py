"""Measures several models on the same data for comparison."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import torch

from warpbus.cuda.cpu import cpu_model
from warpbus.cuda.devices import default_dtype
from warpbus.cuda.dtype_names import short_name
from warpbus.errors import DataError, UsageError
from warpbus.evaluation.choices import Question, choice_accuracy, read_questions
from warpbus.evaluation.intervals import confidence
from warpbus.evaluation.likelihood import score
from warpbus.evaluation.speed import Speed, measure_speed
from warpbus.formats import Checkpoint, read_schemes
from warpbus.formats.dequantizing import dequantized_schemes
from warpbus.models import Decoder, ModelConfig, load_model, read_config
from warpbus.models.documents import Document, read_documents
from warpbus.models.layers import QuantizedLinear
from warpbus.models.templates import Template, find_template
from warpbus.models.tokenizers import Tokenizer, load_tokenizer

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Evaluation:
    """The measurements of one model; None for those that were not requested.

    Attributes:
        name: the model's name in reports.
        model: its directory.
        scheme: quantization scheme of its weights, or their dtype; "..., dequantized" if no kernel computes with it.
        perplexity: of the predicted tokens of the documents.
        divergence: mean KL divergence from the first model, in nats per token.
        agreement: share of tokens with the same most likely token as the first model.
        accuracy: share of multiple-choice questions answered correctly.
        tokens: number of predicted tokens.
        disk_bytes: size of the weight files.
        weight_bytes: size of the weights in memory.
        tokens_per_second: greedy decoding of one sequence, the fastest run.
        slowest: the same of the slowest run.
        peak_bytes: peak memory while decoding.
        device: the name of the GPU or CPU.
        date: of the measurement, UTC, as 2026-01-31T12:00:00Z.
        kv_cache: the KV cache for which the checkpoint has scales, and that was used; None: it has no scales.
        by_position: see `Score`.
        change_interval: 95 % interval of the relative change of the perplexity from the first model's, by the bootstrap
            of `confidence`; None for the first model, and if fewer than two documents have predicted tokens.
        divergence_interval: the same of the divergence.
    """

    name: str
    model: str
    scheme: str
    perplexity: float
    divergence: float
    agreement: float
    accuracy: float | None
    tokens: int
    disk_bytes: int
    weight_bytes: int
    tokens_per_second: float | None
    peak_bytes: int | None
    device: str = ""
    date: str = ""
    kv_cache: str | None = None
    slowest: float | None = None
    by_position: dict[str, list[float]] | None = None
    change_interval: list[float] | None = None
    divergence_interval: list[float] | None = None


def evaluate(
    models: Sequence[tuple[str, Path]],
    *,
    data: Path,
    questions: Path | None = None,
    length: int = 512,
    limit: int | None = None,
    speed: bool = True,
    device: torch.device,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda what, done, total: None,
) -> list[Evaluation]:
    """Measure models on the same documents; the first is the reference of the others.

    All models are in memory at the same time while they are scored.

    Args:
        models: names and directories; all must have the same vocabulary.
        data: `.txt` or `.jsonl` (see `read_documents`).
        questions: `.jsonl` of multiple-choice questions (see `read_questions`).
        length: maximum tokens per document; limited by the smallest context of the models.
        limit: maximum number of documents and of questions.
        speed: also measure decoding, each model in a separate process.
        device: the device to run on.
        dtype: of the activations; by default float32 on the CPU and the checkpoint's dtype on a GPU.
        progress: called with the name of the phase, the finished items and their total.

    Raises:
        UsageError: two models have the same name.
        CheckpointError: a model is not supported.
        DataError: the vocabularies differ, or a file is missing, malformed, or has nothing to predict.
        NumericError: a model's scores are NaN or infinite.
    """
    candidates = _opened(models)
    first = candidates[0]
    length = min(length, *(candidate.config.max_context for candidate in candidates))
    template = find_template(first.path, first.checkpoint.config, first.tokenizer)
    documents, asked = _read(first.name, first.tokenizer, template, data, questions, length, limit)
    loaded: dict[str, Decoder] = {}
    for candidate in _counted(candidates, "loading", progress):
        chosen = dtype or default_dtype(device, checkpoint_dtype(candidate.checkpoint))
        loaded[candidate.name] = load_model(candidate.checkpoint, device=device, dtype=chosen)
    scores = score(loaded, documents, lambda done, total: progress("perplexity and divergence", done, total))
    accuracies: dict[str, float] = {}
    if template is not None and asked:
        for name, model in _counted(list(loaded.items()), "choices", progress):
            accuracies[name] = choice_accuracy(model, template, asked)
    weights = {name: _weight_bytes(model) for name, model in loaded.items()}
    schemes = {each.name: _weights_of(each.checkpoint, loaded[each.name]) for each in candidates}
    caches = {name: str(model.kv_scales.scheme) if model.kv_scales else None for name, model in loaded.items()}
    loaded.clear()
    speeds: dict[str, Speed] = {}
    if speed:
        spelled = "auto" if dtype is None else short_name(dtype)
        for candidate in _counted(candidates, "speed", progress):
            speeds[candidate.name] = measure_speed(candidate.path, device=str(device), dtype=spelled)
    evaluations = []
    for candidate in candidates:
        name, result = candidate.name, scores[candidate.name]
        sure = None if candidate is first else confidence(result, scores[first.name])
        measured = speeds.get(name)
        evaluations.append(
            Evaluation(
                name=name,
                model=str(candidate.path),
                scheme=schemes[name],
                perplexity=result.perplexity,
                divergence=result.divergence,
                agreement=result.agreement,
                accuracy=accuracies.get(name),
                tokens=result.tokens,
                disk_bytes=candidate.checkpoint.total_bytes,
                weight_bytes=weights[name],
                tokens_per_second=None if measured is None else measured.tokens_per_second,
                slowest=None if measured is None else measured.slowest,
                peak_bytes=None if measured is None else measured.peak_bytes,
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(),
                date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                kv_cache=caches[name],
                by_position=result.by_position,
                change_interval=None if sure is None else list(sure.change),
                divergence_interval=None if sure is None else list(sure.divergence),
            )
        )
    return evaluations


@dataclass(frozen=True)
class _ComparedModel:
    """A model that is going to be measured."""

    name: str
    path: Path
    checkpoint: Checkpoint
    config: ModelConfig
    tokenizer: Tokenizer


def _opened(models: Sequence[tuple[str, Path]]) -> list[_ComparedModel]:
    """The models, if they can be compared; errors as of `evaluate`."""
    checkpoints = {name: Checkpoint(path) for name, path in models}
    if len(checkpoints) < len(models):
        raise UsageError("two models have one name: give each another")
    found = [
        _ComparedModel(name, path, checkpoints[name], read_config(checkpoints[name]), load_tokenizer(path))
        for name, path in models
    ]
    first = found[0]
    for each in found:
        size, expected = each.config.vocab_size, first.config.vocab_size
        if size != expected:
            raise DataError(
                f"{each.name} has a vocabulary of {size:,} tokens, {first.name} one of {expected:,}: "
                "only models of one vocabulary can be compared"
            )
        if not _same_vocabulary(each.tokenizer, first.tokenizer):
            raise DataError(
                f"{each.name} has another tokenizer than {first.name}: only models of one vocabulary can be compared"
            )
    return found


_Item = TypeVar("_Item")


def _counted(items: Sequence[_Item], what: str, progress: Progress) -> Iterator[_Item]:
    """The items, each reported before and after it is worked on."""
    for index, item in enumerate(items):
        progress(what, index, len(items))
        yield item
        progress(what, index + 1, len(items))


def check_data(
    model: Path, *, data: Path, questions: Path | None = None, length: int = 512, limit: int | None = None
) -> None:
    """Check the data before a long job, with the errors that `evaluate` would raise after it.

    Raises:
        CheckpointError: the model is not supported.
        DataError: a file is missing or malformed, or has nothing to predict.
    """
    checkpoint, tokenizer = Checkpoint(model), load_tokenizer(model)
    template = find_template(model, checkpoint.config, tokenizer)
    length = min(length, read_config(checkpoint).max_context)
    _read(model.name, tokenizer, template, data, questions, length, limit)


def _read(
    name: str,
    tokenizer: Tokenizer,
    template: Template | None,
    data: Path,
    questions: Path | None,
    length: int,
    limit: int | None,
) -> tuple[list[Document], list[Question]]:
    documents = read_documents(data, tokenizer, template, length=length, limit=limit)
    if not any(any(document.answers[1:]) for document in documents):
        raise DataError(f"{data}: nothing to predict in it: no answer of the assistant within {length} tokens")
    if questions is None:
        return documents, []
    if template is None:
        raise DataError(f"{questions}: questions are conversations, but {name} has no chat template")
    return documents, read_questions(questions, limit)


def checkpoint_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of the largest floating-point tensor of a checkpoint."""
    floating = [name for name in checkpoint.names() if checkpoint.dtype(name).is_floating_point]
    return checkpoint.dtype(max(floating, key=checkpoint.nbytes))


def _weights_of(checkpoint: Checkpoint, model: Decoder) -> str:
    """The kind of the weights of a checkpoint, and whether the model has them so, as `Evaluation.scheme`."""
    schemes = read_schemes(checkpoint.config)
    if schemes.distinct():
        return str(schemes)
    stored = dequantized_schemes(checkpoint.config)
    dtype = short_name(checkpoint_dtype(checkpoint))
    if stored is None:
        return dtype
    in_codes = any(isinstance(module, QuantizedLinear) for module in model.layers.modules())
    return stored if in_codes else f"{stored}, dequantized"


def _same_vocabulary(one: Tokenizer, other: Tokenizer) -> bool:
    return (one.vocab_size, one.special_ids) == (other.vocab_size, other.special_ids) and all(
        one.token_bytes(token) == other.token_bytes(token) for token in range(one.vocab_size)
    )


def _weight_bytes(model: Decoder) -> int:
    """Bytes of all weights; a tied head is counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors}.values())
