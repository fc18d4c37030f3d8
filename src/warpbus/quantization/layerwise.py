"""One decoder layer quantized for the inputs it meets, and those inputs carried on to the next.

True sequential order (as in GPTQ's code for LLaMA): a linear layer is calibrated on what the layers before it give
once they are quantized, those of the same block included. Where a method asks for the drift, the unquantized model runs
alongside, so that a layer can make up for what the inputs have become.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from warpbus.dist import SHARES, Group
from warpbus.models import DecoderLayer, ModelConfig
from warpbus.models.layers import CausalAttention, Rotary, prompt_lengths
from warpbus.quantization.calibration import Calibration
from warpbus.quantization.statistics import DRIFT, Collector, Statistics
from warpbus.quantization.stopwatch import Stopwatch

COMPARED_TOKENS = 2**17
"""Of more tokens than that the unquantized model sees about half: enough to tell where the inputs have drifted to."""

Solve = Callable[[str, Statistics], Tensor | None]
"""Called with a linear layer's name (as in `ModelConfig.linears`) and the statistics of its inputs; it replaces the
weight. What it returns are factors `[in]` that it has folded into what precedes the layer, so that the inputs are
others from now on: they are computed again, not divided, since what precedes was rounded to the dtype that it is stored
in."""


@dataclass
class States:
    """A batch on its way through the decoder.

    Attributes:
        share: the share of all tokens that the batch belongs to.
        x: what enters the next layer, `[batch, tokens, hidden]`.
        original: what enters it in the unquantized model, where that runs alongside for this batch.
        real: bool `[batch, tokens]`, false where there is padding; `None` where there is none. Padding is on the right,
            so causal attention keeps it from what is real; it only has to be left out of the statistics.
        positions: int64 `[batch, tokens]`.
        angles: the rotary cosines and sines of these positions.
        context: what each token attends to.
    """

    share: int
    x: Tensor
    original: Tensor | None
    real: Tensor | None
    positions: Tensor
    angles: tuple[Tensor, Tensor]
    context: CausalAttention = field(default_factory=CausalAttention)

    def tokens(self, x: Tensor) -> Tensor:
        """The rows `[tokens, features]` of `[batch, tokens, features]` that are no padding."""
        return x.flatten(0, 1) if self.real is None else x[self.real]


@torch.no_grad()
def embed(
    data: Calibration,
    tokens: int,
    embedding: Tensor,
    config: ModelConfig,
    group: Group,
    dtype: torch.dtype,
    *,
    drift: bool,
) -> list[States]:
    """Look this process's shares of the tokens up in the embedding, batch by batch.

    Args:
        data: all sequences.
        tokens: of a batch, at most. The batches and their shares do not depend on the number of processes.
        embedding: `[vocabulary, hidden]`, which may be a file's map: for the CPU only rows are read. A GPU gets all of
            it, which is less than the rows of many tokens.
        config: of the model.
        group: the processes.
        dtype: of the states.
        drift: whether the unquantized model is to run alongside.
    """
    rotary, embedding = Rotary(config.rope), embedding.to(group.device)
    states = []
    batches = data.batches(tokens)
    for share in group.shares():
        own = batches[len(batches) * share // SHARES : len(batches) * (share + 1) // SHARES]
        compared = 0 if not drift else len(own) if data.tokens <= COMPARED_TOKENS else -(-len(own) // 2)
        for place, batch in enumerate(own):
            positions = torch.arange(batch.ids.shape[1], device=group.device).expand(batch.ids.shape)
            x = embedding[batch.ids.to(group.device)].to(dtype)
            original = x if place < compared else None
            real = None if batch.real.all() else batch.real.to(group.device)
            prompts = None
            if config.prompt_end is not None:
                prompts = prompt_lengths(batch.ids, config.prompt_end).to(group.device)
            angles, context = rotary(positions, dtype, prompts), CausalAttention(prompts_bt=prompts)
            states.append(States(share, x, original, real, positions, angles, context))
    return states


class LayerPass:
    """A decoder layer on its way from plain to quantized, with the states that go through it.

    Args:
        layer: its weights are replaced by what `solve` makes of them.
        index: the layer's number.
        states: of this process's shares; moved past the layer by `quantize`.
        needed: the statistics that `solve` asks for.
        group: the processes that do it together.
        watch: told what takes the time.
        keep: keep the inputs of the last linear layer while it is solved, rather than compute them again.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        index: int,
        states: Sequence[States],
        needed: frozenset[str],
        *,
        group: Group,
        watch: Stopwatch,
        keep: bool = True,
    ) -> None:
        self._layer = layer
        self._index = index
        self._states = states
        self._needed = needed
        self._group = group
        self._watch = watch
        self._keep = keep
        self._unquantized = copy.deepcopy(layer) if DRIFT in needed else None

    @torch.no_grad()
    def quantize(self, solve: Solve) -> None:
        """Have `solve` quantize the linear layers in their order, then move the states past the layer."""
        layer, unquantized, states = self._layer, self._unquantized, self._states
        kept: list[Tensor | None] = [None] * len(states)
        originals: list[Tensor | None] = [None] * len(states)

        collector = self._collector("attention.qkv")
        for state in states:
            original = None if state.original is None else _of(unquantized).attention_norm(state.original)
            self._add(collector, state, layer.attention_norm(state.x), original)
        self._solve("attention.qkv", collector, solve)

        collector = self._collector("attention.o")
        with _left_out(layer.attention, "o"), _left_out(unquantized and unquantized.attention, "o"):
            for place, state in enumerate(states):
                kept[place] = self._attended(layer, state.x, state)
                if state.original is not None:
                    originals[place] = self._attended(_of(unquantized), state.original, state)
                self._add(collector, state, kept[place], originals[place])
        changed = self._solve("attention.o", collector, solve)

        widening = layer.attention.config.linears[2]
        collector = self._collector(widening)
        for place, state in enumerate(states):
            inputs = kept[place]
            if inputs is None or changed:
                with _left_out(layer.attention, "o"):
                    inputs = self._attended(layer, state.x, state)
            carried = layer.carried(state.x, layer.attention_norm)
            state.x = carried + layer.attention_output_norm(layer.attention.o(inputs))
            kept[place] = inputs = None  # given back as soon as it is used
            original = originals[place]
            if unquantized is not None and original is not None and state.original is not None:
                attended = unquantized.attention_output_norm(unquantized.attention.o(original))
                state.original = unquantized.carried(state.original, unquantized.attention_norm) + attended
                original = unquantized.mlp_norm(state.original)
            originals[place] = None
            self._add(collector, state, layer.mlp_norm(state.x), original)
        self._solve(widening, collector, solve)

        collector = self._collector("mlp.down")
        for place, state in enumerate(states):
            inner, original = self._inner(layer, state.x), None
            if unquantized is not None and state.original is not None:
                original = self._inner(unquantized, state.original)
                moved = unquantized.mlp_output_norm(unquantized.mlp.down(original))
                state.original = unquantized.carried(state.original, unquantized.mlp_norm) + moved
            kept[place] = inner if self._keep else None
            self._add(collector, state, inner, original)
            del inner, original
        changed = self._solve("mlp.down", collector, solve)

        for place, state in enumerate(states):
            inputs = kept[place]
            if inputs is None or changed:
                inputs = self._inner(layer, state.x)
            kept[place] = None
            state.x = layer.carried(state.x, layer.mlp_norm) + layer.mlp_output_norm(layer.mlp.down(inputs))
        self._watch.lap("forward")

    @torch.no_grad()
    def skip(self, quantize: Callable[[], None]) -> None:
        """Let `quantize` put the weights of an earlier run into the layer, and move the states past it."""
        if self._unquantized is not None:
            for state in self._states:
                if state.original is not None:
                    state.original = self._moved(self._unquantized, state.original, state)
        quantize()
        for state in self._states:
            state.x = self._moved(self._layer, state.x, state)
        self._watch.lap("forward")

    def _collector(self, linear: str) -> Collector:
        columns = cast(nn.Linear, self._layer.get_submodule(linear)).in_features
        return Collector(columns, self._needed, group=self._group, name=f"layers.{self._index}.{linear}")

    def _add(self, collector: Collector, state: States, x: Tensor | None, original: Tensor | None) -> None:
        assert x is not None
        self._watch.lap("forward")
        collector.add(state.tokens(x), None if original is None else state.tokens(original), share=state.share)
        self._watch.lap("statistics")

    def _solve(self, linear: str, collector: Collector, solve: Solve) -> bool:
        """Have a linear layer quantized; gives whether its inputs are others now."""
        statistics = collector.total()
        self._watch.lap("communication")
        return solve(linear, statistics) is not None

    def _attended(self, layer: DecoderLayer, x: Tensor, state: States) -> Tensor:
        return layer.attention(layer.attention_norm(x), self._index, state.positions, state.angles, state.context)

    def _inner(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        """What enters the last linear layer."""
        with _left_out(layer.mlp, "down"):
            return layer.mlp(layer.mlp_norm(x))

    def _moved(self, layer: DecoderLayer, x: Tensor, state: States) -> Tensor:
        return layer(x, self._index, state.positions, state.angles, state.context)


def _of(layer: DecoderLayer | None) -> DecoderLayer:
    assert layer is not None
    return layer


@contextmanager
def _left_out(module: nn.Module | None, name: str) -> Iterator[None]:
    """Within it, `module` gives what would enter its part `name`."""
    if module is None:
        yield
        return
    part = getattr(module, name)
    setattr(module, name, nn.Identity())
    try:
        yield
    finally:
        setattr(module, name, part)
