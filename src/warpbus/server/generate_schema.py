"""The bodies of POST /generate, SGLang's own API, and its answers."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from warpbus.server.schema import MOST_PROMPTS, MOST_STOPS, Biases, Body, FilledText, NamesModel, TokenId, TokenIds
from warpbus.server.schema_rules import absent, either, one_of

_UNSUPPORTED = frozenset(
    (
        "audio_data",
        "custom_logit_processor",
        "custom_params",
        "image_data",
        "input_embeds",
        "return_hidden_states",
        "session_params",
        "stop_regex",
        "video_data",
    )
)
_BIGGEST = 2**63 - 1

Start = Annotated[int, Field(ge=-1, lt=2**31)]
Likeliest = Annotated[int, Field(ge=0, le=20)]
Ids = Annotated[list[Any], Field(max_length=1024)]


class _Refusing(Body):
    @model_validator(mode="after")
    def _asks_for_nothing_else(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED and value not in (None, False):
                raise ValueError(f"{name} is not supported: leave it out")
        return self


class NativeSampling(_Refusing):
    """`sampling_params`: how tokens are sampled, and when an answer ends."""

    max_new_tokens: int | None = Field(None, ge=0, lt=2**31, description="128 by default; 0: nothing is generated")
    min_new_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1 allows every token")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Biases | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = Field(None, description="the text ends with the stop string instead of before it")
    n: int | None = Field(None, ge=1)
    sampling_seed: int | None = Field(None, ge=-_BIGGEST - 1, le=_BIGGEST)
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None


class GenerateRequest(NamesModel, _Refusing):
    """POST /generate. Fields that may be lists have one item per prompt then."""

    text: (
        FilledText | Annotated[list[FilledText], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)] | None
    ) = None
    input_ids: (
        Annotated[TokenIds, Field(min_length=1)]
        | Annotated[
            list[Annotated[TokenIds, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)
        ]
        | None
    ) = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], Field(max_length=MOST_PROMPTS)] | None = None
    return_logprob: bool | Annotated[list[bool], Field(max_length=MOST_PROMPTS)] | None = None
    logprob_start_len: Start | Annotated[list[Start], Field(max_length=MOST_PROMPTS)] | None = Field(
        None, description="the position from which on the prompt's log probabilities are returned; -1: none of them"
    )
    top_logprobs_num: Likeliest | Annotated[list[Likeliest], Field(max_length=MOST_PROMPTS)] | None = None
    token_ids_logprob: Ids | None = Field(
        None,
        description="token ids whose log probabilities every position returns; for several prompts also lists",
    )
    return_text_in_logprobs: bool | None = Field(None, description="log probabilities come with the text of tokens")
    stream: bool | None = Field(None, description="events, each with all of the answer so far")
    rid: str | Annotated[list[str], Field(max_length=MOST_PROMPTS)] | None = Field(None, description="ids of answers")
    lora_path: str | None = Field(None, description="the name of a served adapter, in the place of model")

    rules = (one_of("text", "input_ids"), either(absent("model"), absent("lora_path")))

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give text or input_ids, and only one of them")
        if self.model is not None and self.lora_path is not None:
            raise ValueError("model and lora_path both name what answers: give one of them")
        return self


class NativeFinish(BaseModel):
    """Why an answer ended: `length`, after so many tokens, or `stop`, by a token's id or a string."""

    type: str
    length: int | None = None
    matched: int | str | None = None


class NativeMeta(BaseModel):
    """Facts about an answer. Log probabilities are [log probability, token id, text or null]."""

    model_config = ConfigDict(extra="allow")

    id: str
    finish_reason: NativeFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    input_token_logprobs: list[list[Any]] | None = None
    output_token_logprobs: list[list[Any]] | None = None
    input_top_logprobs: list[list[list[Any]] | None] | None = None
    output_top_logprobs: list[list[list[Any]]] | None = None
    input_token_ids_logprobs: list[list[list[Any]] | None] | None = None
    output_token_ids_logprobs: list[list[list[Any]]] | None = None


class NativeAnswer(BaseModel):
    """An answer of POST /generate; in a stream of several, `index` says which."""

    text: str
    output_ids: list[int]
    meta_info: NativeMeta
    index: int | None = None


class ModelInfo(BaseModel):
    """The model that answers requests that name none."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    max_model_len: int | None


class ServerInfo(BaseModel):
    """The same model, the size of its KV cache in tokens, and how busy it is; `page_size` is that of a block."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    version: str
    context_length: int
    page_size: int
    max_total_num_tokens: int
    num_running_reqs: int
    num_waiting_reqs: int
