"""The engine's process: takes commands, lets the engine step, says what the steps brought.

With tensor parallelism there are several, which do the same with the same sequences, in the same order. The first gets
the commands and hands them to the others before each step; only what the first computes is sent.
"""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from warpbus.dist import Group, JobPipe
from warpbus.dist.outcome import JobFailure
from warpbus.engine.grammar import GrammarCompiler, GrammarMatcher
from warpbus.engine.messages import (
    Abort,
    Add,
    Ask,
    Command,
    Event,
    LoadEngine,
    Loading,
    MoveTo,
    Ready,
    Reply,
    RequestFailed,
    ServedEngine,
    Shrink,
    Step,
    Stop,
)
from warpbus.engine.options import ServiceOptions
from warpbus.engine.sampling_params import Grammar
from warpbus.engine.sequence import Piece, Sequence, request_fault
from warpbus.engine.serving_move import PAUSE, ServedMove
from warpbus.engine.stats import Stats
from warpbus.errors import UsageError, WarpbusError
from warpbus.models import Progress
from warpbus.models.tokenizers import StreamDecoder, Tokenizer, load_tokenizer

# Of loading, no more often than this is told.
_PARTS_TOLD = 200
# After so long without work the engine shrinks. Where several processes idle, this is also how often the first one is
# heard of: a wait for it may last _PATIENCE.
_SECONDS_OF_SILENCE = 300.0
_PATIENCE = timedelta(minutes=30)


def serve(
    group: Group,
    line: JobPipe,
    load: LoadEngine,
    model: Path,
    options: ServiceOptions,
    vocab_size: int,
    stop_ids: frozenset[int],
) -> None:
    """Load a model and answer until told to stop: the job of each of the engine's processes.

    Args:
        group: this process's place.
        line: to the service.
        load: makes the engine.
        model: the model directory.
        options: for `load`.
        vocab_size: of the model's scores.
        stop_ids: generation ends at any of these tokens.

    Raises:
        WarpbusError: the model could not be loaded, or a step failed: all requests end.
    """
    requests = _Requests(load_tokenizer(model), vocab_size, stop_ids)
    engine = load(model, options, group, _teller(line) if group.is_first else _silent)
    lockstep = _Lockstep(group)
    lockstep.meet()
    if group.is_first:
        line([Ready(engine.max_model_len)])
    turns = _Turns(engine, group, line, requests)
    goes_on = True
    while goes_on:
        commands = lockstep.share(line, turns.patience)
        with line.step():
            goes_on = turns.turn(commands)


def _teller(line: JobPipe) -> Progress:
    """Tells the service how far loading is, not too often."""
    told = -1

    def tell(done: int, total: int) -> None:
        nonlocal told
        part = _PARTS_TOLD * done // max(1, total)
        if part != told:
            told = part
            line([Loading(done, total)])

    return tell


def _silent(done: int, total: int) -> None:
    del done, total


class _Lockstep:
    """Gives the processes of a group the same commands."""

    def __init__(self, group: Group) -> None:
        self._first = group.is_first
        self._others = group.world > 1
        group.meet()
        self._count = torch.zeros(1, dtype=torch.int64)
        # Commands are the host's: they should wait neither for a GPU nor on it.
        self._talk = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE) if self._others else None

    def meet(self) -> None:
        """Wait until every process is here."""
        if self._others:
            torch.distributed.barrier(self._talk)

    def share(self, line: JobPipe, patience: float) -> list[Command]:
        """The commands that have come; waits up to so many seconds for some."""
        commands: list[Command] = []
        if self._first:
            said: list[list[Command]] = line.heard(patience)
            commands = [command for several in said for command in several]
            if patience >= _SECONDS_OF_SILENCE and not commands:
                commands = [Shrink()]
        return self._agreed(commands) if self._others else commands

    def _agreed(self, commands: list[Command]) -> list[Command]:
        """Those of the first process. Mostly there are none, and their number is all that is exchanged."""
        self._count[0] = len(commands)
        torch.distributed.broadcast(self._count, 0, self._talk)
        if not self._count:
            return []
        shared = [commands]
        torch.distributed.broadcast_object_list(shared, 0, self._talk)
        return shared[0]


class _Requests:
    """Makes sequences of requests."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._compiler: GrammarCompiler | UsageError
        try:
            # Now, and not when the first request wants it: for a large vocabulary it takes a while.
            self._compiler = GrammarCompiler(tokenizer, vocab_size=vocab_size, stop_ids=stop_ids)
        except UsageError as error:
            self._compiler = error

    def sequence(self, command: Add, max_model_len: int) -> Sequence:
        """What the engine gets. Raises `UsageError` for a grammar that cannot be used."""
        params = command.params
        return Sequence(
            command.number,
            command.prompt,
            params,
            limit=min(params.max_tokens, max_model_len - len(command.prompt)),
            stop_ids=self._stop_ids,
            stream=StreamDecoder(self._tokenizer, keep_first_space=params.grammar is not None),
            matcher=None if params.grammar is None else self._matcher(params.grammar),
            adapter=command.adapter,
            cache_salt=command.cache_salt,
        )

    def _matcher(self, grammar: Grammar) -> GrammarMatcher:
        if isinstance(self._compiler, UsageError):
            raise UsageError(str(self._compiler))
        return self._compiler.compile(grammar)


class _Turns:
    """What is done again and again: commands, a step, and what there is to say of both."""

    def __init__(self, engine: ServedEngine, group: Group, line: JobPipe, requests: _Requests) -> None:
        self._engine = engine
        self._group = group
        self._line = line
        self._requests = requests
        self._sequences: dict[int, Sequence] = {}
        self._asked: list[Ask] = []
        self._asleep = False
        self._move: ServedMove | None = None
        self._said: list[Event] = []

    @property
    def patience(self) -> float:
        """Seconds for which there is nothing to do if nobody says anything."""
        if self._engine.has_work:
            return 0.0
        return _SECONDS_OF_SILENCE if self._move is None else PAUSE

    def turn(self, commands: list[Command]) -> bool:
        """Do what is to be done; False after the last turn."""
        for command in commands:
            match command:
                case Add():
                    self._add(command)
                case Abort():
                    self._abort(command.number)
                case Ask():
                    self._asked.append(command)
                case MoveTo():
                    self._begin_move(command)
                case Shrink():
                    if not self._asleep:
                        self._engine.shrink()
                case Stop():
                    return False
        if self._engine.has_work:
            self._tell(self._engine.step())
        if self._move is not None:
            self._go_on_moving(self._move)
        for ask in self._asked[:]:
            # What waits for a pause gets it: the service adds nothing meanwhile.
            if ask.query == "stats" or not self._engine.has_work:
                self._asked.remove(ask)
                self._reply(ask)
        if self._said and self._group.is_first:
            self._line(self._said)
        self._said = []
        return True

    def _add(self, command: Add) -> None:
        try:
            sequence = self._requests.sequence(command, self._engine.max_model_len)
            self._engine.add(sequence)
        except MemoryError:
            raise
        except Exception as error:
            self._said.append(RequestFailed(command.number, JobFailure.of(request_fault(error, command.number))))
        else:
            self._sequences[command.number] = sequence

    def _abort(self, number: int) -> None:
        sequence = self._sequences.pop(number, None)
        if sequence is not None:  # else it has ended meanwhile
            self._engine.abort(sequence)

    def _begin_move(self, command: MoveTo) -> None:
        try:
            if self._move is not None:
                raise UsageError("the engine is on its way to another GPU already: try again when it is there")
            self._move = ServedMove(command.number, self._engine, command.device)
        except WarpbusError as error:
            self._said.append(Reply(command.number, JobFailure.of(error)))

    def _go_on_moving(self, move: ServedMove) -> None:
        try:
            finished = move.turn()
        except WarpbusError as error:
            self._move = None
            self._said.append(Reply(move.number, JobFailure.of(error)))
            return
        if finished is not None:
            self._move = None
            self._tell(finished[0])
            self._said.append(Reply(move.number, finished[1]))

    def _tell(self, came: list[tuple[Sequence, Piece]]) -> None:
        """Tell what steps brought."""
        if came:
            self._said.append(Step([(sequence.index, piece) for sequence, piece in came]))
        for sequence, _ in came:
            if sequence.ended:
                self._sequences.pop(sequence.index, None)
            if sequence.error is not None:
                self._said.append(RequestFailed(sequence.index, JobFailure.of(sequence.error)))

    def _reply(self, ask: Ask) -> None:
        answer: Stats | JobFailure | None = None
        try:
            if ask.query == "stats":
                answer = self._engine.stats()
            elif ask.query == "sleep":
                self._engine.sleep()
                self._asleep = True
            else:
                self._engine.wake()
                self._asleep = False
        except UsageError as error:
            answer = JobFailure.of(error)
        except WarpbusError as error:
            if self._group.world > 1:  # the others may have succeeded
                raise
            answer = JobFailure.of(error)
        self._said.append(Reply(ask.number, answer))
