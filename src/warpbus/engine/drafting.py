"""The draft tokens of an engine's sequences: where they come from, how many there are, and how many were accepted.

Knows nothing of tensors; `speculation` has the rules, and `mtp` computes the drafts of multi-token prediction.
"""

from warpbus.engine.scheduler import Scheduler, StepPlan
from warpbus.engine.sequence import Sequence
from warpbus.engine.speculation import DraftPolicy, Speculation


class Drafting:
    """Proposes draft tokens for each step, and counts them.

    Args:
        speculation: the source and the most draft tokens, at least one.
        max_num_seqs: the most sequences that run at once.

    Attributes:
        rows: the most tokens sampled in a step, those after drafts included.
        drafted, accepted: draft tokens that were verified, and that were accepted.
    """

    def __init__(self, speculation: Speculation, max_num_seqs: int) -> None:
        self._speculation = speculation
        self._max_num_seqs = max_num_seqs
        self._policy = DraftPolicy(speculation.tokens)
        self._proposed = 0  # draft tokens per sequence that the last launched step proposes
        self._wanted = 0  # the same of the next step
        self.rows = speculation.rows(max_num_seqs)
        self.drafted = 0
        self.accepted = 0

    def needs_host(self, scheduler: Scheduler) -> bool:
        """The next step verifies or proposes drafts: the host has to know the last token of each sequence before."""
        return not self._speculation.mtp or bool(self._proposed or self._affordable(scheduler))

    def plan(self, scheduler: Scheduler, *, ahead: bool) -> StepPlan:
        """Plan a step with room for drafts.

        Args:
            ahead: the step is launched before the tokens of the last one are read.
        """
        if not self._speculation.mtp:
            return scheduler.plan(self._speculation.tokens)
        self._wanted = 0 if ahead else self._affordable(scheduler)
        return scheduler.plan(self._proposed, max(0, self._wanted - 1))

    def drafts(self, plan: StepPlan, *, ahead: bool) -> tuple[list[list[int]] | None, int]:
        """The drafts that a planned step verifies, and the number that it proposes.

        Returns:
            The draft tokens of each decoding sequence, limited by the rows of the step, or None if the host does not
            need the last tokens; and the number of tokens per sequence that multi-token prediction drafts for the next
            step.
        """
        self._policy.advance()
        self._proposed = self._wanted
        if ahead:
            return None, 0
        # A prompt that ends is sampled, too.
        rows = self.rows - len(plan.decoding) - sum(chunk.is_last for chunk in plan.chunks)
        found: list[list[int]] = []
        for sequence, most in zip(plan.decoding, plan.draft_limits, strict=True):
            own = self._propose(sequence, min(most, rows)) if most and rows else []
            rows -= len(own)
            found.append(own)
        self.drafted += sum(map(len, found))
        return found, self._proposed

    def record(self, drafted: int, accepted: int) -> None:
        """Count the drafts of a sequence that were verified, and of these the accepted ones."""
        self.accepted += accepted
        self._policy.record(drafted if self._speculation.mtp else 0, accepted)

    def restart(self) -> None:
        """Forget what launched steps propose, after an error."""
        self._proposed = 0

    def _affordable(self, scheduler: Scheduler) -> int:
        """The draft tokens per sequence that pay in a step of the sequences that run or wait."""
        return self._policy.count(min(len(scheduler), self._max_num_seqs))

    def _propose(self, sequence: Sequence, most: int) -> list[int]:
        state = sequence.runner_state
        if self._speculation.mtp:
            return state.drafts[:most]
        state.ngrams.extend(sequence.scheduler_state.ids[len(state.ngrams) :])
        return state.ngrams.propose(most)
