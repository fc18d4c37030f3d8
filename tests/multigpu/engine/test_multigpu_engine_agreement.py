"""Processes that share a model choose the same tokens by themselves: greedy ones, and drawn ones that have seeds."""

import pytest
import torch
from dense_configs import with_traits

from warpbus.dist import Group, Send, launch
from warpbus.engine.engine import Engine, request
from warpbus.engine.sampling_params import SamplingParams
from warpbus.models import SHAPES, random_model
from warpbus.qtensor import Scheme

pytestmark = pytest.mark.multigpu

# Scores of several sequences are more than what goes through the GPUs' memory: NCCL gathers them.
CONFIG = with_traits(SHAPES["chatglm2-6b"], num_layers=3, hidden_size=1024, ffn_size=24 * 128)
CHOICES = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"seed": 5, "temperature": 1.5},
    {"seed": 6, "top_p": 0.9, "logit_bias": {7: 3.0, 9: -2.0}},
    {"seed": 7, "top_k": 50, "min_p": 0.01, "frequency_penalty": 0.5},
)


def job(group: Group, send: Send, choices: tuple[dict[str, object], ...]) -> None:
    original, exchanged = torch.distributed.broadcast, []
    model = random_model(CONFIG, Scheme.parse("w4a16-g128"), group.device, torch.float16, group=group)
    engine = Engine(model, max_model_len=256, max_num_seqs=4)
    assert group.alike()
    torch.distributed.broadcast = lambda *arguments: exchanged.append(1) or original(*arguments)
    requests = [
        request([number, *range(3, 3 + 20 * number)], tokens=40, params=SamplingParams(**params))
        for number, params in enumerate(choices, 1)
    ]
    for each in requests:
        engine.add(each)
    while engine.has_work:
        engine.step()
    send((group.rank, [each.token_ids for each in requests], len(exchanged)))


def said(count: int, choices: tuple[dict[str, object], ...]) -> tuple[list[list[list[int]]], set[bool]]:
    """The answers on each process, and whether they exchanged tokens."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    heard: list[tuple[int, list[list[int]], int]] = []
    launch(job, (choices,), devices=[torch.device("cuda", at) for at in range(count)], receive=heard.append)
    return [answers for _, answers, _ in sorted(heard)], {exchanges > 0 for *_, exchanges in heard}


@pytest.mark.parametrize("count", [2, 3, 4])
def test_tokens_are_the_same_without_an_exchange(count: int) -> None:
    answers, exchanged = said(count, CHOICES)
    assert len(answers) == count
    assert all(len(answer) == 40 for answer in answers[0])
    assert all(other == answers[0] for other in answers)
    assert exchanged == {False}


def test_without_a_seed_the_first_ones_count() -> None:
    answers, exchanged = said(2, ({"temperature": 1.5}, {"temperature": 0}))
    assert answers[0] == answers[1]
    assert exchanged == {True}
