"""Multi-token prediction (MTP): the model's own additional layer drafts tokens (DeepSeek-V3, arXiv:2412.19437).

The layer takes the hidden state of a token and the embedding of the token after it, and gives a hidden state from which
the head predicts the token after that. The embedding and the head are those of the model. Its keys and values have a
layer of their own in the KV cache: those of the pair (hidden state of token p, token p + 1) are at position p.

After each step the layer computes all rows of the step, prompts included (`predict`), so that its keys and values are
complete; rows after a rejected draft are computed again by the next step. Then it drafts (`draft`): the first token
from the hidden state of the last accepted row, further ones each from the hidden state that the one before gave. All of
it stays on the device. Knows nothing of text; `runner` calls it, and `drafting` decides how much is drafted.

A block of the prefix cache ends with an entry that depends on the first token after the block. A sequence that goes on
with another token than the one that filled the block drafts with an entry of that one: results do not depend on it.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.engine.blocks import BLOCK
from warpbus.engine.logits import to_device
from warpbus.engine.sequence import Sequence
from warpbus.engine.step import FROM_DEVICE, StepExecutor
from warpbus.errors import UsageError
from warpbus.models import ModelConfig
from warpbus.models.adapters import Lora, Prefix


def check_mtp(config: ModelConfig, adapters: abc.Sequence[Lora | Prefix]) -> None:
    """Refuse multi-token prediction for a model without its layer, and with P-Tuning prefixes, which lack that layer.

    Raises:
        UsageError: names the reason.
    """
    if config.mtp is None:
        raise UsageError(
            "speculation is mtp, but the model was loaded without its layer of multi-token prediction: load it with "
            "mtp=True, or use other speculation"
        )
    prefix = next((adapter.name for adapter in adapters if isinstance(adapter, Prefix)), None)
    if prefix is not None:
        raise UsageError(
            f"speculation is mtp, but the adapter {prefix} is a P-Tuning prefix, which has no keys and values for the "
            "layer of multi-token prediction: leave one of them out"
        )


@dataclass(frozen=True)
class ComputedRows:
    """Rows that a step has computed together.

    Attributes:
        sampled: the indices of the rows after which a token is sampled.
        following: the token after each row, or `FROM_DEVICE` where it is sampled; None: it is sampled after each.
        predict: from the tokens after the rows, int64 `[rows]`, to the hidden states of these tokens, `[rows, hidden]`.
    """

    sampled: abc.Sequence[int]
    following: abc.Sequence[int] | None
    predict: Callable[[Tensor], Tensor]


def predict(parts: abc.Sequence[ComputedRows], tokens: Tensor) -> Tensor | None:
    """Compute all rows of a step.

    Args:
        parts: of the step.
        tokens: int64 `[sampled rows]`, the sampled tokens of all parts.

    Returns:
        the hidden states of the sampled tokens, `[sampled rows, hidden]`; None if there are none.
    """
    hidden, begin = [], 0
    for part in parts:
        following = tokens[begin : begin + len(part.sampled)]
        begin += len(part.sampled)
        if part.following is None:
            hidden.append(part.predict(following).clone())
            continue
        own, known = following, to_device(part.following, torch.int64, tokens.device)
        sampled = to_device(part.sampled, torch.int64, tokens.device)
        hidden.append(part.predict(known.index_copy(0, sampled, own)).index_select(0, sampled))
    return torch.cat(hidden) if begin else None


def draft(
    step: StepExecutor,
    hidden: Tensor,
    tokens: Tensor,
    sequences: abc.Sequence[Sequence],
    drafts: abc.Sequence[abc.Sequence[int]],
    count: int,
) -> Tensor:
    """Draft tokens after the last token of each sequence that a step has sampled tokens for.

    Args:
        hidden, tokens: the result of `predict`, and the sampled tokens.
        sequences: in the order of the sampled rows.
        drafts: the draft tokens of each sequence that the step has verified; it has one sampled row more.
        count: draft tokens per sequence, 1 to 4.

    Returns:
        int64 `[sequences, count]`.
    """
    most, begin, rows = max(map(len, drafts)), 0, []
    for sequence, own in zip(sequences, drafts, strict=True):
        state, padding = sequence.scheduler_state, most - len(own)
        sampled = [*range(begin, begin + len(own) + 1), *[begin + len(own)] * padding]
        # The first sampled row is that of the last computed token: drafts are counted once they are accepted.
        rows.append([*sampled, *own, *[FROM_DEVICE] * padding, state.computed - 1, len(state.blocks) * BLOCK])
        begin += len(own) + 1
    inputs = to_device(rows, torch.int64, tokens.device)
    sampled_rows, verified = inputs[:, : most + 1], inputs[:, most + 1 : 2 * most + 1]
    matches = tokens[sampled_rows[:, :most]] == verified
    accepted = matches.long().cumprod(1).sum(1)
    last = sampled_rows.gather(1, accepted[:, None])[:, 0]
    return step.draft(
        hidden.index_select(0, last),
        (inputs[:, -2] + accepted).int(),
        [sequence.runner_state.slot for sequence in sequences],
        inputs[:, -1].int(),
        max(sequence.scheduler_state.computed for sequence in sequences) + most,
        count,
    )
