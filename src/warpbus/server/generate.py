"""POST /generate, SGLang's own API: texts or token ids go on, with log probabilities on both sides."""

from __future__ import annotations

import asyncio
from collections import abc
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import Response

import warpbus
from warpbus.engine import SamplingParams, TextPiece, TokenLogprob
from warpbus.engine.blocks import BLOCK
from warpbus.models.tokenizers import Tokenizer, encode_prompt
from warpbus.server.admission import with_text
from warpbus.server.answer_schema import HealthAnswer, documented
from warpbus.server.conversations import named_model, valid_body
from warpbus.server.failures import body_of
from warpbus.server.generate_schema import GenerateRequest, ModelInfo, NativeAnswer, NativeSampling, ServerInfo
from warpbus.server.generation import GenerationRequest, unless_gone
from warpbus.server.guard import cache_salt
from warpbus.server.params import answers_of, for_answer, grammar_of, room, sampling_params
from warpbus.server.registry import Model, Models
from warpbus.server.request_error import RequestError
from warpbus.server.responses import Json, Responder, Usage, new_id
from warpbus.server.schema import CompletionRequest
from warpbus.server.token_scores import LOWEST, token_text

DEFAULT_NEW_TOKENS = 128
"""The default of `max_new_tokens`, as in SGLang."""

# The fields of sampling_params that OpenAI's API has by another name; all others have the same.
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}

_PROBE_SECONDS = 20  # as in SGLang

T = TypeVar("T")


def add_routes(app: FastAPI, models: Models, responder: Responder) -> None:
    """Add the routes to the application."""

    @app.post("/generate", **documented(NativeAnswer | list[NativeAnswer], events="NativeAnswer so far, then [DONE]"))
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue texts or token ids, as SGLang does."""
        if body.lora_path is not None:
            body = body.model_copy(update={"model": body.lora_path})
        model = named_model(models, body, request, responder.options)
        texts = [body.text] if isinstance(body.text, str) else body.text or ()
        prompts = await with_text(request, model, sum(map(len, texts)), lambda: _prompts(body, model.awake().tokenizer))
        per_prompt, asked, requests = _requests(body, model, prompts, request, responder)
        alone = isinstance(body.text, str) or (body.input_ids is not None and isinstance(body.input_ids[0], int))
        form = NativeForm(model.service.tokenizer, asked, alone=alone and per_prompt == 1)
        return await responder.respond(request, model, form, requests, per_prompt=per_prompt, stream=bool(body.stream))

    @app.get("/get_model_info", include_in_schema=False)
    @app.get("/model_info", **documented(ModelInfo))
    async def model_info() -> dict[str, Any]:
        """The model that answers requests that name none, as SGLang's clients ask for it."""
        model = models.find(None)
        names = dict.fromkeys(("model_path", "tokenizer_path"), model.name)
        return {**names, "is_generation": True, "max_model_len": model.context}

    @app.get("/get_server_info", include_in_schema=False)
    @app.get("/server_info", **documented(ServerInfo))
    async def server_info() -> dict[str, Any]:
        """The same model, and the size of its KV cache, all replicas together. Errors as of a request to it."""
        model = models.find(None)
        service = model.service
        stats = await asyncio.gather(*[replica.stats() for replica in service.replicas.values()])
        names = dict.fromkeys(("model_path", "tokenizer_path", "served_model_name"), model.name)
        return {
            **names,
            "version": warpbus.__version__,
            "context_length": service.max_model_len,
            "page_size": BLOCK,
            "max_total_num_tokens": BLOCK * sum(each.blocks for each in stats),
            "num_running_reqs": sum(each.running for each in stats),
            "num_waiting_reqs": sum(each.waiting for each in stats),
        }

    @app.get("/health_generate", **documented(HealthAnswer))
    async def health_generate(request: Request) -> dict[str, str]:
        """Whether every model generates a token: 200, or the error of such a request; 503 after 20 seconds."""
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await unless_gone(request.receive, _probe(models.bases()))
        except TimeoutError:
            message = f"no token in {_PROBE_SECONDS} s: the engine hangs, or has much to do"
            raise RequestError(503, message, kind="service_unavailable", code="model_not_ready") from None
        return {"status": "ready"}


async def _probe(models: abc.Collection[Model]) -> None:
    """Generate a token with each model."""

    async def one(model: Model) -> None:
        tokenizer = model.awake().tokenizer
        prompt = await model.in_thread(lambda: encode_prompt(tokenizer, "a"), size=1)
        async with aclosing(model.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0))) as answer:
            async for _ in answer:
                pass

    await asyncio.gather(*[one(model) for model in models])


@dataclass
class Asked:
    """The request for one answer, and the pieces of it so far.

    Attributes:
        id: of the answer.
        prompt: its token ids.
        scored: log probabilities are returned.
        start: the position of the prompt from which on they are.
        top: how many of the likeliest tokens are returned with each.
        named: the log probabilities of named tokens are returned, too.
        texts: with the texts of tokens.
    """

    id: str
    prompt: list[int]
    scored: bool
    start: int
    top: int
    named: bool
    texts: bool
    pieces: list[TextPiece] = field(default_factory=list)


class NativeForm:
    """The format of SGLang's answers; see `Form`.

    Args:
        tokenizer: of the model.
        asked: the requests, one for each answer.
        alone: the only answer is not put into a list.
    """

    last = b"data: [DONE]\n\n"

    def __init__(self, tokenizer: Tokenizer, asked: abc.Sequence[Asked], *, alone: bool) -> None:
        self._tokenizer = tokenizer
        self._asked = asked
        self._alone = alone

    def opening(self, usage: Usage) -> list[Json]:
        """See `Form.opening`."""
        return []

    def events(self, index: int, piece: TextPiece, usage: Usage) -> list[Json]:
        """See `Form.events`: the whole answer so far; the last event of an answer has its log probabilities."""
        asked = self._asked[index]
        asked.pieces.append(piece)
        answer = self._answer(asked, asked.pieces)
        return [answer if self._alone else {**answer, "index": index}]

    def closing(self, usage: Usage) -> list[Json]:
        """See `Form.closing`."""
        return []

    def failure(self, error: RequestError, usage: Usage) -> Json:
        """See `Form.failure`."""
        return body_of(error)

    def whole(self, answers: abc.Sequence[abc.Sequence[TextPiece]], usage: Usage) -> Json | list[Json]:
        """See `Form.whole`."""
        found = [self._answer(asked, pieces) for asked, pieces in zip(self._asked, answers, strict=True)]
        return found[0] if self._alone else found

    def _answer(self, asked: Asked, pieces: abc.Sequence[TextPiece]) -> Json:
        tokens = [token for piece in pieces for token in piece.token_ids]
        meta: Json = {
            "id": asked.id,
            "finish_reason": _finish(pieces[-1], len(tokens)),
            "prompt_tokens": len(asked.prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": pieces[0].cached_tokens,
        }
        # In every event of a stream they would be as many as the square of the answer's length.
        if asked.scored and pieces[-1].finish_reason is not None:
            before = next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None)
            entries = [] if before is None else list(zip(asked.prompt, before, strict=True))[asked.start :]
            meta |= self._scores("input", asked, entries)
            meta |= self._scores(
                "output", asked, [(one.token, one) for piece in pieces for one in piece.logprobs or ()]
            )
        return {"text": "".join(piece.text for piece in pieces), "output_ids": tokens, "meta_info": meta}

    def _scores(self, side: str, asked: Asked, entries: abc.Sequence[tuple[int, TokenLogprob | None]]) -> Json:
        def entry(token: int, logprob: float | None) -> list[Any]:
            text = token_text(self._tokenizer, token)[0] if asked.texts else None
            return [None if logprob is None else max(logprob, LOWEST), token, text]

        found: Json = {
            f"{side}_token_logprobs": [entry(token, None if one is None else one.logprob) for token, one in entries]
        }
        if asked.top:
            found[f"{side}_top_logprobs"] = [
                None if one is None else [entry(*each) for each in one.top[: asked.top]] for _, one in entries
            ]
        if asked.named:
            found[f"{side}_token_ids_logprobs"] = [
                None if one is None else [entry(*each) for each in one.asked] for _, one in entries
            ]
        return found


def _finish(piece: TextPiece, count: int) -> Json | None:
    if piece.finish_reason is None:
        return None
    if piece.finish_reason == "length":
        return {"type": "length", "length": count}
    last = piece.token_ids[-1] if piece.token_ids else None
    return {"type": "stop", "matched": last if piece.stop_string is None else piece.stop_string}


def _prompts(body: GenerateRequest, tokenizer: Tokenizer) -> list[list[int]]:
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        found = [encode_prompt(tokenizer, text) for text in texts]
    else:
        given = body.input_ids or []
        alone = [token for token in given if isinstance(token, int)]
        found = [alone] if alone else [list(each) for each in given if not isinstance(each, int)]
    if not all(found):
        raise RequestError(400, "text: it is empty, and there is nothing to continue", param="text")
    return found


def _requests(
    body: GenerateRequest, model: Model, prompts: list[list[int]], request: Request, responder: Responder
) -> tuple[int, list[Asked], list[GenerationRequest]]:
    """The number of answers to a prompt, what is asked of each answer, and the requests for them."""
    count = len(prompts)
    samplings = _each("sampling_params", body.sampling_params, count, NativeSampling.model_validate({}))
    if len({each.n for each in samplings}) > 1:
        raise RequestError(400, "sampling_params: n differs: give the same for all prompts", param="sampling_params")
    scored = _each("return_logprob", body.return_logprob, count, False)
    starts = _each("logprob_start_len", body.logprob_start_len, count, -1)
    tops = _each("top_logprobs_num", body.top_logprobs_num, count, 0)
    named = _named_tokens(body, count, model.service.tokenizer.vocab_size)
    salt = cache_salt(request.scope, None)
    options, service = responder.options, model.service
    asked: list[Asked] = []
    requests: list[GenerationRequest] = []
    per_prompt = 1
    for at, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        start = starts[at] if starts[at] >= 0 else len(prompt)
        if scored[at] and start > len(prompt):
            message = f"logprob_start_len is {start:,}, but the prompt has {len(prompt):,} tokens: give at most those"
            raise RequestError(400, message, param="logprob_start_len")
        chosen = _as_completion(sampling)
        per_prompt = answers_of(chosen, count, options)
        space = room(prompt, service.max_model_len)
        wanted = min(space, DEFAULT_NEW_TOKENS) if sampling.max_new_tokens is None else sampling.max_new_tokens or 1
        if wanted > space:
            message = f"max_new_tokens is {wanted:,}, but the prompt leaves {space:,} tokens of the model's context"
            raise RequestError(400, f"{message}: give at most those", param="max_new_tokens")
        params = sampling_params(
            chosen,
            wanted=wanted,
            space=space,
            logprobs=tops[at] if scored[at] else None,
            prompt_logprobs=tops[at] if scored[at] and start < len(prompt) else None,
            options=options,
            defaults=service.generation_defaults,
            grammar=grammar_of(chosen, options),
            continues_text=True,
        )
        params = replace(params, logprob_tokens=tuple(named[at] or ()) if scored[at] else ())
        for index in range(per_prompt):
            silent = sampling.max_new_tokens == 0
            requests.append(GenerationRequest(prompt, for_answer(params, index), salt, silent))
            texts = bool(body.return_text_in_logprobs)
            number = len(asked)
            asked.append(
                Asked(_id(body.rid, number), prompt, scored[at], start, tops[at], named[at] is not None, texts)
            )
    return per_prompt, asked, requests


def _id(given: str | list[str] | None, number: int) -> str:
    if isinstance(given, str) and number == 0:
        return given
    return given[number] if isinstance(given, list) and number < len(given) else new_id("gen")


def _each(name: str, given: T | list[T] | None, count: int, default: T) -> list[T]:
    """The values of a field for each prompt. RequestError if there are more or fewer."""
    if not isinstance(given, list):
        return [default if given is None else given] * count
    if len(given) != count:
        message = f"{name} has {len(given)} items for {count} prompts: give one per prompt, or no list"
        raise RequestError(400, message, param=name)
    return given


def _named_tokens(body: GenerateRequest, count: int, vocabulary: int) -> list[list[int] | None]:
    """The tokens whose log probabilities are asked for, for each prompt: one list for all of them, or one for each."""
    name, given = "token_ids_logprob", body.token_ids_logprob
    lists = given is not None and any(each is None or isinstance(each, list) for each in given)
    several = isinstance(body.text, list) or (body.input_ids is not None and isinstance(body.input_ids[0], list))
    if lists and not several:
        raise RequestError(400, f"{name}: give a flat list of integers for one prompt", param=name)
    found = _each(name, given, count, None) if lists else [given] * count
    for each in found:
        if each is None:
            continue
        if not isinstance(each, list) or not all(type(token) is int for token in each):
            message = f"{name}: give a flat list of integers, or one such list or null per prompt"
            raise RequestError(400, message, param=name)
        for token in each:
            if not 0 <= token < vocabulary:
                message = f"{name}: {token} is an out-of-vocabulary token id: give 0 to {vocabulary - 1}"
                raise RequestError(400, message, param=name)
    return found


def _as_completion(sampling: NativeSampling) -> CompletionRequest:
    """The parameters by the names of OpenAI's API. RequestValidationError as of a body."""
    given = sampling.model_dump(exclude_none=True, include=set(NativeSampling.model_fields))
    fields = {_RENAMED.get(name, name): value for name, value in given.items()}
    return valid_body(CompletionRequest, {"model": "any", "prompt": "any", **fields})
