"""A small random model of a GPU's shape, and what it says alone to what an engine answers."""

from dataclasses import replace

import torch
from dense_configs import with_traits
from torch import nn

from warpbus.models import SHAPES, random_model
from warpbus.models.adapters import Lora, LowRank
from warpbus.models.layer_spec import MLPSpec, MoESpec, RouterSpec
from warpbus.models.layers import QuantizedLinear
from warpbus.qtensor import Scheme

GPU = torch.device("cuda", 0)
W4 = Scheme.parse("w4a16-g32")
SMALL = with_traits(
    SHAPES["chatglm2-6b"], vocab_size=1000, hidden_size=256, num_layers=3, num_heads=8, head_dim=64, ffn_size=352
)
SMALL = replace(SMALL, rope=replace(SMALL.rope, rotary_dim=32), max_context=2048)


def with_experts(router, *, shared=True, dense=1):
    first = SMALL.layers[0]
    experts = replace(first, mlp=MoESpec(router, MLPSpec(96), MLPSpec(96) if shared else None))
    return replace(SMALL, layers=(first,) * dense + (experts,) * 2)


GLM = with_experts(RouterSpec(9, 3, "sigmoid", scale=1.8, groups=3, top_groups=2, bias=True))
QWEN = with_experts(RouterSpec(16, 4, "softmax"), shared=False, dense=0)
PROMPTS = [list(range(5, 75)), [20, 21], list(range(100, 133)), list(range(300, 309))]
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}  # of scores that spread by about 1


def model_of(config=SMALL, scheme=W4, dtype=torch.float16, **options):
    """A random model whose scores rounding hardly moves, and a wrong block of the cache does.

    As it is drawn, its embeddings are as small as what rounding leaves of attention, whose weights are nearly all on
    one token: here and there 16 bits move a score by 0.3. (On the CPU, of 900 positions of three such models: float16
    by at most 0.31 against 0.008 of these, a cache of int8 by 2.3 against 0.10.)
    """
    model = random_model(config, scheme, GPU, dtype, **options)
    if not config.tie_embeddings:
        model.embedding.weight.mul_(50)
    for layer in model.layers:
        layer.attention_norm.weight.mul_(0.5)
    return model


def random_lora(model, name, rank, *, only=""):
    """A LoRA of a model that changes what it prefers, on the CPU in float32: of all linears, or of some by their names.

    It moves scores by 0.25 to 0.5; rounding then moves them by as much as without it (on the CPU by at most 0.007 in
    float16, against 0.005).
    """
    draw = torch.Generator().manual_seed(sum(name.encode()))
    parts = {}
    for linear, module in model.named_modules():
        if linear.startswith("layers.") and only in linear and isinstance(module, nn.Linear | QuantizedLinear):
            a = torch.randn(rank, module.in_features, generator=draw) / module.in_features**0.5
            parts[linear] = LowRank(a, torch.randn(module.out_features, rank, generator=draw) * 0.1)
    return Lora(name, parts)


class ByHand(nn.Module):
    """What a LoRA is by its definition, beside a linear of any kind."""

    def __init__(self, linear, low, dtype):
        super().__init__()
        self.linear = linear
        self.a, self.b = low.a.to(GPU, dtype), low.b.to(GPU, dtype)

    def forward(self, x):
        return self.linear(x) + (x @ self.a.T) @ self.b.T


def put_into(model, lora):
    """Make of a model what a LoRA makes of it."""
    for name, low in lora.parts.items():
        path, _, leaf = name.rpartition(".")
        linear = model.get_submodule(name)
        setattr(model.get_submodule(path), leaf, ByHand(linear, low, model.final_norm.weight.dtype))
    return model


@torch.no_grad()
def plain_scores(model, prompt, answer):
    """Of each token of an answer, by one pass over all of it, without a cache."""
    return model(torch.tensor([[*prompt, *answer[:-1]]], device=GPU))[0, len(prompt) - 1 :].float()


def assert_best(model, prompt, answer, tolerance=TOLERANCES[torch.float16]):
    """Each token of the answer is the likeliest one, but for rounding."""
    scores = plain_scores(model, prompt, answer)
    assert scores.isfinite().all(), "the model by itself gives NaN or infinity"
    chosen = scores.gather(1, torch.tensor(answer, device=GPU)[:, None])[:, 0]
    below = scores.amax(-1) - chosen
    worst, wrong = int(below.argmax()), (below > tolerance).nonzero()[:, 0].tolist()
    # One here and there is rounding; a run of them from some place on is something that was computed wrongly.
    assert not wrong, (
        f"prompt of {len(prompt)} tokens {prompt[:5]}...: {len(wrong)} of {len(answer)} tokens are more than "
        f"{tolerance} below the best, at {wrong[:12]}; the worst is number {worst}, token {answer[worst]}, "
        f"{below[worst]:.4f} below {int(scores[worst].argmax())}"
    )


def finish(engine, requests=(), most=20_000):
    """Add requests and answer all there are."""
    for each in requests:
        engine.add(each)
    steps = 0
    while engine.has_work and steps < most:
        engine.step()
        steps += 1
    stats = engine.stats()
    assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)
