"""The same tokens as transformers' `generate`, greedily and with a repetition penalty."""

import pytest
import torch
from transformers import GlmForCausalLM

from warpbus.engine import LLM, SamplingParams


@pytest.fixture(scope="module")
def oracle(tiny_glm):
    return GlmForCausalLM.from_pretrained(tiny_glm, dtype=torch.float32)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_answers_are_those_of_transformers(tiny_glm, oracle, penalty):
    llm = LLM(tiny_glm, device="cpu")
    prompts = [[5, 60, 61, 62], [70, 71, 70, 71, 70, 71, 80]]
    params = SamplingParams(temperature=0, repetition_penalty=penalty, max_tokens=30)
    for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True):
        ids = oracle.generate(
            torch.tensor([prompt]),
            max_new_tokens=30,
            do_sample=False,
            repetition_penalty=penalty,
            eos_token_id=sorted(llm.stop_ids),
            pad_token_id=0,
        )
        assert answer.token_ids == ids[0, len(prompt) :].tolist()
