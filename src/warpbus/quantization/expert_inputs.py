"""The calibration tokens of a mixture of experts: which expert gets which, and the inputs of the experts' matrices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor

from warpbus.dist import Group
from warpbus.models import DecoderLayer
from warpbus.models.layers import MLP, MoE
from warpbus.quantization.report import FALLBACK_TOKENS, LEAST_TOKENS
from warpbus.quantization.states import ROUTED_TOKENS, RoutedTokens, States, routed

_ROWS = 2**15
"""Rows of several experts that are gathered and normalized together, at most: fewer and larger kernels on a GPU."""


@dataclass(frozen=True)
class ExpertInput:
    """Inputs of a stage of an expert.

    Attributes:
        share: the share of all tokens that these belong to.
        stage: the number of the stage among those that were asked for.
        x: `[n, features]`.
        original: those of the first tokens in the unquantized layer, `[m, features]`; None if it is not computed.
    """

    share: int
    stage: int
    x: Tensor
    original: Tensor | None


@dataclass(frozen=True)
class _Rows:
    """Tokens of one expert.

    Attributes:
        stage: see `ExpertInput`.
        tokens: int64 `[n]`.
        compared: how many of them, the first ones, the unquantized model sees.
        roots: of the tokens' weights, float32 `[n, 1]`; None if all count alike.
    """

    stage: int
    tokens: Tensor
    compared: int
    roots: Tensor | None = None


@dataclass(frozen=True)
class ExpertInputs:
    """The tokens of this process in a mixture of experts.

    The tokens that the router sends to an expert in the layer are also those of the expert in the unquantized one.

    Attributes:
        layer: the layer, which is being quantized.
        unquantized: the same as it was; None if it is not needed.
        tokens: those of neighbouring batches together.
        counts: of each of these, for each expert the tokens, and those of them that the unquantized model sees.
        routed: the tokens of all processes for each expert.
        every: of all tokens, one in so many stands for all where an expert gets too few.
    """

    layer: DecoderLayer
    unquantized: DecoderLayer | None
    tokens: list[RoutedTokens]
    counts: list[list[list[int]]]
    routed: list[int]
    every: int

    @classmethod
    def route(
        cls, layer: DecoderLayer, unquantized: DecoderLayer | None, states: Sequence[States], group: Group
    ) -> Self:
        """Route the tokens of all processes."""
        assert isinstance(layer.mlp, MoE)
        tokens = routed(states, layer.route, ROUTED_TOKENS[group.device.type])
        # A process without tokens has counts of zero.
        router = layer.mlp.router.spec
        none = torch.zeros(2, router.experts, dtype=torch.int64, device=group.device)
        counts = torch.stack([none, *(each.counts() for each in tokens)])
        everywhere = group.sum(counts[:, 0].sum(0)).tolist()
        every = -(-(sum(everywhere) // router.top_k) // FALLBACK_TOKENS)
        return cls(layer, unquantized, tokens, counts[1:].tolist(), everywhere, every)

    def of(self, stages: Sequence[str], *, drift: bool) -> Iterator[list[ExpertInput]]:
        """The inputs of stages of experts, such as `mlp.experts.3.inner`, all of one kind; those of several experts at
        a time, and shares in rising order.

        They are those of the tokens that are routed to an expert or, if these are fewer than `LEAST_TOKENS`, of
        `FALLBACK_TOKENS` of all tokens, each weighted by the router's score.

        Args:
            stages: of the layer.
            drift: also give the inputs in the unquantized layer.
        """
        for tokens, counts in zip(self.tokens, self.counts, strict=True):
            for rows in _batches(self._rows(stages, tokens, counts)):
                found = self._entering(self.layer, stages, tokens.x, rows, [len(each.tokens) for each in rows])
                originals: Sequence[Tensor | None] = [None] * len(rows)
                if drift and self.unquantized is not None and tokens.original is not None:
                    compared = [each.compared for each in rows]
                    originals = self._entering(self.unquantized, stages, tokens.original, rows, compared)
                yield [
                    ExpertInput(tokens.share, each.stage, x, original)
                    for each, x, original in zip(rows, found, originals, strict=True)
                ]

    def move(self) -> None:
        """Put what leaves the sublayer in the place of what entered it, in the layer and in the unquantized one.

        On a GPU this arranges the experts of both for the kernels: no expert can be replaced afterwards.
        """
        for layer in (self.layer, self.unquantized):
            if layer is not None and isinstance(layer.mlp, MoE):
                layer.mlp.stack()
        while self.tokens:
            each = self.tokens.pop(0)  # its memory is free afterwards
            original = each.original
            if self.unquantized is not None and original is not None:
                original = self.unquantized.feed_forward(original)
            each.move(self.layer.feed_forward(each.x), original)

    def _rows(self, stages: Sequence[str], tokens: RoutedTokens, counts: list[list[int]]) -> Iterator[_Rows]:
        """The tokens of the experts, expert by expert."""
        here, seen = counts
        for index, stage in enumerate(stages):
            expert = self.layer.spec.reading(stage)[0].expert
            assert expert is not None
            if self.routed[expert] < LEAST_TOKENS:
                own, weights = tokens.weighted(expert, self.every)
                compared = 0 if tokens.original is None else int((own < len(tokens.original)).sum())
                yield _Rows(index, own, compared, weights.sqrt())  # of the weight of a product x x^T
            elif here[expert]:
                begin = sum(here[:expert])
                yield _Rows(index, tokens.order[begin : begin + here[expert]], seen[expert])

    def _entering(
        self, layer: DecoderLayer, stages: Sequence[str], x: Tensor, rows: Sequence[_Rows], counts: Sequence[int]
    ) -> list[Tensor]:
        """What enters the stages of some experts: the inputs of the first tokens of each, as many as `counts`."""
        own = [each.tokens[:count] for each, count in zip(rows, counts, strict=True)]
        inputs = layer.mlp_norm(x[_joined(own)])
        branches, _, kinds = zip(*(stages[each.stage].rpartition(".") for each in rows), strict=True)
        if kinds[0] == "inner":
            experts = [cast(MLP, layer.get_submodule(branch)) for branch in branches]
            wide = [expert.widen(part) for expert, part in zip(experts, inputs.split(list(counts)), strict=True)]
            inputs = experts[0].activate(_joined(wide))
        parts = inputs.split(list(counts))
        roots = [None if each.roots is None else each.roots[:count] for each, count in zip(rows, counts, strict=True)]
        return [part if root is None else part * root for part, root in zip(parts, roots, strict=True)]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _batches(rows: Iterator[_Rows]) -> Iterator[list[_Rows]]:
    """Those of several experts together, up to `_ROWS` tokens."""
    batch: list[_Rows] = []
    for each in rows:
        if batch and sum(len(other.tokens) for other in (*batch, each)) > _ROWS:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch
