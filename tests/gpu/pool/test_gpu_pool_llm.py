"""`LLM` on a remote GPU that is the one of this machine: the tokens of an engine here, and steps that are graphs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "cpu" / "pool"))
from pool_direct import connected

import warpbus
from warpbus.demo import model_path
from warpbus.engine import LLM, SamplingParams
from warpbus.kernels.ops.packed import PackedWeight
from warpbus.pool.client.session import Session
from warpbus.pool.tenant.execution import Executor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

QUESTIONS = ["写一首题为《春夜》的五言绝句。", "下一句：白日依山尽", "续写：床前明月光，疑是地上霜。"]
GREEDY = SamplingParams(temperature=0, max_tokens=48)
SEEDED = SamplingParams(seed=3, top_p=0.9, max_tokens=48)


@pytest.fixture(scope="module")
def poet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("poet") / "w4"
    warpbus.quantize(model_path(), output, scheme="w4a16-g128", algorithm="rtn")
    return output


@pytest.fixture
def remote() -> Iterator[tuple[Session, Executor]]:
    capability = torch.cuda.get_device_capability()
    try:
        with connected(4 * 10**9, device="cuda", capability=capability) as found:
            yield found
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)  # a tenant limits its process


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_are_those_of_an_engine_here(
    params: SamplingParams, dtype: str, poet: Path, remote: tuple[Session, Executor]
) -> None:
    here, there = (LLM(poet, device=device, dtype=dtype) for device in ("cuda", "warpbus:0"))
    form = there.model.layers[0].mlp.down.form
    assert isinstance(form, PackedWeight)
    assert torch.equal(form.codes.cpu(), here.model.layers[0].mlp.down.form.codes.cpu())
    prompts = [here.render([{"role": "user", "content": question}]) for question in QUESTIONS]
    expected, found = (llm.generate(prompts, params) for llm in (here, there))
    assert [answer.text for answer in found] == [answer.text for answer in expected]
    usage = remote[1].usage()
    print(usage)
    assert usage["captured"] == usage["programs"] > 0


def test_a_step_is_one_round_trip(poet: Path, remote: tuple[Session, Executor]) -> None:
    session, _ = remote
    llm = LLM(poet, device="warpbus:0")
    llm.generate(QUESTIONS, GREEDY)
    before, steps = session.statistics.round_trips, llm.engine.stats().steps
    llm.generate(QUESTIONS, GREEDY)
    assert session.statistics.round_trips - before <= llm.engine.stats().steps - steps


def test_long_prompts_are_read_as_here(poet: Path, remote: tuple[Session, Executor]) -> None:
    """More than a graph has rows for, after a beginning that is found in the cache."""
    here, there = (LLM(poet, device=device, dtype="float16") for device in ("cuda", "warpbus:0"))
    text = "床前明月光，疑是地上霜。举头望明月，低头思故乡。" * 24
    params = SamplingParams(temperature=0, max_tokens=16)
    prompt = here.tokenizer.encode(text)[:480]
    for ids in (prompt[:100], prompt):  # 384 tokens of the second attend to 96 that are there
        expected, found = (llm.generate([ids], params)[0] for llm in (here, there))
        assert found.token_ids == expected.token_ids
    assert there.engine.stats().prefix_hits > 0
