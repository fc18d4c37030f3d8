"""Grammars are compiled beside the engine's steps: requests wait for their own grammar, and for no other."""

import asyncio
import threading
from concurrent.futures import Future

import pytest
import torch
from test_engine_service import POET, Scripted, collect, counting, tokens, with_service

from warpbus.dist import Group
from warpbus.engine.grammar import GrammarCompiler
from warpbus.engine.held_requests import HeldRequests
from warpbus.engine.messages import Abort, Add, Ask, CompileGrammar, Reply, RequestFailed, StepResults, Stop
from warpbus.engine.options import ServiceOptions
from warpbus.engine.sampling_params import Grammar, SamplingParams
from warpbus.engine.serving_process import serve
from warpbus.errors import UsageError

FIRST, SECOND = Grammar("regex", "a{3}"), Grammar("regex", "b{3}")


class Compiler:
    """In the place of `GrammarCompiler`: grammars are compiled when a test says so."""

    def __init__(self):
        self.begun = {}

    def begin(self, grammar):
        future = self.begun.setdefault(grammar, Future())
        return None if future.done() else future


def add(number, grammar=None):
    return Add(number, [10], SamplingParams(grammar=grammar, max_tokens=3))


@pytest.fixture
def compiler():
    return Compiler()


@pytest.fixture
def held(compiler):
    return HeldRequests(compiler)


def test_a_request_comes_when_its_grammar_is_compiled(compiler, held):
    assert held.admit([add(0), add(1, FIRST), add(2, SECOND), add(3, FIRST), add(4)]) == [
        add(0),
        CompileGrammar(FIRST),
        CompileGrammar(SECOND),
        CompileGrammar(FIRST),
        add(4),
    ]
    assert len(held) == 3
    assert held.admit([]) == []
    compiler.begun[FIRST].set_result(None)
    assert held.admit([add(5), add(6, FIRST)]) == [add(5), add(6, FIRST), add(1, FIRST), add(3, FIRST)]
    compiler.begun[SECOND].set_exception(UsageError("which its sequence raises again"))
    assert held.admit([]) == [add(2, SECOND)]
    assert not held
    assert held.admit([]) == []


def test_an_aborted_request_never_comes(compiler, held):
    held.admit([add(1, FIRST), add(2, FIRST)])
    assert held.admit([Abort(1), Abort(7)]) == [Abort(7)]
    compiler.begun[FIRST].set_result(None)
    assert held.admit([]) == [add(2, FIRST)]


def test_without_grammars_nothing_is_held():
    assert HeldRequests(None).admit([add(1, FIRST)]) == [add(1, FIRST)]


class Waiting(Scripted):
    """Hears `Stop` when all of some requests have ended."""

    def __init__(self, requests, *heard):
        super().__init__(*heard)
        self._requests = requests

    def heard(self, timeout):
        if self._heard:
            return super().heard(timeout)
        ended = {event.number for event in self.said if isinstance(event, RequestFailed)}
        for event in self.said:
            if isinstance(event, StepResults):
                ended |= {number for number, piece in event.pieces if piece.finish_reason is not None}
        if ended >= self._requests:
            return [[Stop()]]
        threading.Event().wait(min(timeout, 0.01))
        return []


ABC = Grammar("lark", 'start: "abc"')
# The engine counts: behind so many tokens it answers with 105, 106 and 107, the bytes abc.
BEFORE_ABC = [10] * 95


def test_answers_go_on_while_a_grammar_is_compiled(monkeypatch):
    compiled = threading.Event()
    parse = GrammarCompiler._parse

    def slow(self, grammar):
        compiled.wait()
        return parse(self, grammar)

    class Line(Waiting):
        def heard(self, timeout):
            if not self._heard:
                compiled.set()
            return super().heard(timeout)

    monkeypatch.setattr(GrammarCompiler, "_parse", slow)
    refused = Grammar("regex", "(")
    line = Line(
        {0, 1, 2},
        [[Add(0, BEFORE_ABC, SamplingParams(grammar=ABC, max_tokens=3)), add(1), add(2, refused), add(3, FIRST)]],
        [[Ask(4, "stats")]],
        [],
        [[Abort(3)]],
    )
    serve(Group(0, 1, torch.device("cpu")), line, counting, POET, ServiceOptions(), 1000, frozenset([2]))
    (reported,) = (event.answer for event in line.said if isinstance(event, Reply))
    assert (reported.running, reported.waiting, reported.added) == (1, 3, 1)
    (failed,) = (event for event in line.said if isinstance(event, RequestFailed))
    assert failed.number == 2
    order = [number for event in line.said if isinstance(event, StepResults) for number, _ in event.pieces]
    assert order == [1, 1, 1, 0, 0, 0]


def test_processes_that_share_a_model_add_requests_in_one_order():
    async def test(service):
        others = [asyncio.ensure_future(collect(service, [10] * length, 100)) for length in (1, 2, 3)]
        for number in range(3):
            grammar = Grammar("lark", f'start: "abc" | "{number}"')
            answer = service.generate(BEFORE_ABC, SamplingParams(grammar=grammar, max_tokens=3))
            assert "".join([piece.text async for piece in answer]) == "abc"
            with pytest.raises(UsageError, match=r"^regex cannot be used"):
                await anext(service.generate([10], SamplingParams(grammar=Grammar("regex", "(" * (1 + number)))))
        for length, other in enumerate(others, 1):
            assert await other == (tokens(100, [10] * length), "length")

    with_service(test, tensor_parallel=2)
