"""The engine's process: receives commands, runs the engine's steps and sends the results.

With tensor parallelism there are several processes, which run the same steps with the same sequences in the same order.
The first process receives the commands and broadcasts them before each step; only its results are sent. A migration to
another GPU is prepared in a thread and advanced between the steps.
"""

import gc
import threading
from collections import abc
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from warpbus.cuda.devices import resolve_device
from warpbus.dist import Group, JobPipe
from warpbus.dist.outcome import JobFailure
from warpbus.engine.adapters import cut
from warpbus.engine.answer_decoder import answer_decoder
from warpbus.engine.engine import Engine
from warpbus.engine.grammar import GrammarCompiler, GrammarMatcher
from warpbus.engine.held_requests import HeldRequests
from warpbus.engine.messages import (
    Abort,
    Add,
    Ask,
    Command,
    CompileGrammar,
    Event,
    LoadEngine,
    Loading,
    MoveTo,
    Ready,
    Reply,
    RequestFailed,
    ServedEngine,
    Shrink,
    StepResults,
    Stop,
    UseAdapters,
)
from warpbus.engine.moving import EngineMigration, Moved
from warpbus.engine.options import ServiceOptions
from warpbus.engine.sampling_params import Grammar
from warpbus.engine.sequence import Sequence, TextPiece, request_fault
from warpbus.engine.stats import Stats
from warpbus.engine.thinking import matcher_of
from warpbus.errors import ConflictError, DeviceError, UsageError, WarpbusError
from warpbus.formats import Checkpoint
from warpbus.models import Progress, read_config
from warpbus.models.adapters import Lora, Prefix, load_adapter
from warpbus.models.parallel import Part
from warpbus.models.tokenizers import Tokenizer, load_tokenizer


def use_adapters(
    engine: ServedEngine, model: Path, named: abc.Sequence[tuple[str, str]], group: Group
) -> list[tuple[Sequence, TextPiece]]:
    """Have an engine use these adapters, keeping those that it has already; returns the results of its launched steps.

    Args:
        model: the directory of the engine's model.
        named: (name, directory) of each adapter.
        group: the processes that share the model; each calls this.

    Raises:
        UsageError, DeviceError, CheckpointError, TensorError: as `load_adapter` and `Engine.use_adapters`; nothing has
            changed.
    """
    if not isinstance(engine, Engine):
        raise UsageError("this engine cannot change its adapters")
    adapters = [engine.adapters.get(name) or _load(model, name, path, engine, group) for name, path in named]
    return engine.use_adapters(adapters)


def _load(model: Path, name: str, directory: str, engine: Engine, group: Group) -> Lora | Prefix:
    config = read_config(Checkpoint(model, weights=False))
    adapter = load_adapter(directory, config, name=name, dtype=engine.dtype)
    if group.world == 1:
        return adapter
    return cut(adapter, Part(config, group.rank, group.world, engine.model.config.expert_parallel))


PAUSE = 0.01
"""Seconds between two calls of `ServedMove.advance`, or looks at held requests, of an engine without other work."""


class ServedMove:
    """A migration that the service has asked for.

    Args:
        number: of the command.
        engine: continues to step between the calls of `advance`.
        device: as in a CLI flag.

    Raises:
        UsageError: the engine cannot move there.
        DeviceError: there is no such GPU.
    """

    def __init__(self, number: int, engine: ServedEngine, device: str) -> None:
        if not isinstance(engine, Engine):
            raise UsageError("this engine cannot move")
        self.number = number
        self._move = EngineMigration(engine, resolve_device(device))
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._prepare, name="warpbus-move", daemon=True)
        self._thread.start()

    def advance(self) -> tuple[list[tuple[Sequence, TextPiece]], Moved] | None:
        """Copy blocks ahead; when few are left, finish the migration.

        Returns:
            None while it is not finished; then the results of the last steps on the first GPU, and the cost.

        Raises:
            WarpbusError: the migration failed; the engine stays where it is.
        """
        if self._thread.is_alive():
            return None
        try:
            if self._failure is not None:
                raise self._failure
            if not self._move.copy_ahead():
                return None
            finished = self._move.finish()
        except BaseException:
            self._move.release()
            raise
        # In a thread: unmapping takes time.
        threading.Thread(target=self._move.release, name="warpbus-release", daemon=True).start()
        return finished

    def _prepare(self) -> None:
        try:
            self._move.prepare()
        except Exception as error:
            self._failure = error


# Progress of loading is sent at most so many times.
_PARTS_TOLD = 200
# After so long without work the engine shrinks. With several processes it is also how often an idle first process sends
# to the others, which wait for it up to _PATIENCE.
_SECONDS_OF_SILENCE = 300.0
_PATIENCE = timedelta(minutes=30)


def serve(
    group: Group,
    pipe: JobPipe,
    load: LoadEngine,
    model: Path,
    options: ServiceOptions,
    vocab_size: int,
    stop_ids: frozenset[int],
) -> None:
    """Load a model and generate until the command `Stop`: the main function of each of the engine's processes.

    Args:
        group: the processes that share the model.
        pipe: to and from the service.
        load: creates the engine.
        model: the model directory.
        options: for `load`.
        vocab_size: of the model's scores.
        stop_ids: generation ends at any of these tokens.

    Raises:
        WarpbusError: the model could not be loaded, or a step failed, which ends all requests.
    """
    requests = _SequenceFactory(load_tokenizer(model), vocab_size, stop_ids)
    held = HeldRequests(requests.compiler)
    engine = load(model, options, group, _progress_reporter(pipe) if group.is_first else _no_progress)
    lockstep = _Lockstep(group, held)
    lockstep.wait_for_all()
    gc.freeze()  # as in the server: no step waits for a collection of all that was loaded
    if group.is_first:
        pipe([Ready(engine.max_model_len, engine.plan)])
    loop = _ServingLoop(model, engine, group, pipe, requests, held)
    running = True
    while running:
        commands = lockstep.next_commands(pipe, loop.patience)
        with pipe.step():
            running = loop.run_once(commands)
            if not running:
                requests.close()
                engine.save()


def _progress_reporter(pipe: JobPipe) -> Progress:
    """Sends the progress of loading to the service, at a limited rate."""
    reported = -1

    def report(done: int, total: int) -> None:
        nonlocal reported
        part = _PARTS_TOLD * done // max(1, total)
        if part != reported:
            reported = part
            pipe([Loading(done, total)])

    return report


def _no_progress(done: int, total: int) -> None:
    del done, total


class _Lockstep:
    """Gives all processes of a group the same commands."""

    def __init__(self, group: Group, held: HeldRequests) -> None:
        self._held = held
        self._first = group.is_first
        self._others = group.world > 1
        group.meet()
        self._count = torch.zeros(1, dtype=torch.int64)
        # On the host: an exchange of commands must not wait for the GPUs.
        self._host_group = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE) if self._others else None

    def wait_for_all(self) -> None:
        """Wait until all processes have called this."""
        if self._others:
            torch.distributed.barrier(self._host_group)

    def next_commands(self, pipe: JobPipe, patience: float) -> list[Command]:
        """The commands that have arrived; waits up to `patience` seconds for the first one."""
        commands: list[Command] = []
        if self._first:
            batches: list[list[Command]] = pipe.heard(patience)
            commands = [command for batch in batches for command in batch]
            if patience >= _SECONDS_OF_SILENCE and not commands:
                commands = [Shrink()]
            commands = self._held.admit(commands)
        return self._broadcast(commands) if self._others else commands

    def _broadcast(self, commands: list[Command]) -> list[Command]:
        """The commands of the first process. Mostly there are none, and only their number is broadcast."""
        self._count[0] = len(commands)
        torch.distributed.broadcast(self._count, 0, self._host_group)
        if not self._count:
            return []
        shared = [commands]
        torch.distributed.broadcast_object_list(shared, 0, self._host_group)
        return shared[0]


class _SequenceFactory:
    """Creates sequences from requests.

    Attributes:
        compiler: None if there are no grammars.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self.compiler: GrammarCompiler | None = None
        self._reason = ""
        try:
            # Now, not at the first request with a grammar: it takes seconds for a large vocabulary.
            self.compiler = GrammarCompiler(tokenizer, vocab_size=vocab_size, stop_ids=stop_ids)
        except UsageError as error:
            self._reason = str(error)

    def sequence(self, command: Add, max_model_len: int) -> Sequence:
        """The sequence of a request. Raises `UsageError` for a grammar that cannot be used."""
        params = command.params
        return Sequence(
            command.number,
            command.prompt,
            params,
            limit=min(params.max_tokens, max_model_len - len(command.prompt)),
            stop_ids=self._stop_ids,
            stream=answer_decoder(self._tokenizer, command.prompt, params),
            matcher=matcher_of(params, self._stop_ids, self._matcher),
            adapter=command.adapter,
            cache_salt=command.cache_salt,
        )

    def _matcher(self, grammar: Grammar) -> GrammarMatcher:
        if self.compiler is None:
            raise UsageError(self._reason)
        return self.compiler.compile(grammar)

    def prepare(self, grammar: Grammar) -> None:
        """Begin to compile a grammar."""
        if self.compiler is not None:
            self.compiler.begin(grammar)

    def close(self) -> None:
        """Compile nothing more."""
        if self.compiler is not None:
            self.compiler.close()


class _ServingLoop:
    """The serving loop: executes commands, runs a step, and sends the results of both."""

    def __init__(
        self,
        model: Path,
        engine: ServedEngine,
        group: Group,
        pipe: JobPipe,
        requests: _SequenceFactory,
        held: HeldRequests,
    ) -> None:
        self._model = model
        self._engine = engine
        self._group = group
        self._pipe = pipe
        self._requests = requests
        self._held = held
        self._sequences: dict[int, Sequence] = {}
        self._queries: list[Ask] = []
        self._asleep = False
        self._move: ServedMove | None = None
        self._events: list[Event] = []

    @property
    def patience(self) -> float:
        """How many seconds to wait for commands."""
        if self._engine.has_work:
            return 0.0
        return _SECONDS_OF_SILENCE if self._move is None and not self._held else PAUSE

    def run_once(self, commands: list[Command]) -> bool:
        """One iteration; False after the command `Stop`."""
        for command in commands:
            match command:
                case Add():
                    self._add(command)
                case Abort():
                    self._abort(command.number)
                case Ask():
                    self._queries.append(command)
                case CompileGrammar():
                    self._requests.prepare(command.grammar)
                case MoveTo():
                    self._begin_move(command)
                case UseAdapters():
                    self._use_adapters(command)
                case Shrink():
                    if not self._asleep:
                        self._engine.shrink()
                case Stop():
                    return False
        if self._engine.has_work:
            self._add_results(self._engine.step())
        if self._move is not None:
            self._advance_move(self._move)
        for ask in self._queries[:]:
            # All but "stats" wait until the engine has no work; the service adds no requests meanwhile.
            if ask.query == "stats" or not self._engine.has_work:
                self._queries.remove(ask)
                self._reply(ask)
        if self._events and self._group.is_first:
            self._pipe(self._events)
        self._events = []
        return True

    def _add(self, command: Add) -> None:
        try:
            sequence = self._requests.sequence(command, self._engine.max_model_len)
            self._engine.add(sequence)
        except MemoryError:
            raise
        except Exception as error:
            self._events.append(RequestFailed(command.number, JobFailure.of(request_fault(error, command.number))))
        else:
            self._sequences[command.number] = sequence

    def _abort(self, number: int) -> None:
        sequence = self._sequences.pop(number, None)
        if sequence is not None:  # else it has already ended
            self._engine.abort(sequence)

    def _use_adapters(self, command: UseAdapters) -> None:
        answer: JobFailure | None = None
        try:
            if self._move is not None:
                raise ConflictError("the engine is on its way to another GPU: try again when it is there")
            self._add_results(use_adapters(self._engine, self._model, command.adapters, self._group))
        except DeviceError as error:
            if self._group.world > 1:  # the other processes may have succeeded
                raise
            answer = JobFailure.of(error)
        except WarpbusError as error:
            answer = JobFailure.of(error)
        self._events.append(Reply(command.number, answer))

    def _begin_move(self, command: MoveTo) -> None:
        try:
            if self._move is not None:
                raise ConflictError("the engine is on its way to another GPU already: try again when it is there")
            self._move = ServedMove(command.number, self._engine, command.device)
        except WarpbusError as error:
            self._events.append(Reply(command.number, JobFailure.of(error)))

    def _advance_move(self, move: ServedMove) -> None:
        try:
            finished = move.advance()
        except WarpbusError as error:
            self._move = None
            self._events.append(Reply(move.number, JobFailure.of(error)))
            return
        if finished is not None:
            self._move = None
            self._add_results(finished[0])
            self._events.append(Reply(move.number, finished[1]))

    def _add_results(self, results: list[tuple[Sequence, TextPiece]]) -> None:
        """Queue the results of steps for the service."""
        if results:
            self._events.append(StepResults([(sequence.index, piece) for sequence, piece in results]))
        for sequence, _ in results:
            if sequence.ended:
                self._sequences.pop(sequence.index, None)
            if sequence.error is not None:
                self._events.append(RequestFailed(sequence.index, JobFailure.of(sequence.error)))

    def _reply(self, ask: Ask) -> None:
        answer: Stats | JobFailure | None = None
        try:
            if ask.query == "stats":
                stats = self._engine.stats()
                answer = replace(stats, waiting=stats.waiting + len(self._held))
            elif ask.query == "sleep":
                self._engine.sleep()
                self._asleep = True
            elif ask.query == "forget":
                self._engine.shrink(keep=False)
            else:
                self._engine.wake()
                self._asleep = False
        except UsageError as error:
            answer = JobFailure.of(error)
        except WarpbusError as error:
            if self._group.world > 1:  # the other processes may have succeeded
                raise
            answer = JobFailure.of(error)
        self._events.append(Reply(ask.number, answer))
