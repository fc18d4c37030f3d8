"""GLM-5 against transformers, with indexers that exclude most tokens: configs, logits, tokens and quantization."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import HF, plain_tensors, write_files

from warpbus.dist import Group, Send, launch
from warpbus.engine import Engine
from warpbus.errors import CheckpointError
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, LatentAttentionSpec, ModelConfig, load_model
from warpbus.models.cost import kv_cache_bytes
from warpbus.models.families import family_of
from warpbus.models.layers import BranchedAttention, CausalAttention, LatentAttention, QuantizedLinear, select_tokens
from warpbus.qtensor import Scheme
from warpbus.quantization import Calibration, quantize

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
GLM5: dict[str, Any] = HF | {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 24,
    "head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "index_n_heads": 8,
    "index_head_dim": 24,
    "index_topk": 4,
    "eos_token_id": 10**6,  # no token: transformers generates as many as are asked for
    "max_position_embeddings": 512,
}
SHARED = GLM5 | {"indexer_types": ["full", "shared", "full", "shared"]}
CASES = {
    "few": GLM5,
    "all": GLM5 | {"index_topk": 64},
    "one": GLM5 | {"index_topk": 1, "index_head_dim": 17, "index_n_heads": 9, "num_hidden_layers": 2},
    "shared": SHARED,
    "grouped-experts": GLM5 | {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "attention_bias": True},
}
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30]]


def parsed(values: dict[str, Any]) -> ModelConfig:
    family = family_of(values)
    assert family is not None
    return family.config(values)


def loaded(directory: Path, **options: Any) -> Decoder:
    return load_model(Checkpoint(directory), device="cpu", dtype=torch.float32, **options)


def written(directory: Path, values: dict[str, Any]) -> Path:
    return write_files(directory, values, plain_tensors(values, torch.float32))


def oracle(directory: Path) -> Any:
    return transformers.GlmMoeDsaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    directory = written(tmp_path / "model", CASES[case])
    model, expected_model = loaded(directory), oracle(directory)
    tokens = torch.randint(0, 48, (2, 24), generator=torch.Generator().manual_seed(3))
    for start in (0, 300):
        positions = torch.arange(start, start + 24).expand_as(tokens)
        expected = expected_model(input_ids=tokens, position_ids=positions).logits
        found = model(tokens, positions)
        assert expected.std() > 0.1
        assert (found - expected).norm() < 1e-5 * expected.norm()
    theirs = sum(parameter.numel() for parameter in expected_model.parameters())
    corrections = sum(layer.mlp.router.bias.numel() for layer in model.layers if hasattr(layer.mlp, "router"))
    assert model.config.num_parameters == theirs + corrections


@pytest.mark.parametrize("case", ["few", "shared"])
@torch.no_grad()
def test_the_selection_matters(tmp_path: Path, case: str) -> None:
    """Without it the logits are others: what the tests above compare depends on it."""
    model = loaded(written(tmp_path / "model", CASES[case]))
    tokens = torch.arange(24)[None]
    found = model(tokens)
    for layer in model.layers:
        assert isinstance(layer.attention, LatentAttention)
        assert layer.attention.spec.indexer is not None
        layer.attention.spec = replace(layer.attention.spec, indexer=replace(layer.attention.spec.indexer, top_k=64))
    torch.testing.assert_close(model(tokens)[:, :4], found[:, :4])
    assert (model(tokens) - found)[:, 5:].norm() > 0.05 * found[:, 5:].norm()


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5}, {"speculation": 3}], ids=str)
@pytest.mark.parametrize("case", ["few", "all", "shared"])
def test_generated_tokens_are_those_of_transformers(tmp_path: Path, case: str, options: dict[str, Any]) -> None:
    directory = written(tmp_path / "model", CASES[case])
    found = Engine(loaded(directory), max_model_len=64, **options).decode(PROMPTS, 20)
    expected_model = oracle(directory)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            ids = expected_model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert list(answer) == ids[0, len(prompt) :].tolist()


def job(group: Group, send: Send, directory: Path) -> None:
    engine = Engine(loaded(directory, group=group), max_model_len=64)
    send((group.rank, [list(answer) for answer in engine.decode(PROMPTS, 12)]))


def test_two_processes_generate_the_tokens_of_one(tmp_path: Path) -> None:
    """Every process selects the same tokens."""
    directory = written(tmp_path / "model", SHARED)
    said: dict[int, list[list[int]]] = {}
    launch(job, (directory,), devices=[CPU, CPU], receive=lambda message: said.update([message]))
    alone = [list(answer) for answer in Engine(loaded(directory), max_model_len=64).decode(PROMPTS, 12)]
    assert said == {0: alone, 1: alone}


@torch.no_grad()
def test_packed_documents_and_continuations_select_among_their_own_tokens(tmp_path: Path) -> None:
    model = loaded(written(tmp_path / "model", SHARED))
    one, other = torch.arange(2, 14)[None], torch.arange(30, 46)[None]
    apart = torch.cat([model(one), model(other)], dim=1)
    positions = torch.cat([torch.arange(12), torch.arange(16)])[None]
    documents = torch.cat([torch.zeros(1, 12), torch.ones(1, 16)], dim=1).long()
    packed = model(torch.cat([one, other], dim=1), positions, CausalAttention(documents))
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-5)

    ends = [torch.arange(20, 25)[None], torch.arange(40, 47)[None]]
    branches = torch.cat([torch.full((1, size), at) for at, size in enumerate((12, 5, 7))], dim=1)
    positions = torch.cat([torch.arange(12), torch.arange(12, 17), torch.arange(12, 19)])[None]
    found = model(torch.cat([one, *ends], dim=1), positions, BranchedAttention(branches))
    for end, rows in zip(ends, (found[:, 12:17], found[:, 17:]), strict=True):
        torch.testing.assert_close(rows, model(torch.cat([one, end], dim=1))[:, 12:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("at_once", [2**24, 2 * 3 * 30 * 2])
def test_the_best_tokens_are_selected(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """All rows at once, or two of them; a key that no row may see is NaN, and of equal scores the first ones win."""
    monkeypatch.setattr("warpbus.models.layers.indexer._SCORES_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(1)
    q, keys = torch.randn(2, 9, 3, 8, generator=generator), torch.randn(2, 30, 8, generator=generator)
    keys[:, 10:14] = keys[:, 2:3]
    keys[:, 29] = torch.nan
    weights = torch.randn(2, 9, 3, generator=generator)
    visible = torch.ones(9, 30, dtype=torch.bool).tril(20)
    found = select_tokens(q, weights, keys, visible, 6)
    scores = (torch.einsum("bthd,bsd->bths", q, keys).relu() * weights[..., None]).sum(2)
    for batch in range(2):
        for row in range(9):
            best = scores[batch, row, : 21 + row].sort(descending=True, stable=True).indices[:6]
            assert sorted(best.tolist()) == found[batch, row].nonzero()[:, 0].tolist()


def test_the_published_config_is_read() -> None:
    """GLM-5: 744 billion parameters; 576 numbers and an index key of 128 per token and layer."""
    published = {
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "eos_token_id": [154820, 154827, 154829],
        "first_k_dense_replace": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "intermediate_size": 12288,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 78,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "v_head_dim": 256,
        "vocab_size": 154880,
    }
    config = parsed(published)
    # The layer of multi-token prediction has an indexer of its own.
    assert kv_cache_bytes(config, torch.bfloat16, torch.bfloat16) == 79 * (576 + 128) * 2
    config = replace(config, mtp=None)
    assert round(config.num_parameters / 1e9) == 744
    assert kv_cache_bytes(config, torch.bfloat16, torch.bfloat16) == 78 * (576 + 128) * 2
    shared = parsed(published | {"indexer_types": ["full", "full", *["full", "shared", "shared", "shared"] * 19]})
    assert kv_cache_bytes(shared, torch.bfloat16, torch.bfloat16) == (79 * 576 + 22 * 128) * 2


def kinds(values: dict[str, Any]) -> str:
    """Of each layer F (full) or S (shared)."""
    found = ""
    for layer in parsed(values).layers:
        assert isinstance(layer.attention, LatentAttentionSpec)
        assert layer.attention.indexer is not None
        found += "S" if layer.attention.indexer.shared else "F"
    return found


def test_the_layers_that_share_a_selection() -> None:
    eight = GLM5 | {"num_hidden_layers": 8}
    assert kinds(eight) == "FFFFFFFF"
    assert kinds(SHARED) == "FSFS"
    assert kinds(eight | {"index_topk_pattern": "FSSFSSSS"}) == "FSSFSSSS"
    for settings in ({"index_topk_freq": 4}, {"index_topk_freq": 3, "index_skip_topk_offset": 3}):
        theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=8, **settings).indexer_types
        assert kinds(eight | settings) == "".join(kind[0].upper() for kind in theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q_lora_rank": None},
            "q_lora_rank: expected the features of the latents of queries, which the indexer reads",
        ),
        ({"index_topk": None}, "index_topk: expected an integer from 1 to"),
        ({"index_head_dim": 8}, "index_head_dim: expected at least qk_rope_head_dim (16), but found 8"),
        (
            {"indexer_types": ["full"]},
            "indexer_types: expected full or shared for each of 4 layers, full for the first",
        ),
        ({"indexer_types": ["shared", *["full"] * 3]}, "indexer_types: expected full or shared for each of 4 layers"),
        ({"index_topk_pattern": "FSXF"}, "index_topk_pattern: expected full or shared for each of 4 layers"),
        ({"indexer_types": 3}, "indexer_types: expected full or shared for each of 4 layers"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types: expected indexed_attention for every layer"),
    ],
)
def test_senseless_configs_are_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parsed(GLM5 | changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
@torch.no_grad()
def test_indexers_are_not_quantized(tmp_path: Path, algorithm: str) -> None:
    directory, out = written(tmp_path / "model", SHARED), tmp_path / "w4"
    drawn = torch.randint(0, 48, (12, 40), generator=torch.Generator().manual_seed(4))
    calibration = None if algorithm == "rtn" else Calibration(tuple(map(tuple, drawn.tolist())))
    quantize(directory, out, scheme="w4a16-g32", algorithm=algorithm, calibration=calibration, device="cpu")
    original, small = loaded(directory), loaded(out)
    for name, parameter in original.named_parameters():
        if ".indexer." in name:
            assert torch.equal(small.get_parameter(name), parameter)
    assert isinstance(small.layers[1].get_submodule("attention.q_b"), QuantizedLinear)
    ignored = Checkpoint(out).config["quantization_config"]["ignore"]
    for name in ("wq_b", "wk", "weights_proj"):
        assert f"model.layers.2.self_attn.indexer.{name}" in ignored
    tokens = drawn[:4]
    p, q = (model(tokens).log_softmax(-1) for model in (original, small))
    assert (p.exp() * (p - q)).sum(-1).mean() < 0.3
    (answer,) = Engine(small, max_model_len=64).decode(PROMPTS[2:], 12)
    scores = small(torch.tensor([[*PROMPTS[2], *answer]]))[0, len(PROMPTS[2]) - 1 : -1]
    assert list(answer) == scores.argmax(-1).tolist()


def test_indexers_are_not_rounded_while_loading(tmp_path: Path) -> None:
    directory = written(tmp_path / "model", GLM5)
    model, rounded = loaded(directory), loaded(directory, layer_scheme=Scheme.parse("w4a16-g32"))
    assert isinstance(rounded.layers[0].get_submodule("attention.o"), QuantizedLinear)
    name = "layers.0.attention.indexer.q.weight"
    assert torch.equal(rounded.get_parameter(name), model.get_parameter(name))
