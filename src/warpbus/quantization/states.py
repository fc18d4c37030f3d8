"""Calibration data between two layers of a decoder, batch by batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.dist import SHARES, Group
from warpbus.formats import Checkpoint
from warpbus.models import DecoderLayer, ModelConfig, PredictionLayer, tensor_map
from warpbus.models.layers import CausalAttention, Rotary, Routing, make_norm, prompt_lengths
from warpbus.quantization.calibration import Calibration

COMPARED_TOKENS = 2**17
"""Of more tokens than that the unquantized model sees about half: enough to tell where the inputs have drifted to."""

ROUTED_TOKENS = {"cpu": 0, "cuda": 2**15}
"""Tokens of a share whose experts are computed together, at most. A GPU would be idle between the products of single
batches, of which an expert gets few tokens; a CPU takes batch by batch, which needs less memory."""


@dataclass
class States:
    """The hidden states of a batch between two layers.

    Attributes:
        share: the share of all tokens that the batch belongs to.
        ids: the tokens, int64 `[batch, tokens]`, on the CPU.
        x: the inputs of the next layer, `[batch, tokens, hidden]`.
        original: its inputs in the unquantized model, if that is computed for this batch.
        real: bool `[batch, tokens]`, false where there is padding; `None` where there is none. Padding is on the right,
            so causal attention keeps it from what is real; it only has to be left out of the statistics.
        positions: int64 `[batch, tokens]`.
        angles: the rotary cosines and sines of these positions.
        context: the context that each token attends to.
        original_context: the same in the unquantized model, whose indexers may select other tokens.
    """

    share: int
    ids: Tensor
    x: Tensor
    original: Tensor | None
    real: Tensor | None
    positions: Tensor
    angles: tuple[Tensor, Tensor]
    context: CausalAttention = field(default_factory=CausalAttention)
    original_context: CausalAttention = field(default_factory=CausalAttention)

    def tokens(self, x: Tensor) -> Tensor:
        """The rows `[tokens, features]` of `[batch, tokens, features]` that are no padding."""
        return x.flatten(0, 1) if self.real is None else x[self.real]


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens of some batches of a share in a mixture of experts, sorted by the experts that they are routed to.

    Attributes:
        states: the batches; `x` and `original` of each are views of those here.
        x: the input of the sublayer, `[n, hidden]`.
        original: its input in the unquantized model, `[m, hidden]`, for the first m tokens; None if it is not
            computed.
        real: bool `[n]`, false where there is padding; None where there is none.
        routing: the experts of the tokens.
        order: the tokens of the first expert, of the second, ..., without padding, int64, each expert's in their order.
    """

    states: Sequence[States]
    x: Tensor
    original: Tensor | None
    real: Tensor | None
    routing: Routing
    order: Tensor

    @classmethod
    def of(cls, states: Sequence[States], route: Callable[[Tensor], Routing | None]) -> Self:
        """Route the tokens of batches of one share; those that the unquantized model sees come first."""
        x = _joined(states, [state.x for state in states], "x")
        compared = [state.original for state in states if state.original is not None]
        original = _joined(states[: len(compared)], compared, "original") if compared else None
        real = None
        if any(state.real is not None for state in states):
            parts = [
                torch.ones_like(state.ids, dtype=torch.bool) if state.real is None else state.real for state in states
            ]
            real = torch.cat([part.flatten().to(x.device) for part in parts])
        routing = route(x)
        assert routing is not None
        chosen = routing.experts
        if real is not None:
            chosen = chosen.masked_fill(~real[:, None], routing.scores.shape[1])  # padding goes to the end
        order = chosen.flatten().argsort(stable=True) // chosen.shape[1]
        return cls(states, x, original, real, routing, order)

    @property
    def share(self) -> int:
        """The share of all tokens that they belong to."""
        return self.states[0].share

    def counts(self) -> Tensor:
        """The tokens per expert, and those of them that the unquantized model sees: int64 `[2, experts]`."""
        compared = 0 if self.original is None else len(self.original)
        found = []
        for count in (len(self.x), compared):
            real = slice(count) if self.real is None else self.real[:count].nonzero()[:, 0]
            experts = self.routing.experts[:count][real]
            found.append(torch.bincount(experts.flatten(), minlength=self.routing.scores.shape[1]))
        return torch.stack(found)

    def weighted(self, expert: int, every: int) -> tuple[Tensor, Tensor]:
        """Each `every`-th token without padding, int64 `[n]`, and how much it counts for an expert, float32 `[n, 1]`.

        The weight is the router's score of the expert, divided by its mean.
        """
        scores = self.routing.scores[:, expert]
        tokens = torch.arange(len(scores), device=scores.device)
        if self.real is not None:
            tokens = tokens[self.real]
        tokens = tokens[::every]
        own = scores[tokens]
        return tokens, (own / own.mean().clamp_min(torch.finfo(own.dtype).tiny))[:, None]

    def move(self, x: Tensor, original: Tensor | None) -> None:
        """Put what leaves the sublayer in the place of what entered it, for each batch."""
        _split(self.states, x, "x")
        if original is not None:
            _split(self.states, original, "original")


def routed(states: Sequence[States], route: Callable[[Tensor], Routing | None], most: int) -> list[RoutedTokens]:
    """The tokens of all batches: those of neighbouring batches of one share together, up to `most` tokens."""
    groups: list[list[States]] = []
    for state in states:
        last = groups[-1] if groups else []
        if last and last[0].share == state.share and sum(other.ids.numel() for other in [*last, state]) <= most:
            last.append(state)
        else:
            groups.append([state])
    return [RoutedTokens.of(group, route) for group in groups]


def _joined(states: Sequence[States], tensors: Sequence[Tensor], name: str) -> Tensor:
    """One `[tokens, hidden]` of those of batches, which become views of it."""
    whole = tensors[0].flatten(0, 1) if len(tensors) == 1 else torch.cat([each.flatten(0, 1) for each in tensors])
    _split(states, whole, name)
    return whole


def _split(states: Sequence[States], whole: Tensor, name: str) -> None:
    begin = 0
    for state in states:
        batch, tokens = state.ids.shape
        if begin < len(whole):
            setattr(state, name, whole[begin : begin + batch * tokens].view(batch, tokens, -1))
        begin += batch * tokens


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
        for number, batch in enumerate(own):
            positions = torch.arange(batch.ids.shape[1], device=group.device).expand(batch.ids.shape)
            x = embedding[batch.ids.to(group.device)].to(dtype)
            original = x if number < compared else None
            real = None if batch.real.all() else batch.real.to(group.device)
            prompts = None
            if config.prompt_end is not None:
                prompts = prompt_lengths(batch.ids, config.prompt_end).to(group.device)
            angles = rotary(positions, dtype, prompts)
            contexts = CausalAttention(prompts_bt=prompts), CausalAttention(prompts_bt=prompts)
            states.append(States(share, batch.ids, x, original, real, positions, angles, *contexts))
    return states


@torch.no_grad()
def enter_mtp(states: list[States], layer: DecoderLayer, checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Make of the outputs of the last decoder layer the inputs of the layer of multi-token prediction.

    The input of a token has the embedding of the token after it. The last token of each sequence has none, and counts
    as padding from here on.

    Args:
        states: are changed.
        layer: that of multi-token prediction.
        checkpoint: has the embedding and the final norm.
        config: of the model.
    """
    assert isinstance(layer, PredictionLayer)
    tensors, like = tensor_map(config), layer.projection.weight
    table = checkpoint.tensor(tensors["embedding.weight"][0])
    norm = make_norm(config.norm, config.hidden_size).to(like.device, like.dtype)
    norm.weight.copy_(checkpoint.tensor(tensors["final_norm.weight"][0]))
    for state in states:
        embedded = table[state.ids.roll(-1, 1)].to(like.device, like.dtype)
        state.x = layer.joined(embedded, norm(state.x))
        if state.original is not None:
            state.original = layer.joined(embedded, norm(state.original))
        real = torch.ones(state.ids.shape, dtype=torch.bool, device=like.device) if state.real is None else state.real
        state.real = F.pad(real[:, 1:], (0, 1))
