"""`warpbus serve` with small random embedding models and a reranker: the numbers are those of transformers."""

import base64
import json

import httpx
import openai
import pytest
import torch
from reasoning_model import TEMPLATE
from served_process import serving
from tokenizer_files import write_byte_level
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from warpbus.models.tokenizers import load_tokenizer

TEXTS = ["The moon is bright", "moo", "床前明月光", "a" * 300]
SIZES = {
    "vocab_size": 280,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
}
BEGIN, END, YES, NO = 259, 258, 10, 11
"""The tokens that the reranker's tokenizer puts before texts and the embedding model's behind them, and those of the
reranker's answers."""


def write_model(directory, model, files, *, bare=False):
    directory.mkdir()
    (model.model if bare else model).float().save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": [type(model).__name__]}))
    write_byte_level(directory, added=("<think>", "</think>"))
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return directory


TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def special(name):
    return {"SpecialToken": {"id": name, "type_id": 0}}


def write_post_processor(directory, parts, ids):
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokens = {name: {"id": name, "ids": [token], "tokens": [name]} for name, token in ids.items()}
    template = {"type": "TemplateProcessing", "single": parts, "pair": [], "special_tokens": tokens}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": template}))


def listed(*kinds):
    return [
        {"path": f"{at}_{kind}" if at else "", "type": f"sentence_transformers.{kind}"} for at, kind in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    qwen = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True))
    last = {
        "modules.json": listed("Transformer", "Pooling", "Normalize"),
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True},
    }
    embedder = write_model(folder / "last", qwen, last, bare=True)
    write_post_processor(embedder, [TEXT, special("end")], {"end": END})
    llama = LlamaForCausalLM(LlamaConfig(**SIZES))
    mean = {
        "modules.json": listed("Transformer", "Pooling"),
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
    }
    write_model(folder / "mean", llama, mean)
    judge = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False))
    ranking = {
        "modules.json": listed("Transformer", "LogitScore"),
        "1_LogitScore/config.json": {"true_token_id": YES, "false_token_id": NO},
        "tokenizer_config.json": {"chat_template": TEMPLATE},
    }
    write_post_processor(write_model(folder / "judge", judge, ranking), [special("<s>"), TEXT], {"<s>": BEGIN})
    return folder


@pytest.fixture(scope="module")
def url(directories):
    names = ("last", "mean", "judge")
    options = ("--max-num-batched-tokens", "128", "--dtype", "float32")
    with serving(*[str(directories / name) for name in names], *options) as process:
        yield process.url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@torch.no_grad()
def states(directory, texts, after=()):
    """The states of each text behind the final norm, and its ids."""
    model, tokenizer = AutoModel.from_pretrained(directory, dtype=torch.float32), load_tokenizer(directory)
    ids = [[*tokenizer.encode(text), *after] for text in texts]
    return [model(torch.tensor([each])).last_hidden_state[0] for each in ids], ids


def close(found, expected):
    found = torch.tensor(found)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert torch.nn.functional.cosine_similarity(found, expected, dim=-1).min() > 0.999999


def test_last_token_embeddings(client, directories):
    answer = client.embeddings.create(model="last", input=TEXTS)  # base64, decoded by the client
    hidden, ids = states(directories / "last", TEXTS, (END,))
    expected = torch.nn.functional.normalize(torch.stack([each[-1] for each in hidden]), dim=-1)
    close([each.embedding for each in answer.data], expected)
    assert [each.index for each in answer.data] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    by_ids = client.embeddings.create(model="last", input=ids, encoding_format="float")
    close([each.embedding for each in by_ids.data], expected)
    [one] = client.embeddings.create(model="last", input=ids[1], encoding_format="float").data
    close([one.embedding], expected[1:2])
    bare = client.embeddings.create(model="last", input=TEXTS[1], extra_body={"add_special_tokens": False})
    assert bare.usage.prompt_tokens == len(ids[1]) - 1
    [short] = client.embeddings.create(model="last", input=TEXTS[0], dimensions=16).data
    close([short.embedding], torch.nn.functional.normalize(expected[:1, :16], dim=-1))


def test_mean_embeddings(client, url, directories):
    answer = client.embeddings.create(model="mean", input=TEXTS, encoding_format="float")
    hidden, _ = states(directories / "mean", TEXTS)
    expected = torch.stack([each.mean(0) for each in hidden])
    close([each.embedding for each in answer.data], expected)
    body = {"model": "mean", "input": TEXTS[0], "encoding_format": "base64"}
    [coded] = httpx.post(f"{url}/v1/embeddings", json=body, timeout=60).json()["data"]
    raw = bytearray(base64.b64decode(coded["embedding"]))
    torch.testing.assert_close(torch.frombuffer(raw, dtype=torch.float32), expected[0], rtol=1e-3, atol=1e-4)


def test_many_texts_are_computed(client):
    answer = client.embeddings.create(model="last", input=[f"text {at}" for at in range(150)])
    assert [each.index for each in answer.data] == list(range(150))
    assert answer.data[149].embedding == pytest.approx(
        client.embeddings.create(model="last", input="text 149").data[0].embedding, abs=1e-4
    )


def test_refusals(client):
    for model, fields, sentence in [
        ("mean", {"input": "a", "dimensions": 16}, "not normalized"),
        ("last", {"input": "a", "dimensions": 65}, "embeddings have 64"),
        ("mean", {"input": ["a", ""]}, "a text is empty"),
        ("last", {"input": "a" * 2000}, "longer than the model's context length, 1,024"),
        ("last", {"input": [280]}, "280"),
    ]:
        with pytest.raises(openai.BadRequestError, match=sentence):
            client.embeddings.create(model=model, **fields)
    with pytest.raises(openai.NotFoundError, match=r"defines no embeddings: it needs modules\.json"):
        client.embeddings.create(model="judge", input="a")
    cut = client.embeddings.create(model="last", input="a" * 2000, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == 1023


def test_scores_of_embeddings_are_cosines(url, directories):
    body = {"model": "last", "text_1": TEXTS[0], "text_2": TEXTS[1:]}
    answer = httpx.post(f"{url}/v1/score", json=body, timeout=60).json()
    hidden, _ = states(directories / "last", TEXTS, (END,))
    vectors = torch.stack([each[-1] for each in hidden])
    expected = torch.nn.functional.cosine_similarity(vectors[:1], vectors[1:], dim=-1)
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected.tolist(), abs=1e-4)
    body = {"model": "last", "query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}, TEXTS[0]], "top_n": 2}
    ranking = httpx.post(f"{url}/v1/rerank", json=body, timeout=60).json()
    first, second = ranking["results"]
    assert (first["index"], first["document"]) == (2, {"text": TEXTS[0]})
    assert first["relevance_score"] == pytest.approx(1, abs=1e-5)
    assert second["relevance_score"] == pytest.approx(expected[:2].max().item(), abs=1e-4)


@torch.no_grad()
def test_a_reranker_judges_each_document(url, directories):
    body = {
        "model": "judge",
        "query": "moon",
        "documents": TEXTS[:3],
        "instruction": "Find it",
        "return_documents": False,
    }
    ranking = httpx.post(f"{url}/v2/rerank", json=body, timeout=60).json()
    body = {"model": "judge", "text_1": "moon", "text_2": TEXTS[:3], "instruction": "Find it"}
    scores = [each["score"] for each in httpx.post(f"{url}/score", json=body, timeout=60).json()["data"]]
    model = AutoModelForCausalLM.from_pretrained(directories / "judge", dtype=torch.float32)
    expected = []
    for text in TEXTS[:3]:
        system = (
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
            'the answer can only be "yes" or "no".'
        )
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"<Instruct>: Find it\n<Query>: moon\n<Document>: {text}"},
        ]
        asked = {"model": "judge", "messages": messages, "enable_thinking": False}
        ids = httpx.post(f"{url}/tokenize", json=asked, timeout=60).json()["tokens"]
        logits = model(torch.tensor([ids])).logits[0, -1, [NO, YES]]
        expected.append(logits.softmax(-1)[1].item())
    assert scores == pytest.approx(expected, abs=1e-4)
    assert len({round(score, 3) for score in scores}) == 3
    order = sorted(range(3), key=lambda at: -expected[at])
    assert [each["index"] for each in ranking["results"]] == order
    assert "document" not in ranking["results"][0]


@pytest.mark.parametrize(("name", "before"), [("mean", []), ("judge", [BEGIN])])
@torch.no_grad()
def test_probabilities_of_tokens_after_a_query_and_items(url, directories, name, before):
    model = AutoModelForCausalLM.from_pretrained(directories / name, dtype=torch.float32)
    tokenizer = load_tokenizer(directories / name)
    body = {"model": name, "query": "is it ", "items": ["bright", "far"], "label_token_ids": [YES, NO]}
    for softmax, item_first in [(True, False), (False, True)]:
        asked = {**body, "apply_softmax": softmax, "item_first": item_first}
        answer = httpx.post(f"{url}/v1/score", json=asked, timeout=60).json()
        expected = []
        for item in body["items"]:
            parts = [tokenizer.encode(body["query"]), tokenizer.encode(item)]
            ids = before + [token for part in (reversed(parts) if item_first else parts) for token in part]
            logits = model(torch.tensor([ids])).logits[0, -1]
            found = logits[[YES, NO]].softmax(-1) if softmax else logits.softmax(-1)[[YES, NO]]
            expected.append(found.tolist())
        assert answer["object"] == "scoring"
        for got, wanted in zip(answer["scores"], expected, strict=True):
            assert got == pytest.approx(wanted, rel=1e-3, abs=1e-6)
