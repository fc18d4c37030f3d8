"""One decoder layer quantized for the inputs it meets, and those inputs carried on to the next.

True sequential order (as in GPTQ's code for LLaMA): a linear layer is calibrated on what the layers before it give
once they are quantized, those of the same block included. Where a method asks for the drift, the unquantized model runs
alongside, so that a layer can make up for what the inputs have become.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from warpbus.dist import SHARES, Group
from warpbus.models import DecoderLayer, ModelConfig
from warpbus.models.layer_spec import stages_by_sublayer
from warpbus.models.layers import CausalAttention, Rotary, prompt_lengths
from warpbus.quantization.calibration import Calibration
from warpbus.quantization.statistics import DRIFT, Collector, Statistics
from warpbus.quantization.stopwatch import Stopwatch

COMPARED_TOKENS = 2**17
"""Of more tokens than that the unquantized model sees about half: enough to tell where the inputs have drifted to."""

Solve = Callable[[str, Statistics], Tensor | None]
"""Called with a linear layer's name (`MatrixSpec.name`) and the statistics of its inputs; it replaces the
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
        """Have `solve` quantize the linear layers in their order, then move the states past the layer.

        Each sublayer is computed once, but for its norm: `solve` sees the inputs of a stage's matrices, and the last
        stage's inputs are kept until its matrix is quantized. They are computed again where factors were folded into
        what precedes it, or where there is no room for them.
        """
        for sublayer, stages in stages_by_sublayer(self._layer.spec):
            *earlier, last = stages
            for stage in earlier:
                self._calibrate(stage, solve)
            self._finish(sublayer, last, solve)
        self._watch.lap("forward")

    def _calibrate(self, stage: str, solve: Solve) -> None:
        """Have the matrices that read a stage quantized."""
        collector = self._collector(stage)
        for state in self._states:
            original = None
            if self._unquantized is not None and state.original is not None:
                original = self._entering(self._unquantized, stage, state.original, state)
            self._add(collector, state, self._entering(self._layer, stage, state.x, state), original)
        self._solve(stage, collector, solve)

    def _finish(self, sublayer: str, stage: str, solve: Solve) -> None:
        """The same for the last stage of a sublayer; then the states are moved past the sublayer."""
        layer, unquantized = self._layer, self._unquantized
        # Attention takes longest to compute again, and its output is no larger than the states.
        keep = self._keep or sublayer == "attention"
        kept: list[Tensor | None] = []
        collector = self._collector(stage)
        for state in self._states:
            inputs, original = self._entering(layer, stage, state.x, state), None
            if unquantized is not None and state.original is not None:
                original = self._entering(unquantized, stage, state.original, state)
                state.original = unquantized.leave(sublayer, state.original, original)
            kept.append(inputs if keep else None)
            self._add(collector, state, inputs, original)
            del inputs, original
        changed = self._solve(stage, collector, solve)
        for index, state in enumerate(self._states):
            found, kept[index] = kept[index], None  # given back as soon as it is used
            if found is None or changed:
                found = self._entering(layer, stage, state.x, state)
            state.x = layer.leave(sublayer, state.x, found)

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

    def _collector(self, stage: str) -> Collector:
        readers = self._layer.spec.reading(stage)
        name = f"layers.{self._index}.{readers[0].name}"
        return Collector(readers[0].columns.length, self._needed, group=self._group, name=name)

    def _add(self, collector: Collector, state: States, x: Tensor, original: Tensor | None) -> None:
        self._watch.lap("forward")
        collector.add(state.tokens(x), None if original is None else state.tokens(original), share=state.share)
        self._watch.lap("statistics")

    def _solve(self, stage: str, collector: Collector, solve: Solve) -> bool:
        """Have the matrices that read a stage quantized; gives whether their inputs are others now."""
        statistics = collector.total()
        self._watch.lap("communication")
        changes = [solve(matrix.name, statistics) for matrix in self._layer.spec.reading(stage)]
        return any(change is not None for change in changes)

    def _entering(self, layer: DecoderLayer, stage: str, x: Tensor, state: States) -> Tensor:
        return layer.enter(stage, x, self._index, state.positions, state.angles, state.context)

    def _moved(self, layer: DecoderLayer, x: Tensor, state: States) -> Tensor:
        return layer(x, self._index, state.positions, state.angles, state.context)
