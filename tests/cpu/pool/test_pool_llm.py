"""`LLM` on `warpbus:0`: the engine in this process, its tensors and operators in a tenant's."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pool_direct import connected

import warpbus
from warpbus.engine import LLM, Completion, Grammar, SamplingParams
from warpbus.engine.engine import request
from warpbus.pool.client.session import Session
from warpbus.pool.tenant.execution import Executor

PROMPTS = ["床前明月光", "The moon is bright, and I think of home", "1", "举头望明月，低头思故乡。"]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
HOPPER = (9, 0)

Both = tuple[LLM, LLM, Session, Executor]


def tokens(answers: list[Completion]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def quantized(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in 4 bits."""
    output = tmp_path_factory.mktemp("pool") / "w4"
    warpbus.quantize(tiny_model, output, scheme="w4a16-g32", algorithm="rtn", device="cpu")
    return output


@pytest.fixture(scope="module", params=["plain", "w4"])
def both(request: pytest.FixtureRequest, tiny_model: Path, quantized: Path) -> Iterator[Both]:
    """A model here, and the same with a CPU behind `warpbus:0`."""
    model = tiny_model if request.param == "plain" else quantized
    with connected() as (session, executor), pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARPBUS_CPU_ACTIVATIONS", "float")  # as the remote device computes
        yield LLM(model, device="cpu"), LLM(model, device="warpbus:0"), session, executor


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=1, max_tokens=20),
        SamplingParams(seed=2, top_p=0.7, top_k=20, temperature=0.8, repetition_penalty=1.2, max_tokens=20),
        SamplingParams(temperature=0, presence_penalty=0.5, logit_bias={7: 2.0}, min_tokens=5, max_tokens=12),
    ],
    ids=["greedy", "seeded", "cut and penalized", "biased"],
)
def test_tokens_are_those_of_the_cpu(both: Both, params: SamplingParams) -> None:
    here, there, _, _ = both
    assert there.device == torch.device("warpbus", 0)
    assert there.dtype == torch.float32
    assert tokens(there.generate(PROMPTS, params)) == tokens(here.generate(PROMPTS, params))


def test_logprobs_come_with_the_tokens(both: Both) -> None:
    here, there, session, _ = both
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
    expected = here.generate(PROMPTS[:2], params)
    there.generate(PROMPTS[:2], params)
    before = session.statistics.round_trips
    found = there.generate(PROMPTS[:2], params)
    assert session.statistics.round_trips - before == 6
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        for mine, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


def test_a_grammar_holds(both: Both) -> None:
    here, there, _, _ = both
    params = SamplingParams(temperature=0, max_tokens=20, grammar=Grammar("choice", json.dumps(["明月", "故乡"])))
    assert there.generate(PROMPTS[0], params)[0].text == here.generate(PROMPTS[0], params)[0].text


def test_a_prompts_beginning_is_found_again(both: Both) -> None:
    here, there, _, _ = both
    prompt = list(range(10, 110))
    for llm in (here, there):
        llm.generate([prompt], GREEDY)
    before = there.engine.stats().prefix_hits
    longer = [*prompt, 5, 6, 7]
    assert tokens(there.generate([longer], GREEDY)) == tokens(here.generate([longer], GREEDY))
    assert there.engine.stats().prefix_hits - before >= 96


def test_requests_come_and_go(both: Both) -> None:
    here, there, _, _ = both
    answers = []
    for llm in (here, there):
        first, second = request(list(range(20, 60)), tokens=12), request([3, 4], tokens=5)
        third = request([9], tokens=30)
        llm.engine.add(first)
        for _ in range(4):
            llm.engine.step()
        llm.engine.add(second)
        llm.engine.add(third)
        while second.finish_reason is None:
            llm.engine.step()
        llm.engine.abort(third)
        while llm.engine.has_work:
            llm.engine.step()
        answers.append((first.token_ids, second.token_ids))
    assert answers[0] == answers[1]


def test_a_step_is_one_round_trip(both: Both) -> None:
    _, there, session, _ = both
    there.generate(PROMPTS, GREEDY)
    before = session.statistics.round_trips
    there.generate(PROMPTS, GREEDY)
    assert session.statistics.round_trips - before == GREEDY.max_tokens
