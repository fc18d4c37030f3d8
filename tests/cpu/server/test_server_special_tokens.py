"""The special tokens that a tokenizer puts around texts, in every request that has a text."""

import pytest
from serving_fakes import FIRST_SPECIAL

from warpbus.models.pooling import EmbeddingHead, TextHeads

PREFIX = (FIRST_SPECIAL, FIRST_SPECIAL + 2)
TEXTS = ["[gMASK]", "<sop>"]
END = FIRST_SPECIAL + 3
HELLO = [{"role": "user", "content": "ab"}]


@pytest.fixture
def http(served, monkeypatch):
    monkeypatch.setattr(served.service.tokenizer, "prompt_prefix", PREFIX, raising=False)
    with served.http() as client:
        yield client


def completion(http, prompt, **fields):
    answer = http.post("/v1/completions", json={"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(http, **body):
    return http.post("/tokenize", json=body).json()["tokens"]


def prompts(served):
    return [prompt for prompt, _ in served.service.asked]


def test_texts_of_completions_begin_with_them(http, served):
    assert completion(http, "abc")["usage"]["prompt_tokens"] == 5
    completion(http, ["d", "e"])
    completion(http, [104, 105])
    completion(http, [[104], [105]])
    assert prompts(served) == [[*PREFIX, *b"abc"], [*PREFIX, *b"d"], [*PREFIX, *b"e"], [104, 105], [104], [105]]


def test_a_request_can_leave_them_out(http, served, monkeypatch):
    monkeypatch.setattr(served.service.tokenizer, "prompt_suffix", (END,), raising=False)
    for added in (False, True, None):
        completion(http, ["a"], add_special_tokens=added)
    completion(http, [97], add_special_tokens=True)
    assert prompts(served) == [[97], [*PREFIX, 97, END], [*PREFIX, 97, END], [97]]
    refused = http.post("/v1/completions", json={"prompt": "a", "add_special_tokens": "yes"})
    assert refused.status_code == 400
    assert "add_special_tokens" in refused.json()["error"]["message"]


def test_a_text_that_spells_them_is_ordinary_text(http, served):
    completion(http, "[gMASK]<sop>a")
    assert prompts(served) == [[*PREFIX, *b"[gMASK]<sop>a"]]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_leaves_them_out_of_its_text_and_names_them_among_its_tokens(http, served, stream):
    with served.openai() as client:
        answer = client.completions.create(model="parrot", prompt="ab", echo=True, logprobs=0, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "abab"
    scores = [choice.logprobs for choice in choices if choice.logprobs]
    assert [token for each in scores for token in each.tokens][:6] == [*TEXTS, *"abab"]
    assert [offset for each in scores for offset in each.text_offset][:6] == [0, 0, 0, 1, 2, 3]
    assert scores[0].token_logprobs[:4] == [None, -2.5, -2.5, -2.5]


def test_log_probabilities_of_a_prompt_begin_with_them(http):
    choice = completion(http, "ab", prompt_logprobs=0, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == [*PREFIX, *b"ab"]
    assert choice["prompt_logprobs"][0] is None
    assert [list(each) for each in choice["prompt_logprobs"][1:]] == [[str(PREFIX[1])], ["97"], ["98"]]


@pytest.mark.parametrize(
    ("most", "kept"),
    [(6, [*PREFIX, *b"cdef"]), (3, [*PREFIX, *b"f"]), (2, [*b"ef"]), (8, [*PREFIX, *b"abcdef"]), (-1, None)],
)
def test_a_truncated_text_keeps_them(http, served, most, kept):
    completion(http, "abcdef", truncate_prompt_tokens=most)
    assert prompts(served) == [kept or [*PREFIX, *b"abcdef"]]


def test_a_truncated_prompt_of_token_ids_keeps_its_end(http, served):
    completion(http, list(range(97, 107)), truncate_prompt_tokens=3)
    completion(http, "abcdef", truncate_prompt_tokens=3, add_special_tokens=False)
    assert prompts(served) == [[104, 105, 106], [*b"def"]]


def test_the_longest_text_that_fits_keeps_them(http, served):
    completion(http, "a" * 5000, truncate_prompt_tokens=-1, max_tokens=48)
    assert prompts(served) == [[*PREFIX, *b"a" * 1998]]


def test_they_count_among_the_tokens_of_the_context(http, served):
    fits = {"prompt": "a" * (2048 - 3), "max_tokens": 1}
    assert http.post("/v1/completions", json=fits).status_code == 200
    refused = http.post("/v1/completions", json={"prompt": "a" * (2048 - 2), "max_tokens": 1})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_texts_of_sglangs_generate_begin_with_them(http, served):
    found = http.post("/generate", json={"text": ["a", "b"]}).json()
    assert [each["meta_info"]["prompt_tokens"] for each in found] == [3, 3]
    http.post("/generate", json={"input_ids": [97]})
    assert prompts(served) == [[*PREFIX, 97], [*PREFIX, 98], [97]]


def test_conversations_get_what_their_template_writes(http, served):
    for added in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
        assert http.post("/v1/chat/completions", json={"messages": HELLO, **added}).status_code == 200
    rendered = b"user: ab\nassistant: "
    assert prompts(served) == [[*rendered], [*rendered], [*PREFIX, *rendered]]
    for body in ({"messages": HELLO}, {"messages": HELLO, "add_special_tokens": True}):
        counted = http.post("/v1/chat/completions/input_tokens", json=body).json()["input_tokens"]
        assert counted == len(tokens(http, **body))


def test_tokenize_has_the_tokens_of_the_requests(http, served):
    assert tokens(http, prompt="a") == tokens(http, content="a") == [*PREFIX, 97]
    assert tokens(http, prompt=["a", "b"], add_special_tokens=True) == [[*PREFIX, 97], [*PREFIX, 98]]
    assert tokens(http, prompt="a", add_special_tokens=False) == tokens(http, content="a", add_special=False) == [97]
    rendered = [*b"user: ab\nassistant: "]
    assert tokens(http, messages=HELLO) == tokens(http, messages=HELLO, add_special_tokens=False) == rendered
    assert tokens(http, messages=HELLO, add_special_tokens=True) == [*PREFIX, *rendered]


def test_tokenize_has_the_tokens_of_embeddings_for_a_model_of_embeddings(served, http, monkeypatch):
    monkeypatch.setattr(served.service.tokenizer, "text_suffix", (END,), raising=False)
    assert tokens(http, prompt="a") == [*PREFIX, 97]
    heads = TextHeads(EmbeddingHead("last", normalized=True))
    monkeypatch.setattr(type(served.models.find(None)), "heads", property(lambda model: heads))
    assert tokens(http, prompt="a") == [*PREFIX, 97, END]
    assert tokens(http, prompt="a", add_special_tokens=False) == [97]


def test_answers_that_go_on_with_a_text(http, served):
    """Completions do, and answers that continue the last message; a space at their beginning is kept."""
    completion(http, "a")
    completion(http, [97])
    http.post("/generate", json={"text": "a"})
    http.post("/v1/chat/completions", json={"messages": HELLO})
    continued = [*HELLO, {"role": "assistant", "content": "c"}]
    wanted = {"continue_final_message": True, "add_generation_prompt": False}
    assert http.post("/v1/chat/completions", json={"messages": continued, **wanted}).status_code == 200
    assert [params.continues_text for _, params in served.service.asked] == [True, True, True, False, True]
