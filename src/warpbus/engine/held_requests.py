"""Requests whose grammars are being compiled: they reach the engine afterwards, so no step waits for a compilation."""

from collections import abc
from concurrent.futures import Future
from typing import Any

from warpbus.engine.grammar import GrammarCompiler
from warpbus.engine.messages import Abort, Add, Command, CompileGrammar


class HeldRequests:
    """Holds back requests until their grammars are compiled; for the engine's first process.

    Args:
        compiler: None if the model has no grammars: no request is held back then.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._held: dict[int, tuple[Add, Future[Any]]] = {}

    def __len__(self) -> int:
        """Requests that are held back."""
        return len(self._held)

    def admit(self, commands: abc.Iterable[Command]) -> list[Command]:
        """The commands for this iteration, in their order.

        A request with a grammar that is not compiled is replaced by `CompileGrammar`; its `Add` comes at the end of a
        later iteration's commands, unless it is aborted first.
        """
        admitted: list[Command] = []
        for command in commands:
            if isinstance(command, Add) and (begun := self._begun(command)) is not None:
                self._held[command.number] = command, begun
                assert command.params.grammar is not None
                admitted.append(CompileGrammar(command.params.grammar))
            elif not isinstance(command, Abort) or self._held.pop(command.number, None) is None:
                admitted.append(command)
        for number, (held, begun) in list(self._held.items()):
            if begun.done():
                del self._held[number]
                admitted.append(held)
        return admitted

    def _begun(self, command: Add) -> Future[Any] | None:
        """The compilation that a request has to wait for; None if there is none."""
        grammar = command.params.grammar
        return None if grammar is None or self._compiler is None else self._compiler.begin(grammar)
