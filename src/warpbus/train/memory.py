"""What a training step takes of each GPU's memory, reckoned before anything is made."""

from collections.abc import Collection
from dataclasses import asdict, dataclass

from warpbus.models.config import ModelConfig
from warpbus.qtensor import Scheme
from warpbus.train.loss import piece_rows

_FLOAT, _HALF = 4, 2


@dataclass(frozen=True)
class Estimate:
    """Bytes on one GPU, by what they are for.

    Attributes:
        weights: of the model, and of what is trained beside it.
        gradients: of all that is trained.
        optimizer: AdamW's two moments.
        casts: copies of float32 weights in 16 bits, from the forward to the backward pass.
        activations: what the layers keep for the backward pass, and what they need in between.
        scores: those of a piece of tokens, and the gradients of hidden states and head.
    """

    weights: int
    gradients: int
    optimizer: int
    casts: int
    activations: int
    scores: int

    @property
    def total(self) -> int:
        """Of all parts."""
        return sum(asdict(self).values())


def training_memory(
    config: ModelConfig,
    *,
    method: str = "full",
    dtype: str = "bfloat16",
    rows: int,
    length: int,
    world: int = 1,
    sharding: str = "ddp",
    recompute: bool = False,
    fp8: bool = False,
    quantize: Scheme | None = None,
    rank: int = 8,
    targets: Collection[str] = (),
    prefix_tokens: int = 0,
) -> Estimate:
    """The most that a step holds on each of `world` GPUs.

    Args:
        config: the model's shape.
        method: "full", "lora" or "ptuning".
        dtype: "bfloat16" or "float32": of activations, and of weights that are not trained.
        rows, length: of one forward pass on one GPU.
        world, sharding: GPUs, which with "fsdp" share weights, gradients and optimizer, with "ddp" have all of it each.
        recompute: of each layer its input alone is kept.
        fp8: linears are computed in fp8.
        quantize: the scheme of the frozen linears.
        rank, targets: of LoRA; by default all linears of a layer.
        prefix_tokens: of P-Tuning.
    """
    half = _HALF if dtype == "bfloat16" else _FLOAT
    linears = linear_shapes(config)
    trained = trained_parameters(config, method, rank, targets, prefix_tokens)
    if method == "full":
        weights = _FLOAT * config.num_parameters
        casts = (half if half != _FLOAT else 0) * config.num_layers * sum(n * k for n, k in linears.values())
    else:
        matrices = sum(n * k for n, k in linears.values()) * config.num_layers
        rest = config.num_parameters - matrices
        per_weight = float(half) if quantize is None else quantize.bits_per_weight(config.hidden_size) / 8
        if fp8 and quantize is None:
            per_weight = 2.0
        weights = int(matrices * per_weight) + half * rest + _FLOAT * trained
        casts = 0
    share = world if sharding == "fsdp" else 1
    tokens = rows * length
    kept = _kept_by_layer(config, tokens, half, method, rank)
    inputs = config.num_layers * tokens * config.hidden_size * half
    activations = inputs + kept if recompute else config.num_layers * kept
    return Estimate(
        weights=weights // share,
        gradients=_FLOAT * trained // share,
        optimizer=2 * _FLOAT * trained // share,
        casts=casts,
        activations=activations,
        scores=_scores(config, tokens, half, method),
    )


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """`(out, in)` of a layer's linears by name."""
    hidden = config.hidden_size
    widening = {"mlp.gate_up": 2 * config.ffn_size} if config.gated else {"mlp.up": config.ffn_size}
    return {
        "attention.qkv": (sum(config.qkv_rows), hidden),
        "attention.o": (hidden, config.num_heads * config.head_dim),
        **{name: (rows, hidden) for name, rows in widening.items()},
        "mlp.down": (hidden, config.ffn_size),
    }


def trained_parameters(
    config: ModelConfig, method: str, rank: int = 0, targets: Collection[str] = (), prefix_tokens: int = 0
) -> int:
    """How many numbers a method trains."""
    if method == "full":
        return config.num_parameters
    if method == "lora":
        shapes = linear_shapes(config)
        return config.num_layers * sum(rank * sum(shapes[name]) for name in targets or shapes)
    return prefix_tokens * config.num_layers * 2 * config.num_kv_heads * config.head_dim


def _kept_by_layer(config: ModelConfig, tokens: int, half: int, method: str, rank: int) -> int:
    heads = config.num_heads * config.head_dim
    width = 5 * config.hidden_size + 2 * sum(config.qkv_rows) + heads + 4 * config.ffn_size
    return tokens * half * (width + (4 * rank if method == "lora" else 0))


def _scores(config: ModelConfig, tokens: int, half: int, method: str) -> int:
    piece = min(tokens, piece_rows(config.vocab_size))
    head = config.vocab_size * config.hidden_size * (half + _FLOAT) if method == "full" else 0
    return piece * config.vocab_size * (half + _FLOAT) + head + tokens * config.hidden_size * half
