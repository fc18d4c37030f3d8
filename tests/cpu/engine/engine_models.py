"""Small random models of each family, and what a model alone says to what an engine answers."""

import copy
from dataclasses import replace

import torch
from dense_configs import with_traits
from torch import nn

from warpbus.engine.blocks import BLOCK
from warpbus.models import SHAPES, IndexerSpec, LatentAttentionSpec
from warpbus.models.adapters import Lora, LowRank
from warpbus.models.layers import QuantizedLinear

SMALL = with_traits(SHAPES["chatglm2-6b"], vocab_size=300, hidden_size=64, num_layers=2, num_heads=4, head_dim=16)
SMALL = with_traits(SMALL, num_kv_heads=2, ffn_size=128, max_context=512, rope=replace(SMALL.rope, rotary_dim=8))
_LATENT = LatentAttentionSpec(4, query_rank=32, kv_rank=64, nope_dim=12, rope_dim=8, value_dim=16, norm_eps=1e-6)
LATENT = replace(SMALL, layers=tuple(replace(layer, attention=_LATENT) for layer in SMALL.layers))
"""Multi-head latent attention."""

_INDEXER = IndexerSpec(heads=5, head_dim=16, top_k=8)
_SPARSE = [replace(_LATENT, indexer=replace(_INDEXER, shared=shared)) for shared in (False, True)]
SPARSE = replace(
    SMALL, layers=tuple(replace(layer, attention=own) for layer, own in zip(SMALL.layers, _SPARSE, strict=True))
)
"""The same with an indexer, whose selection the second layer shares."""

FAMILIES = {
    "glm": SMALL,
    "latent": LATENT,
    "sparse": SPARSE,
    "glm-0414": with_traits(SMALL, output_norms=True),
    "llama": with_traits(SMALL, qkv_bias=False, rope=replace(SMALL.rope, rotary_dim=16, interleaved=False)),
    "qwen3": with_traits(SMALL, qk_norm=True, tie_embeddings=True, num_kv_heads=4),
}
PROMPTS = [[1, 2, 3], [40], [7 * at % 300 for at in range(75)], list(range(50, 50 + BLOCK)), list(range(65))]


def linears(model):
    """The linears of a model's layers, by name."""
    found = model.named_modules()
    return {n: m for n, m in found if n.startswith("layers.") and isinstance(m, nn.Linear | QuantizedLinear)}


def random_lora(model, name, rank, *, only="", scale=0.3):
    """A LoRA of a model that changes what it prefers: of all linears, or of those whose names have `only` in them."""
    draw = torch.Generator().manual_seed(sum(name.encode()))
    parts = {}
    for linear, module in linears(model).items():
        if only in linear:
            a = torch.randn(rank, module.in_features, generator=draw) / module.in_features**0.5
            b = torch.randn(module.out_features, rank, generator=draw) * scale
            parts[linear] = LowRank(a, b)
    return Lora(name, parts)


class ByHand(nn.Module):
    """What a LoRA is by its definition."""

    def __init__(self, linear, low):
        super().__init__()
        self.linear, self.low = linear, low

    def forward(self, x):
        return self.linear(x) + (x @ self.low.a.T) @ self.low.b.T


@torch.no_grad()
def with_lora(model, lora):
    """A model that is what a LoRA makes of another: its matrices changed, or beside what is quantized."""
    changed = copy.deepcopy(model)
    for name, low in lora.parts.items():
        linear = changed.get_submodule(name)
        if isinstance(linear, nn.Linear):
            linear.weight += low.b @ low.a
        else:
            path, _, leaf = name.rpartition(".")
            setattr(changed.get_submodule(path), leaf, ByHand(linear, low))
    return changed


@torch.no_grad()
def plain_scores(model, prompt, answer):
    """Of each token of an answer, by one pass over all of it, without a cache."""
    return model(torch.tensor([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :]


def assert_best(model, prompt, answer):
    """Each token is the likeliest one, or so close to it that rounding decides."""
    scores = plain_scores(model, prompt, answer)
    chosen = scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert (scores.amax(-1) - chosen).max() < 1e-4


def finish(engine, requests=(), most=3000):
    """Add requests and answer all there are; the pieces of each."""
    for each in requests:
        engine.add(each)
    pieces = {}
    for _ in range(most):
        if not engine.has_work:
            break
        for sequence, piece in engine.step():
            pieces.setdefault(sequence, []).append(piece)
    assert not engine.has_work
    assert engine.stats().blocks_used == engine.stats().running == engine.stats().waiting == 0
    return pieces


class Recorder:
    """Stands for the CUDA graphs: does what one would hold, twice when it is new, the rows that fill it up included."""

    def __init__(self):
        self.keys = []
        self.dropped = 0

    def drop_adapted(self):
        self.keys = [key for key in self.keys if not key[3]]
        self.dropped += 1

    def run(self, key, work):
        if key not in self.keys:
            work()
        self.keys.append(key)
        work()


def as_on_a_gpu(engine):
    """Steps go ahead of what is read, and are those of graphs."""
    engine._instance.step._graphs = Recorder()
    engine._pipeline.instance = replace(engine._instance, on_gpu=True)
    return engine
