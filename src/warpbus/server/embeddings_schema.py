"""The bodies of requests for embeddings, scores and rankings, and of their answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from warpbus.server.answer_schema import TokenDetails
from warpbus.server.schema import Body, FilledText, NamesModel, TokenId, TokenIds
from warpbus.server.schema_rules import Rule, absent, either, given

MOST_TEXTS = 1024
"""Texts of one request; the engine computes them in batches."""

Texts = Annotated[list[FilledText], Field(fail_fast=True, min_length=1, max_length=MOST_TEXTS)]
Items = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_TEXTS)]
Truncation = Annotated[
    Annotated[int, Field(ge=-1, le=-1)] | Annotated[int, Field(ge=1, lt=2**31)] | None,
    Field(description="keeps so many tokens of each text's end; -1: all that fit"),
]
_FILLED: Rule = {"minLength": 1, "minItems": 1}


class EmbeddingRequest(NamesModel):
    """POST /v1/embeddings."""

    input: (
        FilledText
        | Texts
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[
            list[Annotated[TokenIds, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=MOST_TEXTS)
        ]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, lt=2**31, description="keeps the first ones, and normalizes again")
    add_special_tokens: bool | None = Field(
        None, description="false: texts get none of the special tokens that the tokenizer puts around them"
    )
    truncate_prompt_tokens: Truncation = None
    user: str | None = Field(None, description="not used")


class ScoreRequest(NamesModel):
    """POST /v1/score: two texts, or one and several; or, as SGLang has it, a query with items and tokens."""

    text_1: FilledText | Texts | None = None
    text_2: FilledText | Texts | None = Field(None, description="a list: as long as that of text_1, or one text there")
    instruction: str | None = Field(None, description="of a reranker; by default its own")
    query: str | TokenIds | None = None
    items: str | Items | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_TEXTS)] | None = None
    label_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=1024)] | None = None
    apply_softmax: bool = False
    item_first: bool = False
    truncate_prompt_tokens: Truncation = None

    rules = (
        either(
            {"allOf": [given("text_1", "text_2"), absent("query", "items", "label_token_ids")]},
            {"allOf": [given("query", "items", "label_token_ids"), either(absent("text_1"), absent("text_2"))]},
        ),
        either(
            {"properties": {"text_1": {"type": ["string", "null"]}}},
            {"properties": {"text_2": {"type": ["array", "null"]}}},
        ),
        either({"properties": {"query": _FILLED}}, {"properties": {"items": {**_FILLED, "items": _FILLED}}}),
    )

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        texts, items = (self.text_1, self.text_2), (self.query, self.items, self.label_token_ids)
        if None in texts and None in items:
            raise ValueError("give text_1 and text_2, or query, items and label_token_ids")
        if None not in texts and any(value is not None for value in items):
            raise ValueError(
                "text_1 and text_2 do not go with query, items and label_token_ids: give one of both forms"
            )
        many = [len(value) for value in texts if isinstance(value, list)]
        if len(many) == 2 and many[0] != many[1]:
            raise ValueError("text_1 and text_2 are lists of different lengths")
        if isinstance(self.text_1, list) and isinstance(self.text_2, str):
            raise ValueError("text_1 is a list and text_2 is not: give the single text as text_1")
        if self.query is not None and not self.query and not (self.items and all(self.items)):
            raise ValueError("query and one of items are empty: there is no token to be scored after")
        return self


class RankedDocument(Body):
    """A document to be ranked."""

    text: str


class RerankRequest(NamesModel):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | RankedDocument], Field(fail_fast=True, min_length=1, max_length=MOST_TEXTS)]
    top_n: int | None = Field(None, ge=0, lt=2**31, description="the most results; 0: all")
    return_documents: bool = True
    instruction: str | None = Field(None, description="of a reranker; by default its own")
    truncate_prompt_tokens: Truncation = None


class VectorUsage(BaseModel):
    """The tokens of all texts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: TokenDetails | None = None


class TextEmbedding(BaseModel):
    """The vector of a text; in base64 little-endian float32 numbers."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """The vectors of all texts, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[TextEmbedding]
    usage: VectorUsage


class PairScore(BaseModel):
    """The score of a pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(BaseModel):
    """The scores of all pairs in `data`; or in `scores`, for each item, the values of the tokens."""

    id: str
    object: Literal["list", "scoring"]
    created: int
    model: str
    data: list[PairScore] | None = None
    scores: list[list[float]] | None = None
    usage: VectorUsage


class RankedResult(BaseModel):
    """A document's place in `documents`, and how relevant it is."""

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class Ranking(BaseModel):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: VectorUsage
