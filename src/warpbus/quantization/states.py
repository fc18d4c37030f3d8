"""Calibration data on its way through a decoder, batch by batch: the inputs of the next layer."""

from dataclasses import dataclass, field

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


@dataclass
class States:
    """A batch on its way through the decoder.

    Attributes:
        share: the share of all tokens that the batch belongs to.
        ids: the tokens, int64 `[batch, tokens]`, on the CPU.
        x: what enters the next layer, `[batch, tokens, hidden]`.
        original: what enters it in the unquantized model, where that runs alongside for this batch.
        real: bool `[batch, tokens]`, false where there is padding; `None` where there is none. Padding is on the right,
            so causal attention keeps it from what is real; it only has to be left out of the statistics.
        positions: int64 `[batch, tokens]`.
        angles: the rotary cosines and sines of these positions.
        context: what each token attends to.
        original_context: the same in the unquantized model, whose indexers may select other tokens.
        routing: the experts of the tokens, while they are in a mixture of experts.
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
    routing: Routing | None = None

    def tokens(self, x: Tensor) -> Tensor:
        """The rows `[tokens, features]` of `[batch, tokens, features]` that are no padding."""
        return x.flatten(0, 1) if self.real is None else x[self.real]

    def counts(self) -> Tensor:
        """The tokens per expert that are no padding, int64 `[experts]`."""
        assert self.routing is not None
        experts = self.routing.experts if self.real is None else self.routing.experts[self.real.flatten()]
        return torch.bincount(experts.flatten(), minlength=self.routing.scores.shape[1])

    def of_expert(self, expert: int) -> Tensor:
        """The numbers of the tokens that are routed to an expert, without padding, int64 `[n]`."""
        assert self.routing is not None
        chosen = (self.routing.experts == expert).any(-1)
        return (chosen if self.real is None else chosen & self.real.flatten()).nonzero()[:, 0]

    def weighted(self, expert: int) -> tuple[Tensor, Tensor]:
        """All tokens without padding, int64 `[n]`, and how much each counts for an expert, float32 `[n, 1]`.

        The weight is the router's score of the expert, divided by its mean.
        """
        assert self.routing is not None
        scores = self.routing.scores[:, expert]
        tokens = torch.arange(len(scores), device=scores.device)
        if self.real is not None:
            tokens = tokens[self.real.flatten()]
        own = scores[tokens]
        return tokens, (own / own.mean().clamp_min(torch.finfo(own.dtype).tiny))[:, None]


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
