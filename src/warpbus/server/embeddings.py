"""POST /v1/embeddings, /v1/score and /v1/rerank, for models whose checkpoint defines vectors or scores of texts."""

from __future__ import annotations

import base64
import math
import struct
import time
from collections import abc
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request

from warpbus.engine import PromptPooling, SamplingParams, TextPiece
from warpbus.errors import UsageError
from warpbus.models.pooling import EmbeddingHead, LogitScoreHead, TextHeads
from warpbus.models.tokenizers import encode_text
from warpbus.server.answer_schema import ErrorAnswer, documented
from warpbus.server.conversations import named_model
from warpbus.server.embeddings_schema import (
    EmbeddingList,
    EmbeddingRequest,
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from warpbus.server.generation import GenerationRequest, RequestRecord, unless_gone
from warpbus.server.guard import cache_salt
from warpbus.server.params import room
from warpbus.server.registry import Model, Models
from warpbus.server.request_error import RequestError
from warpbus.server.responses import Responder, new_id

# Requests to the engine, which computes them in batches; further ones would fill its queue.
_AT_ONCE = 64

Vector = abc.Sequence[float]

_NOT_DEFINED: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorAnswer, "description": "no such model, or its checkpoint defines no vectors or scores"}
}

# The format in which Qwen3-Reranker and its descendants were trained.
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def add_routes(app: FastAPI, models: Models, responder: Responder) -> None:
    """Add the routes to the application."""
    options = responder.options

    @app.post("/v1/embeddings", **documented(EmbeddingList, also=_NOT_DEFINED))
    async def embeddings(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
        """The vectors of texts."""
        work = _TextWork(named_model(models, body, request, options), request, responder, body.truncate_prompt_tokens)
        added = body.add_special_tokens is not False
        found = await work.embed(_inputs(body.input), body.dimensions, add_special_tokens=added)
        encode = _base64 if body.encoding_format == "base64" else list
        data = [{"object": "embedding", "index": at, "embedding": encode(each)} for at, each in enumerate(found)]
        return {"id": new_id("embd"), "object": "list", **work.envelope(), "data": data}

    @app.post("/score", include_in_schema=False)
    @app.post("/v1/score", **documented(ScoreList, also=_NOT_DEFINED))
    async def score(body: ScoreRequest, request: Request) -> dict[str, Any]:
        """How relevant texts are to each other; or the probabilities of some tokens after a query with each item."""
        work = _TextWork(named_model(models, body, request, options), request, responder, body.truncate_prompt_tokens)
        if body.text_1 is None or body.text_2 is None:
            scores = await _score_labels(work, body)
            return {"id": new_id("score"), "object": "scoring", **work.envelope(), "scores": scores}
        second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
        first = [body.text_1] * len(second) if isinstance(body.text_1, str) else body.text_1
        found = await work.compare(first, second, body.instruction)
        data = [{"index": at, "object": "score", "score": each} for at, each in enumerate(found)]
        return {"id": new_id("score"), "object": "list", **work.envelope(), "data": data}

    @app.post("/v2/rerank", include_in_schema=False)
    @app.post("/rerank", include_in_schema=False)
    @app.post("/v1/rerank", **documented(Ranking, also=_NOT_DEFINED))
    async def rerank(body: RerankRequest, request: Request) -> dict[str, Any]:
        """Order documents by their relevance to a query."""
        work = _TextWork(named_model(models, body, request, options), request, responder, body.truncate_prompt_tokens)
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        found = await work.compare([body.query] * len(texts), texts, body.instruction)
        order = sorted(range(len(texts)), key=lambda at: (-found[at], at))[: body.top_n or None]
        document = [{"document": {"text": text}} if body.return_documents else {} for text in texts]
        results = [{"index": at, "relevance_score": found[at], **document[at]} for at in order]
        envelope = work.envelope()
        return {"id": new_id("rerank"), "model": envelope["model"], "results": results, "usage": envelope["usage"]}


@dataclass
class _TextWork:
    """The vectors and scores of one HTTP request.

    Attributes:
        cut: as `truncate_prompt_tokens`.
        tokens: of all prompts, and how many of them the prefix cache had, when the vectors are there.
    """

    model: Model
    request: Request
    responder: Responder
    cut: int | None
    tokens: tuple[int, int] = (0, 0)

    async def embed(
        self,
        texts: abc.Sequence[str | list[int]],
        dimensions: int | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[Vector]:
        """The embeddings of texts.

        Raises:
            RequestError: the checkpoint defines no embeddings, or has fewer `dimensions`.
            WarpbusError: as `Generations.pieces`.
        """
        heads = self.heads()
        head = heads.embedding
        if head is None:
            raise self._not_served(
                "embeddings", f"the checkpoint of {self.model.name} defines no embeddings: it needs {heads.missing}"
            )
        tokenizer = self.model.service.tokenizer

        def encoded(text: str | list[int]) -> list[int]:
            if not isinstance(text, str):
                return text
            return encode_text(tokenizer, text) if add_special_tokens else tokenizer.encode(text)

        prompts = await self._in_thread(lambda: [encoded(text) for text in texts])
        found = await self.vectors(prompts, PromptPooling(head.mode))
        return [_shortened(vector, head, dimensions) for vector in found]

    async def compare(
        self, first: abc.Sequence[str], second: abc.Sequence[str], instruction: str | None
    ) -> list[float]:
        """The score of each pair: the reranker's probability, or the cosine of embeddings. Raises: as `embed`."""
        heads = self.heads()
        if heads.ranking is not None:
            return await self._judge(first, second, heads.ranking, instruction or heads.instruction or _INSTRUCTION)
        if heads.embedding is None:
            raise self._not_served(
                "scoring",
                f"the checkpoint of {self.model.name} defines neither embeddings nor scores: it needs {heads.missing}; "
                "or, as a reranker, 1_LogitScore/config.json, or classifier_from_token in config.json",
            )
        distinct = list(dict.fromkeys([*first, *second]))
        found = dict(zip(distinct, await self.embed(distinct), strict=True))
        return [_cosine(found[a], found[b]) for a, b in zip(first, second, strict=True)]

    async def _judge(
        self, queries: abc.Sequence[str], documents: abc.Sequence[str], head: LogitScoreHead, instruction: str
    ) -> list[float]:
        template = self.model.service.template
        pairs = list(zip(queries, documents, strict=True))

        def prompts() -> list[list[int]]:
            return [
                template.render(
                    [
                        {"role": "system", "content": _JUDGE},
                        {"role": "user", "content": f"<Instruct>: {instruction}\n<Query>: {q}\n<Document>: {d}"},
                    ],
                    variables={"enable_thinking": False},
                )
                for q, d in pairs
            ]

        tokens = tuple(token for token in (head.true_token, head.false_token) if token is not None)
        found = await self.vectors(await self._in_thread(prompts), PromptPooling("logits", tokens))
        # The odds of two logits, or a single one.
        return [_sigmoid(true - (false[0] if false else 0.0)) for true, *false in found]

    async def vectors(self, prompts: abc.Sequence[list[int]], pooling: PromptPooling) -> list[Vector]:
        """What the engine computes for prompts; see `PromptPooling`."""
        service = self.model.awake()
        salt = cache_salt(self.request.scope)
        params = SamplingParams(temperature=0.0, max_tokens=1, pooling=pooling)
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            cut = service.max_model_len - 1 if self.cut == -1 else self.cut
            kept = prompt if cut is None else prompt[-cut:] if cut else []
            if not kept:
                raise RequestError(400, "a text is empty: it has no token", param="input")
            room(kept, service.max_model_len)
            requests.append(GenerationRequest(kept, params, salt, silent=True))
        found: list[Vector] = []
        prompt_tokens = cached_tokens = 0
        for begin in range(0, len(requests), _AT_ONCE):
            part = requests[begin : begin + _AT_ONCE]
            answers, usage = await self.responder.gather(self.request, self.model, part)
            found += [_vector(pieces) for pieces in answers]
            prompt_tokens, cached_tokens = prompt_tokens + usage.prompt_tokens, cached_tokens + usage.cached_tokens
        self.tokens = prompt_tokens, cached_tokens
        RequestRecord.of(self.request.scope).prompt_tokens = prompt_tokens
        return found

    def heads(self) -> TextHeads:
        """What the checkpoint defines; those of an adapter's model are not the adapter's, but hold for it, too."""
        self.model.awake()
        return self.model.heads

    def envelope(self) -> dict[str, Any]:
        """The fields that all answers have."""
        tokens, cached = self.tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        return {
            "created": int(time.time()),
            "model": self.model.name,
            "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}},
        }

    async def encode(self, texts: abc.Sequence[str | abc.Sequence[int]]) -> list[list[int]]:
        """The ids of texts without special tokens."""
        encode = self.model.service.tokenizer.encode
        return await self._in_thread(lambda: [encode(each) if isinstance(each, str) else list(each) for each in texts])

    async def _in_thread(self, work: abc.Callable[[], list[list[int]]]) -> list[list[int]]:
        return await unless_gone(self.request.receive, self.model.in_thread(work))

    def _not_served(self, what: str, message: str) -> RequestError:
        return RequestError(404, message, param="model", code=f"{what}_not_supported")


def _inputs(given: Any) -> list[str | list[int]]:
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return list(given)


async def _score_labels(work: _TextWork, body: ScoreRequest) -> list[list[float]]:
    """The probabilities of `label_token_ids` after query and item: among all tokens, or by softmax among them."""
    labels = tuple(body.label_token_ids or ())
    items = [body.items] if isinstance(body.items, str) else list(body.items or ())
    query, *parts = await work.encode([body.query or "", *items])
    # The special tokens of a prompt of a completion, around both.
    tokenizer, kinds = work.model.service.tokenizer, [isinstance(body.query, str), isinstance(items[0], str)]
    begins, ends = reversed(kinds) if body.item_first else kinds
    before, after = tokenizer.prompt_prefix if begins else (), tokenizer.prompt_suffix if ends else ()
    prompts = [
        [*before, *part, *query, *after] if body.item_first else [*before, *query, *part, *after] for part in parts
    ]
    if body.apply_softmax:
        return [_softmax(values) for values in await work.vectors(prompts, PromptPooling("logits", labels))]
    return [list(each) for each in await work.vectors(prompts, PromptPooling("probabilities", labels))]


def _vector(pieces: abc.Sequence[TextPiece]) -> Vector:
    found = next((piece.pooled for piece in pieces if piece.pooled is not None), None)
    if found is None:
        raise UsageError("the engine computed no vector of this text: send the request again")
    return found


def _shortened(vector: Vector, head: EmbeddingHead, dimensions: int | None) -> Vector:
    """The first `dimensions` of a vector; normalized, if the model's are."""
    if dimensions is not None and not head.normalized:
        raise RequestError(
            400,
            "dimensions: the embeddings of this model are not normalized, so that a part of one has no defined length: "
            "leave it out",
            param="dimensions",
        )
    if dimensions is not None and dimensions > len(vector):
        raise RequestError(400, f"dimensions is {dimensions}: embeddings have {len(vector)}", param="dimensions")
    kept = vector[:dimensions]
    if not head.normalized:
        return kept
    length = math.sqrt(math.fsum(value * value for value in kept)) or 1.0
    return [value / length for value in kept]


def _cosine(a: Vector, b: Vector) -> float:
    norm = math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b)) or 1.0
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norm


def _softmax(values: Vector) -> list[float]:
    most = max(values)
    shares = [math.exp(value - most) for value in values]
    return [share / math.fsum(shares) for share in shares]


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def _base64(vector: Vector) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
