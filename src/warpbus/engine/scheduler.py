"""Who is computed in the next step. Knows no tensors, no text and no device: token ids, lengths and blocks.

Every request is in one of three places: it waits, it runs, or it is gone. One that runs has blocks for all that is
computed of it. What a step does for a request is to compute the keys and values of some of its tokens; where these are
its last, the step also gives it one more token. So reading a prompt and generating are the same thing, in pieces of
different sizes.

Steps are launched before the tokens of the last one are known. Therefore the scheduler counts tokens (`length`), and
only what shares blocks needs their ids (`ids`), which come later.

A prefix of keys and values that no token stands for (P-Tuning v2) comes before a request's tokens in its blocks. They
are written once, and all requests that have it read the same ones.
"""

import secrets
from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from warpbus.engine.blocks import BLOCK, BlockAllocator, block_keys


@dataclass(eq=False)
class Request:
    """A sequence as the scheduler sees it.

    Attributes:
        ids: the token ids that are known: the prompt, and what was generated and read.
        limit: the most tokens there can be, the prompt included.
        salt: requests of different salts share no blocks.
        whole: so many of the first tokens are read in one piece, the prompt up to the token that ends it, since those
            before see each other in both directions. Then no block can be shared: what it holds depends on what
            follows. 0: all attention is causal.
        prefix: the blocks of a prefix, which nobody writes to; requests that have one share a salt of their own.
        given: how many places of the cache the prefix takes. Where it does not fill its last block, that is copied
            into one of the request's own.
        length: the tokens there are, those of steps under way included. The prefix is not counted among tokens.
        computed: of how many of them keys and values are in the cache, once the steps under way are done.
        blocks: where they are, in order, after the prefix: token p has the place `given + p`.
        shared: tokens of the prompt that were found in the cache, when it was read first.
        decodes: all its tokens were read, and it was given one more: all but the last are computed.
        preemptions: how often it had to give its blocks back.
        keys: of its full blocks, as far as they were needed.
        published: how many of its blocks, without those of the prefix, are full and have a key: others can find them,
            but for those of a request that has a `whole`.
    """

    ids: list[int]
    limit: int
    salt: bytes = b""
    whole: int = 0
    prefix: tuple[int, ...] = ()
    given: int = 0
    length: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    shared: int = 0
    decodes: bool = False
    preemptions: int = 0
    keys: list[bytes] = field(default_factory=list)
    published: int = 0

    def __post_init__(self) -> None:
        self.length = self.length or len(self.ids)
        if self.whole:
            self.salt += secrets.token_bytes(16)  # no other's blocks hold the same

    @property
    def prompt(self) -> int:
        """How many of its first tokens see each other in both directions: those before the end of the prompt."""
        return max(0, self.whole - 1)

    @property
    def places(self) -> int:
        """How many places of the cache are taken, by the prefix and all that is computed."""
        return self.given + self.computed

    @property
    def lent(self) -> int:
        """How many of its first blocks are those of the prefix."""
        return self.given // BLOCK

    @property
    def lead(self) -> int:
        """Cache positions of its first own block that the end of the prefix takes."""
        return self.given % BLOCK


@dataclass(frozen=True)
class PromptChunk:
    """Tokens `start` to `end - 1` of a request, read in one step; if they are its last, it gets a new token."""

    request: Request
    start: int
    end: int
    is_last: bool


@dataclass(frozen=True)
class StepPlan:
    """A step.

    Attributes:
        decoding: the requests whose last token is computed, the oldest first.
        drafts: of each of these, how many guessed tokens it may check in the same step.
        pieces: pieces of prompts.
    """

    decoding: list[Request]
    drafts: list[int]
    pieces: list[PromptChunk]

    def __bool__(self) -> bool:
        return bool(self.decoding or self.pieces)


class Scheduler:
    """First come, first served: requests are taken in in their order, and the youngest gives way if memory is short.

    Args:
        blocks: of the cache; there have to be enough for one request of the greatest length.
        max_num_seqs: the most requests that run at once.
        prefill_tokens: of the prompts, read in a step where nobody decodes. One that may not be cut is read alone if it
            is longer.
        mixed_tokens: from the number of those that decode to the tokens of a step, these included, in which prompts are
            read beside them: they wait for the prompts. None: as many as where nobody decodes.

    Attributes:
        waiting, running: in their order.
        preemptions: how many there have been.
        queried, found: tokens of prompts looked up in the cache, and found.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        *,
        max_num_seqs: int,
        prefill_tokens: int,
        mixed_tokens: Callable[[int], int] | None = None,
    ) -> None:
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._prefill_tokens = prefill_tokens
        self._mixed_tokens = mixed_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self.queried = 0
        self.found = 0

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        self.waiting.append(request)

    def remove(self, request: Request, *, unshare: bool = False) -> None:
        """Drop a request, wherever it is; does nothing if it is gone.

        Args:
            unshare: requests that come later find none of its blocks.
        """
        if unshare:
            self._blocks.unpublish(request.blocks[request.lent :])
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def plan(self, drafts: int = 0) -> StepPlan:
        """Choose the next step, and note it as launched.

        Args:
            drafts: the most guessed tokens that a request may check; with any, a step's tokens have to be `read`
                before the next plan.
        """
        preempted: set[Request] = set()
        decoding, guesses = self._decoding(drafts, preempted)
        budget = self._prefill_tokens
        if decoding and self._mixed_tokens is not None:
            rows = len(decoding) + sum(guesses)
            # One at least, so that nobody waits for ever.
            budget = min(budget, max(1, self._mixed_tokens(rows) - rows))
        return StepPlan(decoding, guesses, self._pieces(budget, admit=not preempted))

    def read(self, request: Request, token_ids: abc.Sequence[int]) -> None:
        """Note the tokens that a step gave to a request: one, or more where guesses were right."""
        request.ids += token_ids
        more = len(token_ids) - 1
        request.computed += more
        request.length += more
        if request.blocks:  # else it was preempted meanwhile
            self._publish(request)

    def restart(self) -> None:
        """Nobody knows what was computed: who runs begins again, from the ids that are known, and nothing is found."""
        while self.running:
            self._preempt(self.running[-1])
        for request in self.waiting:
            request.length = len(request.ids)
        self._blocks.forget()

    def _decoding(self, drafts: int, preempted: set[Request]) -> tuple[list[Request], list[int]]:
        """Those whose last token is computed, with room for it."""
        chosen: list[Request] = []
        guesses: list[int] = []
        for request in list(self.running):
            if not request.decodes or request.length >= request.limit or request in preempted:
                continue
            while not self._reserve(request, request.length):
                # Never one that is chosen already: those are older.
                youngest = self.running[-1]
                self._preempt(youngest)
                preempted.add(youngest)
                if youngest is request:
                    break
            else:
                more = min(drafts, request.limit - request.length - 1)
                guesses.append(more if self._reserve(request, request.length + more) else 0)
                chosen.append(request)
                request.computed += 1
                request.length += 1
        return chosen, guesses

    def _pieces(self, budget: int, *, admit: bool) -> list[PromptChunk]:
        pieces: list[PromptChunk] = []
        for request in self.running:
            if budget and not request.decodes:
                pieces.append(self._piece(request, budget))
                budget -= pieces[-1].end - pieces[-1].start
        while admit and budget and self.waiting and len(self.running) < self._max_num_seqs:
            whole = self.waiting[0].whole
            if (pieces and whole > budget) or not self._admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            self.running.append(request)
            pieces.append(self._piece(request, max(budget, whole)))
            budget = max(0, budget - pieces[-1].end + pieces[-1].start)
        return pieces

    def _piece(self, request: Request, budget: int) -> PromptChunk:
        end = min(request.length, request.computed + budget)
        piece = PromptChunk(request, request.computed, end, end == request.length)
        request.computed = end
        # At once: who comes later in the same step may share them, since a layer stores all before it attends to any.
        self._publish(request)
        request.length += piece.is_last
        request.decodes = piece.is_last
        return piece

    def _admit(self, request: Request) -> bool:
        """Give a request blocks for all of its tokens: those that are found, and fresh ones."""
        shared = self._found(request)
        fresh = _blocks_for(request.lead + request.length) - len(shared)
        # Each that runs may soon want one more.
        spare = len(self.running)
        taken = self._blocks.take(fresh) if fresh + spare <= self._blocks.available else None
        if taken is None:
            self._blocks.release(shared)
            return False
        request.blocks = [*request.prefix[: request.lent], *shared, *taken]
        request.published = len(shared)
        request.computed = max(0, len(shared) * BLOCK - request.lead)
        if not request.preemptions:
            request.shared = request.computed
            self.queried += 0 if request.whole else request.length
            self.found += request.computed
        return True

    def _found(self, request: Request) -> list[int]:
        """The blocks of a request's beginning that others have computed; it uses them from now on."""
        if request.whole:
            return []
        request.keys = block_keys(request.ids, request.keys, salt=request.salt, lead=request.lead)
        # The last token is always computed: its scores are wanted.
        return self._blocks.share(request.keys[: (request.lead + request.length - 1) // BLOCK])

    def _reserve(self, request: Request, tokens: int) -> bool:
        """Blocks for so many tokens of a request."""
        missing = _blocks_for(request.given + tokens) - len(request.blocks)
        taken = self._blocks.take(missing) if missing > 0 else []
        if taken is None:
            return False
        request.blocks += taken
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks; it is computed again, from its prompt on, when there is room."""
        self.running.remove(request)
        self._release(request)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self._blocks.release(request.blocks[request.lent :])
        request.blocks = []
        request.computed = 0
        request.decodes = False

    def _publish(self, request: Request) -> None:
        """Let others find the blocks of a request that are full and whose tokens are known."""
        full = (request.lead + min(request.computed, len(request.ids))) // BLOCK
        if full > len(request.keys):
            request.keys = block_keys(request.ids, request.keys, salt=request.salt, lead=request.lead)
        for index in () if request.whole else range(request.published, full):
            self._blocks.publish(request.blocks[request.lent + index], request.keys[index])
        request.published = max(request.published, full)


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)
