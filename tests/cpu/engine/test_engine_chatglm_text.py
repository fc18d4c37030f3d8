"""ChatGLM-6B from text to text: what `LLM` makes of prompts and conversations."""

import json

import pytest

from warpbus.engine import LLM, SamplingParams
from warpbus.errors import UsageError

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tiny_chatglm):
    return LLM(tiny_chatglm, device="cpu")


def test_texts_end_in_gmask_and_sop(llm):
    special = llm.tokenizer.special_ids
    end = [special["[gMASK]"], special["<sop>"]]
    assert llm.config.prompt_end == end[1]
    texts = ["明月", "  床前\n\t明月光", "<sop>"]
    ids = [[*llm.tokenizer.encode(text), *end] for text in texts]
    answers = llm.generate(texts, GREEDY)
    assert [answer.token_ids for answer in answers] == [one.token_ids for one in llm.generate(ids, GREEDY)]
    assert [answer.prompt_tokens for answer in answers] == [len(one) for one in ids]
    assert [answer.token_ids for answer in answers] == [llm.generate(text, GREEDY)[0].token_ids for text in texts]


def test_a_question_is_a_text_and_a_history_are_rounds(llm):
    first = [{"role": "user", "content": "明月"}]
    assert llm.chat(first, GREEDY).token_ids == llm.generate("明月", GREEDY)[0].token_ids
    talk = [*first, {"role": "assistant", "content": "光"}, {"role": "user", "content": "霜"}]
    written = "[Round 0]\n问：明月\n答：光\n[Round 1]\n问：霜\n答："
    assert llm.chat(talk, GREEDY).token_ids == llm.generate(written, GREEDY)[0].token_ids
    assert "".join(llm.chat(talk, GREEDY, stream=True)) == llm.chat(talk, GREEDY).text


def test_eop_ends_an_answer(llm, tiny_chatglm):
    eop = llm.tokenizer.special_ids["<eop>"]
    assert llm.stop_ids == {eop} == {json.loads((tiny_chatglm / "config.json").read_text())["eos_token_id"]}
    params = SamplingParams(max_tokens=12, logit_bias={eop: 100.0}, temperature=0)
    [answer] = llm.generate("明月", params)
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([eop], "", "stop")


def test_token_ids_need_the_end_of_a_prompt(llm):
    with pytest.raises(UsageError, match=str(llm.config.prompt_end)):
        llm.generate(llm.tokenizer.encode("明月"), GREEDY)
