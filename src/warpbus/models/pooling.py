"""A checkpoint's settings for embeddings and reranking: the files that sentence-transformers writes beside a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from warpbus.errors import CheckpointError
from warpbus.formats.checkpoint import read_object
from warpbus.models.tokenizers import Tokenizer


@dataclass(frozen=True)
class EmbeddingHead:
    """How the hidden states of a text become its embedding.

    Attributes:
        mode: the mean of all states, or the last one; after the final norm.
        normalized: the embedding is divided by its Euclidean length.
    """

    mode: Literal["mean", "last"]
    normalized: bool


@dataclass(frozen=True)
class LogitScoreHead:
    """The relevance of a document: the probability of one token against another after the prompt.

    Attributes:
        true_token: such as that of "yes".
        false_token: such as that of "no"; None: the logit of the first one alone counts.
    """

    true_token: int
    false_token: int | None


@dataclass(frozen=True)
class TextHeads:
    """The uses of a model besides generation.

    Attributes:
        embedding: None if the checkpoint defines no embeddings, or `missing` says why they cannot be computed.
        ranking: None if the checkpoint is no reranker.
        missing: the files or entries that the checkpoint lacks.
        instruction: the question of the reranker about each document, if the checkpoint has one.
    """

    embedding: EmbeddingHead | None = None
    ranking: LogitScoreHead | None = None
    missing: str = ""
    instruction: str | None = None


def read_text_heads(directory: Path, tokenizer: Tokenizer) -> TextHeads:
    """Read `modules.json` and the files of its modules, and `classifier_from_token` of config.json (the texts of the
    false and of the true token, as vLLM has it).

    Raises:
        CheckpointError: a file is damaged.
    """
    modules = _modules(directory)
    embedding: EmbeddingHead | None = None
    ranking = _classifier(read_object(directory / "config.json"), tokenizer)
    missing = "modules.json and 1_Pooling/config.json, as sentence-transformers writes them"
    normalized = False
    for kind, path in modules:
        if kind in ("Transformer", "Normalize"):
            normalized |= kind == "Normalize"
        elif kind == "Pooling":
            values = read_object(directory / path / "config.json")
            mode = _pooling_mode(values)
            if mode is None:
                missing = f"mean or last-token pooling in {path}/config.json"
            else:
                embedding = EmbeddingHead(mode, normalized=False)
        elif kind == "LogitScore":
            ranking = _logit_score(directory / path / "config.json")
        else:
            missing = f"modules.json without a module of the type {kind[:80]}, which is not supported"
            embedding = None
            break
    if embedding is not None:
        embedding = EmbeddingHead(embedding.mode, normalized)
    prompts = read_object(directory / "config_sentence_transformers.json").get("prompts")
    query = prompts.get("query") if isinstance(prompts, dict) else None
    instruction = query if ranking is not None and isinstance(query, str) and query else None
    return TextHeads(embedding, ranking, missing, instruction)


def _modules(directory: Path) -> list[tuple[str, str]]:
    """The class and the path of each module."""
    file = directory / "modules.json"
    found = _read(file)
    if found is None:
        return []
    entries = found if isinstance(found, list) else [None]
    modules = []
    for entry in entries:
        kind, path = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str) or ".." in path or path.startswith("/"):
            raise CheckpointError(f"{file}: expected a list of modules with type and path; download it again")
        modules.append((kind.rpartition(".")[2], path))
    return modules


def _pooling_mode(values: Mapping[str, Any]) -> Literal["mean", "last"] | None:
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
    chosen = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    kinds = [names.get(name, name) for name in chosen]
    if isinstance(values.get("pooling_mode"), str):
        kinds = [{"lasttoken": "last"}.get(values["pooling_mode"], values["pooling_mode"])]
    if kinds == ["mean"]:
        return "mean"
    return "last" if kinds == ["last"] else None


def _logit_score(file: Path) -> LogitScoreHead:
    values = read_object(file)
    true, false = values.get("true_token_id"), values.get("false_token_id")
    if not _is_id(true) or not (false is None or _is_id(false)):
        raise CheckpointError(f"{file}: expected true_token_id and false_token_id, token ids; download it again")
    return LogitScoreHead(true, false)


def _classifier(config: Mapping[str, Any], tokenizer: Tokenizer) -> LogitScoreHead | None:
    texts = config.get("classifier_from_token")
    if texts is None:
        return None
    if not isinstance(texts, list) or len(texts) != 2 or not all(isinstance(text, str) for text in texts):
        raise CheckpointError('config.json: classifier_from_token: expected two texts, such as ["no", "yes"]')
    false, true = (tokenizer.encode(text) for text in texts)
    if len(false) != 1 or len(true) != 1:
        raise CheckpointError(f"config.json: classifier_from_token: each of {texts} has to be one token")
    return LogitScoreHead(true[0], false[0])


def _read(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON ({type(error).__name__}); download it again") from None


def _is_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
