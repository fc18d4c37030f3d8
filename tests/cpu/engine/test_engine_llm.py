import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from chatglm_files import write_chatglm6b

from warpbus.engine import LLM, Chunk, Grammar, SamplingParams
from warpbus.engine.answer_decoder import answer_decoder
from warpbus.engine.grammar import GrammarMatcher
from warpbus.engine.runner import Runner
from warpbus.errors import CheckpointError, ContextLengthError, DeviceError, NumericError, UsageError, WarpbusError
from warpbus.models.templates import RoleTokenTemplate
from warpbus.models.tokenizers import load_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=24)
ASKED = [{"role": "user", "content": "明月"}]
PROMPTS = ["床前明月光", "The moon is bright, and I think of home", "1", "举头望明月，低头思故乡。"]


@pytest.fixture(scope="module")
def llm(tiny_glm):
    return LLM(tiny_glm, device="cpu")


def test_what_it_exposes(llm):
    assert (llm.device, llm.dtype, llm.max_model_len) == (torch.device("cpu"), torch.float32, 512)
    assert llm.schemes.distinct() == ()
    assert llm.config == llm.model.config
    assert not llm.model.training
    specials = llm.tokenizer.special_ids
    assert llm.stop_ids == {specials[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>")}
    assert llm.describe() == "glm, 113,216 parameters, float32, cpu, context 512"


def test_greedy_tokens_are_the_models_best(llm):
    answer = llm.generate(PROMPTS[0], GREEDY)[0]
    ids = llm.tokenizer.encode(PROMPTS[0])
    assert answer.prompt_tokens == len(ids)
    for token in answer.token_ids:
        with torch.no_grad():
            assert llm.model(torch.tensor([ids]))[0, -1].argmax() == token
        ids.append(token)
    assert answer.text == llm.tokenizer.decode(answer.token_ids)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=24),
        SamplingParams(seed=1, max_tokens=24),
        SamplingParams(seed=2, top_p=0.7, temperature=0.8, repetition_penalty=1.2, max_tokens=24),
        SamplingParams(seed=3, top_k=5, max_tokens=24),
    ],
)
def test_a_batch_answers_as_each_prompt_alone(llm, params):
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert [answer.text for answer in together] == [answer.text for answer in alone]


def test_rows_that_end_early_do_not_disturb_the_others(llm):
    each = [SamplingParams(temperature=0, max_tokens=tokens) for tokens in (3, 20, 1, 11)]
    together = llm.generate(PROMPTS, each)
    assert [len(answer.token_ids) for answer in together] == [3, 20, 1, 11]
    for prompt, params, answer in zip(PROMPTS, each, together, strict=True):
        assert answer.token_ids == llm.generate(prompt, params)[0].token_ids


def test_more_prompts_than_a_batch_holds(llm, tiny_glm):
    narrow = LLM(tiny_glm, device="cpu", max_num_seqs=2)
    prompts = PROMPTS + PROMPTS[:1]
    assert [answer.text for answer in narrow.generate(prompts, GREEDY)] == [
        answer.text for answer in llm.generate(prompts, GREEDY)
    ]


def test_streamed_pieces_add_up_and_the_last_brings_the_completion(llm):
    whole = llm.generate(PROMPTS, GREEDY)
    texts, completions = [""] * len(PROMPTS), {}
    for chunk in llm.generate(PROMPTS, GREEDY, stream=True):
        assert chunk.index not in completions
        texts[chunk.index] += chunk.text
        if chunk.completion is not None:
            completions[chunk.index] = chunk.completion
    assert texts == [answer.text for answer in whole]
    assert [completions[index].token_ids for index in range(len(PROMPTS))] == [answer.token_ids for answer in whole]


def test_the_same_seed_draws_the_same_and_none_draws_anew(llm):
    def tokens(seed):
        return llm.generate("1", SamplingParams(seed=seed, max_tokens=20))[0].token_ids

    assert tokens(1) == tokens(1)
    assert len({tuple(tokens(seed)) for seed in (1, 2, None, None)}) == 4


def test_a_stop_string_ends_the_text_before_it(llm):
    whole = llm.generate(PROMPTS[0], GREEDY)[0].text
    stop = whole[5:8]
    params = SamplingParams(temperature=0, max_tokens=24, stop=(stop,))
    answer = llm.generate(PROMPTS[0], params)[0]
    assert (answer.text, answer.finish_reason) == (whole[: whole.index(stop)], "stop")
    streamed = "".join(chunk.text for chunk in llm.generate(PROMPTS[0], params, stream=True))
    assert streamed == answer.text


def test_a_stop_token_ends_the_answer(llm, tiny_glm):
    whole = llm.generate(PROMPTS[0], GREEDY)[0]
    assert whole.finish_reason == "length"
    token = whole.token_ids[9]
    stopping = LLM(tiny_glm, device="cpu")
    stopping.stop_ids = frozenset([token])
    answer = stopping.generate(PROMPTS[0], GREEDY)[0]
    expected = whole.token_ids[: whole.token_ids.index(token) + 1]
    assert (answer.token_ids, answer.finish_reason) == (expected, "stop")
    assert answer.text == llm.tokenizer.decode(expected[:-1])


def test_token_ids_are_prompts_too(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    assert llm.generate(ids, GREEDY)[0].token_ids == expected
    assert [answer.token_ids for answer in llm.generate([ids, tuple(ids)], GREEDY)] == [expected] * 2


def test_texts_begin_as_the_models_texts_do(llm, monkeypatch):
    ids = [1, 2, *llm.tokenizer.encode(PROMPTS[0])]
    expected = llm.generate(ids, GREEDY)[0]
    bare, chat = llm.generate(PROMPTS[0], GREEDY)[0], llm.render(ASKED)
    monkeypatch.setattr(llm.tokenizer, "prompt_prefix", (1, 2))
    found = llm.generate(PROMPTS[0], GREEDY)[0]
    assert (found.token_ids, found.prompt_tokens) == (expected.token_ids, bare.prompt_tokens + 2)
    assert found.token_ids != bare.token_ids
    assert llm.generate(ids[2:], GREEDY)[0].token_ids == bare.token_ids
    assert llm.render(ASKED) == chat
    assert llm.generate("", GREEDY)[0].prompt_tokens == 2


def test_chat_renders_the_conversation(llm):
    messages = [{"role": "system", "content": "古诗"}, {"role": "user", "content": "明月"}]
    expected = llm.generate(llm.template.render(messages), GREEDY)[0]
    answer = llm.chat(messages, GREEDY)
    assert (answer.token_ids, answer.prompt_tokens) == (expected.token_ids, expected.prompt_tokens)
    assert "".join(llm.chat(messages, GREEDY, stream=True)) == expected.text


def test_special_tokens_in_a_message_are_only_text(llm):
    ids = llm.render([{"role": "user", "content": "<|assistant|>"}])
    assert ids.count(llm.tokenizer.special_ids["<|assistant|>"]) == 1


def test_the_answer_is_cut_to_the_room_in_the_context(tiny_glm):
    short = LLM(tiny_glm, device="cpu", max_model_len=16)
    answer = short.generate([list(range(10, 22))], SamplingParams(temperature=0, max_tokens=100))[0]
    assert (len(answer.token_ids), answer.finish_reason) == (4, "length")


def test_a_prompt_that_leaves_no_room_is_refused(llm, tiny_glm):
    short = LLM(tiny_glm, device="cpu", max_model_len=16)
    with pytest.raises(
        ContextLengthError, match=r"prompt 1 has 16 tokens, the context holds 16 .* raise max_model_len"
    ):
        short.generate([[10], list(range(10, 26))])
    with pytest.raises(ContextLengthError, match=r"prompt 0 has 5,000 tokens, the context holds 512 .*: shorten it$"):
        llm.generate([10] * 5000)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt 0 is empty"),
        (["1", ""], "prompt 1 is empty"),
        ([], "the list is empty"),
        ([[10], []], "prompt 1 is empty"),
        ([400], "token id 400 is not in the vocabulary of 400"),
        ([10, -1], "token id -1 is not"),
        ([3.5], "prompt 0: expected a text or a list of token ids, got float"),
        ([["1"]], "prompt 0: expected a text or a list of token ids, got list"),
        ([b"1"], "prompt 0: expected a text or a list of token ids, got bytes"),
        (b"1", "prompts: expected a text, token ids or a list of them, got bytes"),
        (torch.tensor([10, 11]), "got Tensor; an array or a tensor becomes a list by tolist"),
        (iter(["1"]), "got list_iterator"),
        (None, "got NoneType"),
    ],
)
def test_prompts_that_are_none_are_refused(llm, prompts, message):
    with pytest.raises(UsageError, match=message):
        llm.generate(prompts)


def test_errors_come_before_the_stream_begins(llm):
    with pytest.raises(UsageError, match="empty"):
        llm.generate("", stream=True)
    with pytest.raises(UsageError, match="messages"):
        llm.chat([], stream=True)
    with pytest.raises(UsageError, match="2 for 1 prompts"):
        llm.generate("1", [GREEDY, GREEDY], stream=True)
    with pytest.raises(UsageError, match="params: expected SamplingParams, got str"):
        llm.generate("1", {"temperature": 0})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "gpu"}, UsageError, "give auto, cpu, cuda or cuda:N"),
        ({"dtype": "int8"}, UsageError, "dtype is 'int8'"),
        ({"max_model_len": 513}, UsageError, "max_model_len is 513: give 2 to 512"),
        ({"max_model_len": 1}, UsageError, "max_model_len is 1"),
        ({"max_num_seqs": 0}, UsageError, "max_num_seqs is 0"),
        ({"memory": "6GB"}, UsageError, "--memory 6GB limits GPU memory, but this run is on the CPU"),
        ({"kv_dtype": "int3"}, UsageError, "kv_dtype is 'int3': give auto, int8, fp8, int4, unquantized"),
        ({"activation_dtype": "fp4"}, UsageError, "activation_dtype is 'fp4': give auto, fp8, int8"),
        ({"activation_dtype": "int8"}, UsageError, "activation_dtype int8 needs matrices .* on a GPU"),
        ({"activation_dtype": "fp8", "memory": "6GB"}, UsageError, "leave out either memory or activation_dtype"),
    ],
)
def test_arguments_out_of_range_are_refused(tiny_glm, arguments, error, message):
    with pytest.raises(error, match=message):
        LLM(tiny_glm, **{"device": "cpu"} | arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
def test_a_gpu_that_is_not_there_is_refused(tiny_glm):
    with pytest.raises(DeviceError, match="use --device cpu"):
        LLM(tiny_glm, device="cuda")


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(tmp_path / "nowhere", device="cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_another_dtype(tiny_glm, dtype):
    llm = LLM(tiny_glm, device="cpu", dtype=dtype)
    assert llm.dtype == llm.model.embedding.weight.dtype == torch.bfloat16
    assert len(llm.generate(PROMPTS, GREEDY)[1].token_ids) == 24


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupted_answer_leaves_the_model_usable(tiny_glm, llm, monkeypatch, at):
    """Nothing is found later of a prompt that was not read to its end."""
    prompts = [*PROMPTS, PROMPTS[1] * 3]
    expected = llm.generate(prompts, GREEDY)
    fresh = LLM(tiny_glm, device="cpu")
    scores, steps = Runner._scores, []

    def interrupted(*arguments):
        steps.append(1)
        if len(steps) == at:
            raise KeyboardInterrupt
        return scores(*arguments)

    monkeypatch.setattr(Runner, "_scores", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fresh.generate(prompts, GREEDY)
    assert not fresh.engine.has_work
    assert [answer.token_ids for answer in fresh.generate(prompts, GREEDY)] == [each.token_ids for each in expected]


def test_an_interrupted_answer_disturbs_no_other_stream(llm, monkeypatch):
    params = SamplingParams(seed=4, max_tokens=20)
    expected = llm.generate("1", params)[0]
    other = llm.generate("1", params, stream=True)
    texts = [next(other).text]
    scores = Runner._scores

    def interrupted(*_):
        monkeypatch.setattr(Runner, "_scores", scores)
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "_scores", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[1] * 3, GREEDY)
    for chunk in other:
        texts.append(chunk.text)
        completion = chunk.completion
    assert "".join(texts) == expected.text
    assert completion.token_ids == expected.token_ids


def test_a_stream_may_be_left_and_two_may_run_at_once(llm):
    expected = llm.generate("1", GREEDY)[0].text
    left = llm.generate("1", GREEDY, stream=True)
    next(left)
    assert llm.engine.stats().running == 1
    left.close()
    stats = llm.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, llm._inboxes) == (0, 0, 0, {})
    llm.generate("1", GREEDY, stream=True).close()  # not even begun
    assert not llm.engine.has_work
    first, second = llm.generate("1", GREEDY, stream=True), llm.generate("1", GREEDY, stream=True)
    texts = ["", ""]
    for one, other in zip(first, second, strict=True):
        texts[0] += one.text
        texts[1] += other.text
    assert texts == [expected, expected]


def test_times_are_measured_without_what_the_caller_does(llm, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    launch = Runner.launch

    def slow(self, decoding, pieces, *drafts):
        now[0] += 2.0 if pieces else 0.5
        return launch(self, decoding, pieces, *drafts)

    monkeypatch.setattr(Runner, "launch", slow)
    for chunk in llm.generate("1", SamplingParams(temperature=0, max_tokens=11), stream=True):
        now[0] += 100.0
        answer = chunk.completion
    assert (answer.prefill_seconds, answer.decode_seconds, answer.seconds) == (2.0, 5.0, 7.0)
    assert answer.tokens_per_second == pytest.approx(11 / 7)


def test_threads_answer_together(llm):
    each = [SamplingParams(seed=at, max_tokens=15) for at in range(6)]
    prompts = [PROMPTS[at % 4] * (1 + at // 2) for at in range(6)]
    expected = [llm.generate(prompt, params)[0].token_ids for prompt, params in zip(prompts, each, strict=True)]
    steps = llm.engine.stats().steps
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda at: llm.generate(prompts[at], each[at])[0].token_ids, range(6)))
    assert found == expected
    assert llm.engine.stats().steps - steps < 6 * 15
    assert llm.engine.stats().blocks_used == 0


def test_a_beginning_that_prompts_share_is_computed_once(llm):
    prompt = PROMPTS[1] * 4
    before = llm.engine.stats().prefix_hits
    answers = llm.generate([prompt] * 3, GREEDY)
    assert llm.engine.stats().prefix_hits - before >= 2 * 32
    assert len({answer.text for answer in answers}) == 1


def test_answers_belong_to_their_grammar_beside_those_that_have_none(llm):
    words = ["明月", "明月光", "春夜"]
    choice = SamplingParams(seed=1, max_tokens=24, grammar=Grammar("choice", json.dumps(words)))
    each = [choice, GREEDY, replace(choice, seed=2), SamplingParams(seed=1, max_tokens=24)]
    answers = llm.generate(PROMPTS, each)
    for answer in (answers[0], answers[2]):
        assert (answer.text in words, answer.finish_reason) == (True, "stop")
    for prompt, params, answer in zip(PROMPTS, each, answers, strict=True):
        assert answer.token_ids == llm.generate(prompt, params)[0].token_ids


def test_what_streams_leave_unread_is_kept_for_them(llm):
    """One stream's steps bring the other's tokens."""
    expected = llm.generate(PROMPTS[0], GREEDY)[0]
    slow = llm.generate(PROMPTS[0], GREEDY, stream=True)
    first = next(slow).text
    llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=40))
    steps = llm.engine.stats().steps
    assert first + "".join(chunk.text for chunk in slow) == expected.text
    assert llm.engine.stats().steps == steps


def test_damaged_weights_are_a_numeric_error(tiny_glm):
    llm = LLM(tiny_glm, device="cpu")
    llm.model.final_norm.weight[3] = float("nan")
    with pytest.raises(NumericError, match="prompt 0"):
        llm.generate("1", GREEDY)


def test_a_prompt_that_fails_ends_its_own_call_alone(llm, monkeypatch):
    def failing(*_):
        raise ValueError("no mask today")

    expected = llm.generate(PROMPTS[1], GREEDY)[0]
    stream = llm.generate(PROMPTS[1], GREEDY, stream=True)
    chunks = [next(stream)]
    with monkeypatch.context() as patch:
        patch.setattr(GrammarMatcher, "fill", failing)
        bound = replace(GREEDY, ignore_eos=False, grammar=Grammar("regex", "(ab){3}c?"))
        with pytest.raises(WarpbusError, match=r"^prompt 1: the engine cannot handle .* \(ValueError: no mask today\)"):
            llm.generate(PROMPTS[:2], [GREEDY, bound])
    chunks += stream
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert chunks[-1].completion.token_ids == expected.token_ids
    assert not llm.engine.has_work


def test_a_grammar_and_logprobs(llm):
    kinds = SamplingParams(temperature=0, max_tokens=40, logprobs=2, grammar=Grammar("regex", "(ab){3}c?")), GREEDY
    bound, free = llm.generate(PROMPTS[:2], kinds)
    assert bound.text in ("ababab", "abababc")
    assert [logprob.token for logprob in bound.logprobs] == bound.token_ids
    assert all(len(logprob.top) == 2 and logprob.logprob < 0 for logprob in bound.logprobs)
    assert free.logprobs is None
    with pytest.raises(UsageError, match="regex cannot be used"):
        llm.generate(PROMPTS[0], SamplingParams(grammar=Grammar("regex", "(")))


def test_the_line_for_a_tools_name_is_not_shown(tiny_glm, monkeypatch):
    llm = LLM(tiny_glm, device="cpu")
    pieces = ["\n", " ", "你", "好\n"]
    chunks = [*(Chunk(0, piece) for piece in pieces), Chunk(0, "\n!", llm.chat(ASKED, GREEDY))]
    assert list(llm.without_first_line(chunks)) == chunks
    whole = llm.chat(ASKED, GREEDY)
    monkeypatch.setattr(llm, "template", RoleTokenTemplate(llm.tokenizer, sop="<sop>", stop_ids=()))
    assert [chunk.text for chunk in llm.without_first_line(chunks)] == ["", "", "你", "好\n", "\n!"]
    assert list(llm.without_first_line([Chunk(0, "\n", whole)])) == [Chunk(0, "", whole)]
    answer = llm.chat(ASKED, GREEDY)
    assert answer.text == llm.generate(llm.render(ASKED), GREEDY)[0].text.lstrip() != ""
    assert "".join(llm.chat(ASKED, GREEDY, stream=True)) == answer.text


def test_an_answer_that_goes_on_with_a_text_keeps_its_first_space(tmp_path):
    """As transformers decodes the whole; an answer to a conversation, or behind a special token, has none."""
    tokenizer = load_tokenizer(write_chatglm6b(tmp_path, early=False))
    space, moon = tokenizer.encode("月")
    text, special = tokenizer.encode("明"), tokenizer.special_ids["<sop>"]
    grammar = Grammar("regex", "a")

    def said(prompt: list[int], params: SamplingParams) -> str:
        stream = answer_decoder(tokenizer, prompt, params)
        return "".join(map(stream.push, [space, moon])) + stream.flush()

    assert said(text, SamplingParams(continues_text=True)) == " 月"
    assert said(text, SamplingParams()) == "月"
    assert said([*text, special], SamplingParams(continues_text=True)) == "月"
    assert said([*text, special], SamplingParams(grammar=grammar)) == " 月"
    with pytest.raises(UsageError, match="continues_text is 1: give True or False"):
        SamplingParams(continues_text=1)


def test_prompts_that_are_texts_are_continued(llm, monkeypatch):
    seen = []

    def spied(tokenizer, prompt, params):
        seen.append(params.continues_text)
        return answer_decoder(tokenizer, prompt, params)

    monkeypatch.setattr("warpbus.engine.llm.answer_decoder", spied)
    llm.generate("明月", GREEDY)
    llm.generate(["明", "月"], GREEDY)
    llm.generate(llm.tokenizer.encode("明月"), GREEDY)
    llm.generate(llm.tokenizer.encode("明月"), replace(GREEDY, continues_text=True))
    llm.chat(ASKED, GREEDY)
    assert seen == [True, True, True, False, True, False]
