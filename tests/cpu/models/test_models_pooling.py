"""What the files beside a model say of embeddings and reranking."""

import json

import pytest
from tokenizer_files import write_byte_level

from warpbus.errors import CheckpointError
from warpbus.models.pooling import EmbeddingHead, LogitScoreHead, TextHeads, read_text_heads
from warpbus.models.tokenizers import load_tokenizer

OURS = "sentence_transformers.models."


def write(directory, files):
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def modules(*kinds):
    return [{"idx": at, "name": str(at), "path": path, "type": kind} for at, (kind, path) in enumerate(kinds)]


def heads(directory, files, config=None):
    write_byte_level(directory)
    write(directory, {"config.json": config or {"model_type": "qwen3"}, **files})
    return read_text_heads(directory, load_tokenizer(directory))


TRANSFORMER = (OURS + "Transformer", "")
POOLING = (OURS + "Pooling", "1_Pooling")
NORMALIZE = (OURS + "Normalize", "2_Normalize")


@pytest.mark.parametrize(
    ("pooling", "kinds", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, [NORMALIZE], EmbeddingHead("last", True)),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 64}, [], EmbeddingHead("mean", False)),
        ({"pooling_mode": "lasttoken"}, [], EmbeddingHead("last", False)),
        ({"pooling_mode": "mean"}, [NORMALIZE], EmbeddingHead("mean", True)),
        ({"pooling_mode_cls_token": True}, [NORMALIZE], None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, [], None),
    ],
)
def test_pooling_is_read(tmp_path, pooling, kinds, expected):
    listed = modules(TRANSFORMER, POOLING, *kinds)
    found = heads(tmp_path, {"modules.json": listed, "1_Pooling/config.json": pooling})
    assert found.embedding == expected
    assert found.ranking is None
    if expected is None:
        assert found.missing == "mean or last-token pooling in 1_Pooling/config.json"


def test_a_module_that_is_not_supported_is_named(tmp_path):
    files = {
        "modules.json": modules(TRANSFORMER, POOLING, (OURS + "Dense", "2_Dense")),
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
    }
    found = heads(tmp_path, files)
    assert found.embedding is None
    assert "a module of the type Dense, which is not supported" in found.missing


def test_a_plain_model_defines_nothing(tmp_path):
    found = heads(tmp_path, {})
    assert found == TextHeads(missing="modules.json and 1_Pooling/config.json, as sentence-transformers writes them")


def test_a_reranker_is_read_from_its_module_or_its_config(tmp_path):
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    files = {
        "modules.json": modules(TRANSFORMER, (kind, "1_LogitScore")),
        "1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": None},
        "config_sentence_transformers.json": {"prompts": {"query": "Find it"}},
    }
    found = heads(tmp_path, files)
    assert (found.ranking, found.instruction) == (LogitScoreHead(7, None), "Find it")
    (tmp_path / "other").mkdir()
    found = heads(tmp_path / "other", {}, {"classifier_from_token": ["n", "y"]})
    tokenizer = load_tokenizer(tmp_path / "other")
    assert found.ranking == LogitScoreHead(tokenizer.encode("y")[0], tokenizer.encode("n")[0])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("modules.json", "{"),
        ("modules.json", {"type": "x"}),
        ("modules.json", [{"type": "a.Pooling", "path": "../../etc"}]),
        ("modules.json", [{"type": "a.LogitScore", "path": "1_LogitScore"}]),
        ("config.json", {"classifier_from_token": ["no"]}),
        ("config.json", {"classifier_from_token": ["one two three", "y"]}),
        ("config_sentence_transformers.json", "[]"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content):
    with pytest.raises(CheckpointError, match=r"\.json"):
        heads(tmp_path, {name: content})
