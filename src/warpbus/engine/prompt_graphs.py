"""Piecewise CUDA graphs of steps with prompts: of all but attention, where kernels take longer to launch than to run.

What attention launches depends on the lengths of the chunks and of what is cached before them. The rest of a layer
depends only on the number of tokens: between the attention of two layers it is one graph, for a number of tokens that
is rounded up. A layer of a mixture of experts takes some thirty launches, of which attention is a third.
"""

from abc import abstractmethod
from collections import abc
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.capture import Graph, GraphMemory, PiecewiseCapture, capture_piecewise
from warpbus.cuda.dlpack import alias
from warpbus.cuda.green import multiprocessors
from warpbus.cuda.jit import architecture
from warpbus.engine.attention import PrefillAttention
from warpbus.engine.expert_placement import offloading_layers
from warpbus.engine.step_memory import activation_bytes
from warpbus.kernels.ops import workspace
from warpbus.models import Decoder, LatentAttentionSpec, ModelConfig, MoESpec
from warpbus.models.cost import forward_flop
from warpbus.models.layers import FusedAttention, IndexFeatures, LatentAttention

_MOST_ROWS = 4096
_SHARE = 0.01  # of the GPU's memory, for what lies between the kernels of these graphs
_DISTANCES = ((64, 32), (256, 64), (1024, 128), (2048, 256))  # (rows up to, distance of buckets); beyond 512

# Measured: what a layer takes to be launched kernel by kernel, seconds; and the FLOP per second and multiprocessor of
# the products of a layer, with wgmma and without.
_LAUNCHING, _LAUNCHING_EXPERTS = 0.4e-3, 1.5e-3
_RATE_WGMMA, _RATE = 4.5e12, 1.5e12


def prompt_bucket(rows: int) -> int:
    """The number of rows of the graphs that run `rows` rows."""
    step = next((step for most, step in _DISTANCES if rows <= most), 512)
    return -(-rows // step) * step


def graph_rows(model: Decoder, device: torch.device) -> int:
    """The most tokens of a step that takes longer to be launched than to run, and for whose graphs there is memory; 0
    where graphs cannot be used."""
    # Exchanges between GPUs have not run in these graphs yet.
    several = model.group is not None and model.group.world > 1
    if device.type != "cuda" or several or model.waits_for_gpu or offloading_layers(model):
        return 0
    config = model.config
    launching = sum(_LAUNCHING_EXPERTS if isinstance(layer.mlp, MoESpec) else _LAUNCHING for layer in config.layers)
    rate = _RATE_WGMMA if capabilities(architecture(device)).wgmma else _RATE
    by_time = int(launching * rate * multiprocessors(device) / forward_flop(config))
    memory = torch.cuda.get_device_properties(device).total_memory
    by_memory = int(_SHARE * memory / activation_bytes(config, model.final_norm.weight.dtype, 1))
    return min(_MOST_ROWS, by_time, by_memory)


class PromptGraphs:
    """The graphs of a model, captured at the first step with so many rows.

    Args:
        model: in eval mode.
        most: rows; a step of more is not for graphs.
        memory, counters: as `capture_piecewise` and `workspace.use_counters` take them, shared with graphs that are
            replayed before or after these.
        dtype: of the activations.
    """

    def __init__(self, model: Decoder, most: int, memory: GraphMemory, dtype: torch.dtype, counters: Tensor) -> None:
        self.most = most
        self._model = model
        self._counters = counters
        self._captured: dict[int, _PiecewiseGraphs] = {}
        self._memory = memory
        size = model.config.hidden_size
        self._x = torch.zeros(1, prompt_bucket(most), size, dtype=dtype, device=memory.stream.device)

    def transform(self, x_btd: Tensor, context: PrefillAttention) -> Tensor:
        """As `Decoder.transform`, for up to `most` tokens: `[1, tokens, hidden]`."""
        rows = x_btd.shape[1]
        padded = prompt_bucket(rows)
        x = self._x[:, :padded]
        x[:, :rows].copy_(x_btd)
        captured = self._captured.get(padded)
        if captured is None:
            # Kernels are compiled and loaded at their first launch, which a capture does not allow.
            hidden = self._model.transform(x, None, _PaddedAttention(context, rows, self._model.config))
            hidden = hidden[:, :rows].clone()
            self._captured[padded] = self._capture(x)
            return hidden
        for graph, attention in zip(captured.graphs, captured.attentions, strict=False):
            graph.replay()
            attention.run(context, rows)
        captured.graphs[-1].replay()
        return captured.hidden[:, :rows].clone()  # the next graph overwrites it

    def _capture(self, x: Tensor) -> "_PiecewiseGraphs":
        with capture_piecewise(self._memory) as capture, workspace.use_counters(self._counters):
            between = _BetweenGraphs(capture, self._model.config)
            hidden = alias(self._model.transform(x, None, between))
        return _PiecewiseGraphs(capture.graphs, between.attentions, hidden)


@dataclass(frozen=True)
class _AttentionCall:
    """The attention of a layer: what `FusedAttention` is called with, all rows of the graphs, and where results go.

    Attributes:
        projected: queries, keys and values, or queries and latents, `[1, rows, ...]`.
        results: `[1, rows, features]`.
        attention, index: of latent attention.
    """

    layer: int
    projected: tuple[Tensor, ...]
    results: Tensor
    attention: LatentAttention | None = None
    index: IndexFeatures | None = None

    def aliased(self) -> "_AttentionCall":
        """The same without keeping the memory: kernels that are captured later may use it again."""
        index = self.index
        if index is not None:
            index = IndexFeatures(alias(index.q), alias(index.k), alias(index.weights))
        return replace(self, projected=tuple(map(alias, self.projected)), results=alias(self.results), index=index)

    def run(self, context: PrefillAttention, rows: int) -> None:
        """Attend for the first `rows` rows. Those beyond get zeros."""
        projected = [each[:, :rows] for each in self.projected]
        results = self.results[:, :rows]
        context.results = results
        if self.attention is None:
            attended = context.attend_fused(self.layer, *projected)
        else:
            index = self.index
            if index is not None:
                index = IndexFeatures(index.q[:, :rows], index.k[:, :rows], index.weights[:, :rows])
            attended = context.attend_latent(self.layer, self.attention, projected[0], projected[1], index)
        context.results = None
        if attended.data_ptr() != results.data_ptr():
            results.copy_(attended)
        if rows < self.results.shape[1]:
            self.results[:, rows:].zero_()


@dataclass(frozen=True)
class _PiecewiseGraphs:
    """The graphs for a number of rows, the attention after each but the last, and the output `[1, rows, hidden]`."""

    graphs: abc.Sequence[Graph]
    attentions: abc.Sequence[_AttentionCall]
    hidden: Tensor


class _Collecting(FusedAttention):
    """Makes an `_AttentionCall` of each layer's call and returns what `_attend` makes of it."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def attend_fused(self, layer: int, qkv_btr: Tensor) -> Tensor:
        spec = self._config.attention
        assert not isinstance(spec, LatentAttentionSpec)
        results = qkv_btr.new_empty(*qkv_btr.shape[:2], spec.num_heads * spec.head_dim)
        return self._attend(_AttentionCall(layer, (qkv_btr,), results))

    def attend_latent(
        self,
        layer: int,
        attention: LatentAttention,
        q_bthd: Tensor,
        latent_btd: Tensor,
        index: IndexFeatures | None,
    ) -> Tensor:
        spec = attention.spec
        results = q_bthd.new_empty(*q_bthd.shape[:2], spec.num_heads * spec.value_dim)
        return self._attend(_AttentionCall(layer, (q_bthd, latent_btd), results, attention, index))

    @abstractmethod
    def _attend(self, attention: _AttentionCall) -> Tensor:
        """The results, or where they will be."""


class _PaddedAttention(_Collecting):
    """Attends with a context for the first rows."""

    def __init__(self, context: PrefillAttention, rows: int, config: ModelConfig) -> None:
        super().__init__(config)
        self._context = context
        self._rows = rows

    def _attend(self, attention: _AttentionCall) -> Tensor:
        attention.run(self._context, self._rows)
        return attention.results


class _BetweenGraphs(_Collecting):
    """Ends a graph where a layer attends, and begins the next one.

    Attributes:
        attentions: of the layers.
    """

    def __init__(self, capture: PiecewiseCapture, config: ModelConfig) -> None:
        super().__init__(config)
        self.attentions: list[_AttentionCall] = []
        self._capture = capture

    def _attend(self, attention: _AttentionCall) -> Tensor:
        self._capture.end()
        self.attentions.append(attention.aliased())
        self._capture.begin()
        return attention.results
