"""Forecasts how a model runs on a GPU, without that GPU: the location of the weights and the tokens per second.

A decode step of one sequence reads the weights that its token uses and the cache, at the bandwidth of a copy. In
addition, the kernels of each layer wait for one another, which takes `LAYER_SECONDS`, independent of their size. The
constants are fitted to measured steps: docs/benchmark_results.md, "Decode steps". Without measurements there is only
the upper bound that follows from the bytes.

Offloaded experts are read over the link to the host. The number of a token's experts among them depends on the routing;
the forecast assumes that all experts are used equally often. Keeping frequently used experts on the GPU is faster.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from warpbus.cuda.cards import Card
from warpbus.engine.kv_cache import stored_dtype
from warpbus.engine.plan import MemoryPlan, Stored, end_bytes, plan_memory
from warpbus.kernels.ops.arguments import HALVES
from warpbus.models import LatentAttentionSpec, LayerSpec, MoESpec
from warpbus.models.cost import kv_cache_bytes

LAYER_SECONDS = {"dense": 17e-6, "experts": 39e-6}
"""Seconds of a decode step per layer besides reading: 16.1 and 17.5 us were measured with dense layers (ChatGLM2-6B in
4 and 16 bits on an H100), 39.5 and 38.6 us with experts (GLM-4.5-Air and Qwen3-30B-A3B in 4 bits on an H200)."""

LATENT_SECONDS = 4e-6
"""The time that multi-head latent attention adds: 42.5 us per layer were measured with GLM-4.7-Flash in 4 bits on an
H200."""

_OFFLOADED = "offloaded experts"

CONTEXT = 512
"""Tokens of the sequence whose steps are forecast."""


@dataclass(frozen=True)
class WeightsRow:
    """Weights of one kind.

    Attributes:
        name: for instance "routed experts".
        place: "GPU" or "host".
        nbytes: bytes in all layers.
        step_bytes: bytes that a decode step of one sequence reads.
    """

    name: str
    place: str
    nbytes: int
    step_bytes: int


@dataclass(frozen=True)
class Forecast:
    """A model on a card.

    Attributes:
        card: the GPU.
        plan: its memory.
        weights: by kind, in the order of the computation; weights on the host are not part of `plan`.
        read_seconds: the time in which a decode step of one sequence with `CONTEXT` tokens reads its weights and its
            cache.
        link_seconds: the part of it for offloaded experts.
        kernel_seconds: the additional time of its kernels; None if it was not measured.
        unmeasured: the reason why there is no `kernel_seconds`; empty if there is.
        gpus: the number of GPUs that share the model; all other values are those of the GPU with the most weights.
    """

    card: Card
    plan: MemoryPlan
    weights: tuple[WeightsRow, ...]
    read_seconds: float
    link_seconds: float
    kernel_seconds: float | None
    unmeasured: str
    gpus: int = 1

    @property
    def most_prompt_tokens_per_second(self) -> float | None:
        """The upper bound for a long prompt, each chunk of which reads all offloaded experts; None without offloaded
        experts."""
        if not self.plan.host_bytes:
            return None
        return self.plan.prefill_tokens * self.card.link / self.plan.host_bytes

    @property
    def most_tokens_per_second(self) -> float:
        """The upper bound for one sequence, from reading alone."""
        return 1 / self.read_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """The forecast for one sequence; None if it is unknown."""
        return None if self.kernel_seconds is None else 1 / (self.read_seconds + self.kernel_seconds)

    def speed(self) -> str:
        """The speed in one sentence."""
        read = sum(row.step_bytes for row in self.weights)
        reading = f"reading {read / 1e9:.2f} GB of weights per token takes {self.read_seconds * 1e3:.2f} ms"
        prompts = ""
        if self.most_prompt_tokens_per_second is not None:
            far = sum(row.step_bytes for row in self.weights if row.place == "host")
            reading += (
                f", {self.link_seconds * 1e3:.2f} ms of it for {far / 1e9:.2f} GB from the host at "
                f"{self.card.link / 1e9:.0f} GB/s, if experts are chosen equally often"
            )
            prompts = f"; a long prompt: at most {self.most_prompt_tokens_per_second:,.0f} tokens/s"
        if self.kernel_seconds is None:
            most = f"one sequence: at most {self.most_tokens_per_second:,.0f} tokens/s"
            return f"{most} ({reading}){prompts}; {self.unmeasured}"
        return (
            f"one sequence: about {self.tokens_per_second:,.0f} tokens/s ({reading}, the kernels "
            f"{self.kernel_seconds * 1e3:.2f} ms more){prompts}"
        )

    def to_json(self) -> dict[str, object]:
        """Plain types; sizes in bytes, times in seconds."""
        return {
            "gpu": {name: getattr(self.card, name) for name in ("name", "memory", "bandwidth", "link")},
            "gpus": self.gpus,
            "memory": self.plan.to_json(),
            "weights": [vars(row) for row in self.weights],
            "context": CONTEXT,
            "read_seconds": self.read_seconds,
            "link_seconds": self.link_seconds,
            "kernel_seconds": self.kernel_seconds,
            "tokens_per_second": self.tokens_per_second,
            "most_tokens_per_second": self.most_tokens_per_second,
            "most_prompt_tokens_per_second": self.most_prompt_tokens_per_second,
            "unmeasured": self.unmeasured or None,
        }


def forecast(
    stored: Stored,
    card: Card,
    limit: int,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int = 1,
    kv_dtype: str = "auto",
) -> Forecast:
    """The forecast for a model on a card, within `limit` bytes of its memory.

    Args:
        stored: its weights.
        max_model_len, max_num_seqs, kv_dtype: as `plan_memory`.

    Raises:
        UsageError: it does not fit; the message says what would.
    """
    plan = plan_memory(stored, limit, max_model_len=max_model_len, max_num_seqs=max_num_seqs, kv_dtype=kv_dtype)
    return forecast_plan(stored, card, plan)


def forecast_plan(stored: Stored, card: Card, plan: MemoryPlan) -> Forecast:
    """The forecast for a model on a card with a memory plan."""
    weights = tuple(_weights(stored, plan))
    cached = kv_cache_bytes(stored.config, stored.dtype, stored_dtype(stored.config, plan.kv_dtype, stored.dtype))
    far = sum(row.step_bytes for row in weights if row.place == "host")
    near = sum(row.step_bytes for row in weights) - far + min(CONTEXT, plan.context) * cached
    link = far / card.link
    unmeasured = _unmeasured(stored, card, plan)
    kernels = None
    if not unmeasured:
        kernels = sum(map(_layer_seconds, stored.config.layers))
    return Forecast(card, plan, weights, near / card.bandwidth + link, link, kernels, unmeasured, stored.gpus)


def _layer_seconds(layer: LayerSpec) -> float:
    latent = LATENT_SECONDS if isinstance(layer.attention, LatentAttentionSpec) else 0.0
    return LAYER_SECONDS["experts" if isinstance(layer.mlp, MoESpec) else "dense"] + latent


def _weights(stored: Stored, plan: MemoryPlan) -> Iterator[WeightsRow]:
    """The weights by kinds. A token looks one row of the embedding up, which counts as nothing."""
    config, sizes = stored.config, stored.sizes
    totals: dict[str, int] = {}
    steps: dict[str, float] = {}
    for name, size in sizes.items():
        layer, _, parameter = name.removeprefix("layers.").partition(".")
        if not name.startswith("layers."):
            continue
        matrix, mlp = config.matrix(name), config.layers[int(layer)].mlp
        routed = matrix is not None and matrix.expert is not None
        kind = "routed experts" if routed else "attention" if parameter.startswith("attention") else "MLPs"
        if isinstance(mlp, MoESpec) and kind == "MLPs":
            kind = "shared experts and routers"
        used = mlp.router.top_k / mlp.router.experts if routed and isinstance(mlp, MoESpec) else 1.0
        if config.is_offloaded(name, plan.offloaded):
            kind = _OFFLOADED
        totals[kind] = totals.get(kind, 0) + size
        steps[kind] = steps.get(kind, 0.0) + used * size
    ends = end_bytes(stored, plan.head, plan.embedding)
    embedding, head = ends["embedding"], ends["head"]
    yield WeightsRow("embedding", "host" if plan.embedding_on_cpu else "GPU", embedding, 0)
    for kind, total in totals.items():
        yield WeightsRow(kind, "host" if kind == _OFFLOADED else "GPU", total, round(steps[kind]))
    yield WeightsRow("head", "GPU", head, head or embedding)  # a tied head is the embedding


def _unmeasured(stored: Stored, card: Card, plan: MemoryPlan) -> str:
    """Why the time of the kernels is not known; empty if it is."""
    if not card.measured:
        return f"no steps were timed on {card.name}"
    if stored.gpus > 1:
        return "steps of GPUs that share a model are not forecast: they also exchange sums"
    if plan.offloaded:
        return "steps with offloaded experts were not timed"
    if plan.embedding_on_cpu:
        return "steps with the embedding on the host were not timed"
    if stored.dtype not in HALVES:
        return "steps in float32 were not timed"
    for index, layer in enumerate(stored.config.layers):
        if isinstance(layer.attention, LatentAttentionSpec) and layer.attention.indexer is not None:
            return "steps with sparse attention were not timed"
        names = [f"layers.{index}.{matrix.name}.weight" for matrix in layer.matrices if matrix.expert is not None]
        schemes = {stored.quantized.get(name) for name in names}
        if any(scheme is None or scheme.activations is not None for scheme in schemes) or len(schemes) > 1:
            return "these experts have no kernels and run one after another"
    if any(scheme.activations is not None for scheme in stored.quantized.values()):
        return "steps with activations of 8 bits were not timed"
    if any(scheme.is_trellis for scheme in stored.quantized.values()):
        return "steps with trellises were not timed"
    return ""
