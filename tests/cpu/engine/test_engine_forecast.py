"""What a model is going to be like on a GPU: against measured steps, and what is said where nothing was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from warpbus.cuda.cards import CARDS, card_named
from warpbus.engine.forecast import forecast
from warpbus.engine.plan import Stored
from warpbus.errors import UsageError
from warpbus.models import SHAPES, IndexerSpec, LatentAttentionSpec
from warpbus.qtensor import Scheme

RECORD = Path(__file__).parents[3] / "benchmarks" / "results" / "decode-nvidia-h100-80gb-hbm3.json"
W4 = Scheme.parse("w4a16-g128")
GB = 10**9


def stored(shape: str, scheme: Scheme | None = W4, dtype: torch.dtype = torch.bfloat16) -> Stored:
    return Stored.uniform(SHAPES[shape], dtype, scheme)


def recorded() -> dict[str, float]:
    """Tokens per second of ChatGLM2-6B's shape in 4 and 16 bits on an H100."""
    records = [record for record in json.loads(RECORD.read_text()) if record["metric"] == "speed"]
    (own,) = {record["ours"] for record in records if record["case"]["variant"] == "w4a16-g128"}
    (plain,) = (record["peer"]["value"] for record in records if record["peer"]["name"] == "warpbus, float16")
    return {"w4a16-g128": own, "float16": plain}


# docs/benchmark_results.md, "Decode steps".
MEASURED = [
    ("chatglm2-6b", W4, "h100", recorded()["w4a16-g128"]),
    ("chatglm2-6b", None, "h100", recorded()["float16"]),
    ("glm-4.5-air", W4, "h200", 279),
    ("qwen3-30b-a3b", W4, "h200", 428),
    ("glm-4.7-flash", W4, "h200", 382),
]


@pytest.mark.parametrize(("shape", "scheme", "card", "tokens_per_second"), MEASURED)
def test_forecasts_are_within_five_percent_of_what_was_measured(
    shape: str, scheme: Scheme | None, card: str, tokens_per_second: float
) -> None:
    found = forecast(stored(shape, scheme, torch.float16), CARDS[card], CARDS[card].memory)
    assert found.tokens_per_second == pytest.approx(tokens_per_second, rel=0.05)
    assert found.most_tokens_per_second > tokens_per_second
    assert found.unmeasured == ""
    assert "about" in found.speed()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", [None, W4])
def test_the_weights_are_those_of_the_memory_plan(shape: str, scheme: Scheme | None) -> None:
    model = stored(shape, scheme)
    found = forecast(model, CARDS["b200"], 300 * GB)
    sizes = {row.name: row.nbytes for row in found.weights}
    parts = found.plan.parts
    assert sizes["embedding"] == parts["embedding"]
    assert sizes["head"] == parts["head"]
    layers = sum(size for name, size in sizes.items() if name not in ("embedding", "head"))
    assert layers == parts["layers"]
    assert all(row.place == "GPU" for row in found.weights)
    assert ("routed experts" in sizes) == model.config.has_experts


def test_a_step_reads_the_experts_of_one_token() -> None:
    found = forecast(stored("glm-4.5-air"), CARDS["h200"], CARDS["h200"].memory)
    rows = {row.name: row for row in found.weights}
    assert rows["routed experts"].step_bytes == pytest.approx(rows["routed experts"].nbytes * 8 / 128, rel=1e-6)
    assert rows["attention"].step_bytes == rows["attention"].nbytes
    assert rows["embedding"].step_bytes == 0
    assert rows["head"].step_bytes == rows["head"].nbytes > 0


def test_a_tied_head_is_read_too() -> None:
    config = replace(SHAPES["chatglm2-6b"], tie_embeddings=True)
    found = forecast(Stored.uniform(config, torch.float16, W4), CARDS["h100"], CARDS["h100"].memory)
    rows = {row.name: row for row in found.weights}
    assert rows["head"].nbytes == 0
    assert rows["head"].step_bytes == rows["embedding"].nbytes


def test_an_embedding_that_has_no_room_is_on_the_host() -> None:
    model = stored("chatglm2-6b", dtype=torch.float16)
    least = forecast(model, CARDS["h100"], 5 * GB)
    assert {row.name: row.place for row in least.weights}["embedding"] == "GPU"
    found = forecast(model, CARDS["h100"], int(4.4 * GB))
    assert found.plan.embedding_on_cpu
    rows = {row.name: row for row in found.weights}
    assert rows["embedding"].place == "host"
    assert rows["head"].nbytes == found.plan.parts["head"] < rows["embedding"].nbytes
    assert found.tokens_per_second is None
    assert "embedding on the host" in found.speed()


@pytest.mark.parametrize(
    ("shape", "scheme", "card", "reason"),
    [
        ("glm-4.5-air", "w4a16-g128", "a100-80gb", "no steps were timed on a100-80gb"),
        ("glm-4.5-air", "w8a8-int8", "h200", "no kernels"),
        ("qwen3-30b-a3b", None, "h200", "no kernels"),
        ("chatglm2-6b", "w8a8-int8", "h100", "activations of 8 bits"),
    ],
)
def test_what_was_not_measured_is_only_bounded(shape: str, scheme: str | None, card: str, reason: str) -> None:
    model = stored(shape, None if scheme is None else Scheme.parse(scheme))
    found = forecast(model, CARDS[card], 200 * GB)
    assert found.tokens_per_second is None
    assert found.kernel_seconds is None
    assert reason in found.unmeasured
    assert "at most" in found.speed()
    assert found.most_tokens_per_second > 0
    json.dumps(found.to_json())


def test_sparse_attention_was_not_measured() -> None:
    config = SHAPES["glm-4.7-flash"]
    latent = config.attention
    assert isinstance(latent, LatentAttentionSpec)
    sparse = replace(latent, indexer=IndexerSpec(heads=32, head_dim=128, top_k=2048))
    layers = tuple(replace(layer, attention=sparse) for layer in config.layers)
    model = Stored.uniform(replace(config, layers=layers), torch.bfloat16, W4)
    assert "sparse attention" in forecast(model, CARDS["h200"], 100 * GB).unmeasured


def test_experts_of_different_schemes_have_no_kernels() -> None:
    model = stored("qwen3-30b-a3b")
    name = "layers.3.mlp.experts.5.down.weight"
    mixed = replace(model, quantized={**model.quantized, name: Scheme.parse("w8a16-g128")})
    assert forecast(model, CARDS["h200"], 100 * GB).unmeasured == ""
    assert "no kernels" in forecast(mixed, CARDS["h200"], 100 * GB).unmeasured


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(UsageError, match=r"memory is 3\.00 GB.*needs 5\.47 GB.*give memory 5\.5GB"):
        forecast(stored("glm-4.5-air"), CARDS["h100"], 3 * GB)
    with pytest.raises(UsageError, match="give memory") as refused:
        forecast(stored("chatglm2-6b"), CARDS["h100"], 2 * GB)
    assert "experts" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_cards_are_found_by_both_of_their_names() -> None:
    assert card_named("H100") is card_named("NVIDIA H100 80GB HBM3") is CARDS["h100"]
    with pytest.raises(UsageError, match=r"GPU 'h1000' is not known: choose the nearest of h100, h200"):
        card_named("h1000")
    assert [card.name for card in CARDS.values() if card.measured] == ["h100", "h200"]
    assert all(card.bandwidth < 8e12 and card.memory <= 180 * GB for card in CARDS.values())


@pytest.mark.parametrize(("shape", "memory"), [("glm-4.7-flash", 8), ("glm-4.7-flash", 16), ("glm-4.5-air", 24)])
def test_experts_that_do_not_fit_are_read_across_the_link(shape: str, memory: int) -> None:
    model, card = stored(shape), CARDS["h200"]
    found = forecast(model, card, memory * GB)
    rows = {row.name: row for row in found.weights}
    far = rows["offloaded experts"]
    whole = {row.name: row for row in forecast(model, card, card.memory).weights}["routed experts"]
    assert (far.place, far.nbytes) == ("host", found.plan.host_bytes)
    assert far.nbytes + rows["routed experts"].nbytes == whole.nbytes
    assert far.step_bytes + rows["routed experts"].step_bytes == pytest.approx(whole.step_bytes, abs=2)
    assert found.link_seconds == far.step_bytes / card.link
    assert 1 / found.most_tokens_per_second > found.link_seconds
    assert found.tokens_per_second is None
    assert found.most_prompt_tokens_per_second == found.plan.prefill_tokens * card.link / far.nbytes
    for said in (f"{found.link_seconds * 1e3:.2f} ms of it", "from the host at 50 GB/s", "a long prompt: at most"):
        assert said in found.speed()
    assert "offloaded experts were not timed" in found.unmeasured
    assert found.to_json()["link_seconds"] == found.link_seconds


def test_nothing_is_read_across_the_link_where_all_experts_fit() -> None:
    found = forecast(stored("glm-4.7-flash"), CARDS["h200"], 24 * GB)
    assert (found.link_seconds, found.plan.offloaded, found.plan.host_bytes) == (0.0, (), 0)
    assert found.most_prompt_tokens_per_second is None
    assert "host" not in found.speed()
    assert "offloaded experts" not in {row.name for row in found.weights}
