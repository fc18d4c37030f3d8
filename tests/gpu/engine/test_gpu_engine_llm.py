"""glm-poet at INT4 on a GPU: the CPU's perplexity, the CPU's verses, within the memory that is given."""

import subprocess
import sys

import pytest
import torch

import warpbus
from warpbus.demo import data_path, model_path
from warpbus.engine import LLM, SamplingParams
from warpbus.errors import UsageError
from warpbus.evaluation import evaluate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

QUESTIONS = ["写一首题为《春夜》的五言绝句。", "下一句：白日依山尽", "续写：床前明月光，疑是地上霜。"]


@pytest.fixture(scope="module")
def poet(tmp_path_factory):
    output = tmp_path_factory.mktemp("poet") / "w4"
    warpbus.quantize(model_path(), output, scheme="w4a16-g128", algorithm="rtn")
    return output


def test_perplexity_is_the_cpus_to_three_digits(poet):
    found = {}
    for device, dtype in (("cpu", torch.float32), ("cuda:0", torch.float16)):
        found[device] = evaluate(
            [("poet", poet)],
            data=data_path("validation.jsonl"),
            limit=100,
            speed=False,
            device=torch.device(device),
            dtype=dtype,
        )[0].perplexity
    print(found)
    assert found["cuda:0"] == pytest.approx(found["cpu"], rel=5e-4)


def prompts_of(llm):
    return [llm.render([{"role": "user", "content": question}]) for question in QUESTIONS]


def test_verses_are_what_the_cpu_prefers(poet):
    llm = LLM(poet, device="cuda", dtype="float16")
    judge = LLM(poet, device="cpu").model
    prompts = prompts_of(llm)
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.text) >= 5
        with torch.no_grad():
            scores = judge(torch.tensor([[*prompt, *answer.token_ids[:-1]]]))[0, len(prompt) - 1 :]
        chosen = scores.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (scores.amax(-1) - chosen).max() < 0.1


def test_a_stream_may_be_left_and_two_may_run_at_once():
    """In float32: under another load the last bits of logits differ, which in 16 bits may decide between two tokens."""
    llm = LLM(model_path(), device="cuda", dtype="float32")
    params = SamplingParams(seed=5, top_p=0.8, max_tokens=30)
    prompt = prompts_of(llm)[0]
    expected = llm.generate(prompt, params)[0].text
    left = llm.generate(prompt, params, stream=True)
    next(left)
    left.close()
    streams = [llm.generate(prompt, params, stream=True) for _ in range(2)]
    texts = ["", ""]
    for one, other in zip(*streams, strict=True):
        texts[0] += one.text
        texts[1] += other.text
    assert texts == [expected, expected]


PLANNED = """
import sys
import torch
from warpbus.engine import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cuda", memory="1GB")
assert llm.plan.context == llm.max_model_len == 512
prompts = [llm.render([{"role": "user", "content": question}]) for question in sys.argv[2:]]
answers = llm.generate(prompts * 8, SamplingParams(temperature=0, max_tokens=30))
assert all(answer.text for answer in answers)
stream = llm.generate(prompts[0], stream=True)
next(stream)
llm.generate(prompts[1], SamplingParams(max_tokens=3))  # in between
assert llm.engine.stats().running == 1
stream.close()
assert llm.engine.stats().blocks_used == 0
print(torch.cuda.mem_get_info()[0], torch.cuda.max_memory_reserved(), llm.plan.total)
"""


def test_answers_within_a_plan(poet):
    """In a process of its own: a plan counts all that its process has, and what other tests left would be in it."""
    before = torch.cuda.mem_get_info()[0]
    finished = subprocess.run(
        [sys.executable, "-c", PLANNED, str(poet), *QUESTIONS], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    free, reserved, planned = map(int, finished.stdout.split()[-3:])
    shown = f"{before - free:,} bytes by the driver, {reserved:,} of them torch's; planned were {planned:,}"
    print(shown)
    assert before - free <= 10**9, shown


def test_too_little_memory_is_refused_before_anything_is_loaded(poet):
    before = torch.cuda.memory_allocated()
    with pytest.raises(UsageError, match=r"memory is 0\.30 GB, but the model needs .*: give memory \d\.\dGB"):
        LLM(poet, device="cuda", memory="300MB")
    assert torch.cuda.memory_allocated() == before
