"""The routes beside generation: which models there are, tokens and text, health, metrics, sleep, moves."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

import warpbus
from warpbus.errors import DeviceError
from warpbus.models.tokenizers import encode_prompt, encode_text
from warpbus.models.tokenizers.facts import tokenizer_facts
from warpbus.server.answer_schema import (
    MOVES,
    Detokenized,
    HealthAnswer,
    ModelList,
    ResetAnswer,
    ServedModel,
    SleepAnswer,
    Tokenized,
    TokenizerAnswer,
    VersionAnswer,
    documented,
)
from warpbus.server.conversations import named_model, offered_tools, render_prompt
from warpbus.server.generation import unless_gone
from warpbus.server.metrics import CONTENT_TYPE, Metrics
from warpbus.server.options import ServerOptions
from warpbus.server.registry import RETRY_SECONDS, Model, Models, ServiceProtocol
from warpbus.server.request_error import RequestError
from warpbus.server.schema import DetokenizeRequest, TokenizeRequest
from warpbus.server.token_scores import text_with_specials, token_text

Device = Annotated[str, Query(json_schema_extra={"pattern": "^(auto|cpu|cuda(:[0-9]+)?)$"})]


def add_routes(app: FastAPI, models: Models, metrics: Metrics, options: ServerOptions) -> None:
    """Add all of them to the application."""
    _add_models(app, models)
    _add_text(app, models, options)
    _add_state(app, models, metrics)


def _add_models(app: FastAPI, models: Models) -> None:
    @app.get("/v1/models", **documented(ModelList))
    async def list_models() -> dict[str, Any]:
        """The models that requests can name."""
        return {"object": "list", "data": [_described(model) for model in models.all()]}

    @app.get("/v1/models/{name:path}", **documented(ServedModel))
    async def one_model(name: str) -> dict[str, Any]:
        """One of them."""
        return _described(models.find(name))


def _described(model: Model) -> dict[str, Any]:
    base = model.base
    found = {"id": model.name, "object": "model", "created": model.created, "owned_by": "warpbus"}
    found |= {"root": (base or model).name, "parent": None if base is None else base.name}
    if model.generation_defaults:
        found["default_sampling_params"] = model.generation_defaults
    if model.context is not None:
        found |= {
            "max_model_len": model.context,
            "tools": model.dialect is not None,
            "reasoning": model.thinking is not None,
        }
    return {**found, "state": model.state}


def _add_text(app: FastAPI, models: Models, options: ServerOptions) -> None:
    @app.post("/v1/tokenize", include_in_schema=False)
    @app.post("/tokenize", **documented(Tokenized))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """The token ids of a text, as the requests for it have them, of several, or of a conversation."""
        model = named_model(models, body, request, options)
        service = model.service

        def encoded(text: str) -> list[int]:
            if False in (body.add_special_tokens, body.add_special):
                return encode_prompt(service.tokenizer, text, add_special_tokens=False)
            embedded = model.heads.embedding is not None
            return (encode_text if embedded else encode_prompt)(service.tokenizer, text)

        def work() -> Response:
            if body.messages is not None:
                tools = offered_tools(() if body.tool_choice == "none" else body.tools or ())
                found = [render_prompt(body.messages, body, model, tools, options)]
            else:
                texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or body.content or ""]
                found = [encoded(text) for text in texts]
            return _tokenized(body, service, found)

        return await unless_gone(request.receive, model.in_thread(work))

    @app.get("/tokenizer_info", **documented(TokenizerAnswer))
    async def tokenizer_info(model: str | None = None) -> dict[str, Any]:
        """The tokenizer's settings in the files of a model; by default of the first model."""
        found = models.find(model)
        service = found.service
        return await found.in_thread(
            lambda: tokenizer_facts(service.model, type(service.tokenizer).__name__, service.max_model_len)
        )

    @app.post("/v1/detokenize", include_in_schema=False)
    @app.post("/detokenize", **documented(Detokenized))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids."""
        model = named_model(models, body, request, options)
        tokenizer = model.service.tokenizer
        strange = next((token for token in body.tokens if token >= tokenizer.vocab_size), None)
        if strange is not None:
            message = f"tokens: {strange} is an out-of-vocabulary token id: give 0 to {tokenizer.vocab_size - 1}"
            raise RequestError(400, message, param="tokens")

        def work() -> Response:
            decode = text_with_specials if body.skip_special_tokens is False else type(tokenizer).decode
            return JSONResponse(dict.fromkeys(("prompt", "text", "content"), decode(tokenizer, body.tokens)))

        return await unless_gone(request.receive, model.in_thread(work))


def _tokenized(body: TokenizeRequest, service: ServiceProtocol, found: list[list[int]]) -> Response:
    """The answer of /tokenize. Encoding it takes seconds for a long text: not to be called in the event loop."""
    several = isinstance(body.prompt, list)
    counts = [len(tokens) for tokens in found]
    ids: list[Any] = found
    strings = None
    if body.return_token_strs or body.with_pieces:
        texts = {token: token_text(service.tokenizer, token) for token in set().union(*found)}
        if body.with_pieces:
            pieces = {token: _with_piece(token, *text) for token, text in texts.items()}
            ids = [[pieces[token] for token in tokens] for tokens in found]
        if body.return_token_strs:
            strings = [[texts[token][0] for token in tokens] for tokens in found]
    return JSONResponse(
        {
            "tokens": ids if several else ids[0],
            "count": counts if several else counts[0],
            "max_model_len": service.max_model_len,
            "token_strs": strings if several or strings is None else strings[0],
        }
    )


def _with_piece(token: int, text: str, data: bytes) -> dict[str, Any]:
    return {"id": token, "piece": text if text.encode() == data else list(data)}


def _add_state(app: FastAPI, models: Models, metrics: Metrics) -> None:
    not_ready: dict[int | str, dict[str, Any]] = {503: {"model": HealthAnswer, "description": "a model is not ready"}}

    def answered(fine: Collection[str]) -> Response:
        """The states of all models: 200 if all of them are among these, otherwise 503 and why."""
        states = {model.state for model in models.bases()}
        several = {model.name: _replica_states(model) for model in models.bases() if len(model.replicas) > 1}
        body: dict[str, Any] = {"status": ", ".join(sorted(states - {"ready"})) or "ready"}
        if several:
            body["replicas"] = several
        if states <= set(fine):
            return JSONResponse(body)
        reasons = [f"{model.name}: {model.reason}" for model in models.bases() if model.reason]
        if reasons:
            body["reason"] = "; ".join(reasons)
        comes_back = all(model.retry_after for model in models.bases())
        return JSONResponse(body, 503, headers={"retry-after": str(RETRY_SECONDS)} if comes_back else {})

    # HEAD is what some load balancers ask with.
    @app.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.get("/health", **documented(HealthAnswer, also=not_ready))
    async def health() -> Response:
        """Whether the server and its engines work: 200, also for models that sleep, or 503 while one starts, restarts
        or stands still, and why.

        A model with several replicas works as long as one of them does.
        """
        return answered(("ready", "asleep"))

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", **documented(HealthAnswer, also=not_ready))
    async def ready() -> Response:
        """Whether all models answer requests: as /health, but 503 while a model sleeps."""
        return answered(("ready",))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        """For Prometheus."""
        return Response(await metrics.text(models), media_type=CONTENT_TYPE)

    @app.get("/version", **documented(VersionAnswer))
    async def version() -> dict[str, str]:
        """Of Warpbus."""
        return {"version": warpbus.__version__}

    @app.post("/flush_cache", include_in_schema=False)
    @app.post("/reset_prefix_cache", **documented(ResetAnswer))
    async def reset_prefix_cache(model: str | None = None) -> dict[str, bool]:
        """Empty the prefix cache of a model, or of all. Not while requests run. Blocks on disk are kept."""
        await asyncio.gather(*[one.service.reset_prefix_cache() for one in _chosen(models, model)])
        return {"success": True}

    @app.post("/sleep", **documented(SleepAnswer))
    async def sleep(model: str | None = None) -> dict[str, bool]:
        """Give the GPUs' memory back, keeping the models; of one model, or of all. Not while requests run."""
        return await _change(models, model, asleep=True)

    @app.post("/wake_up", **documented(SleepAnswer))
    async def wake_up(model: str | None = None) -> dict[str, bool]:
        """Get the GPUs' memory back."""
        return await _change(models, model, asleep=False)

    @app.post("/move", **documented(MOVES))
    async def move(device: Device, model: str | None = None) -> dict[str, dict[str, Any]]:
        """Have a model, or all of them, go on on another GPU of this machine, while they answer. Seconds and bytes."""
        chosen = _chosen(models, model)
        try:
            moved = await asyncio.gather(*[one.service.move(device) for one in chosen])
        except DeviceError as error:  # the model stays where it is
            raise RequestError(409, str(error), param="device", code="no_device") from None
        return {one.name: asdict(each) for one, each in zip(chosen, moved, strict=True)}

    @app.get("/is_sleeping", **documented(SleepAnswer))
    async def is_sleeping(model: str | None = None) -> dict[str, bool]:
        """Whether a model, or any of them, sleeps."""
        return {"is_sleeping": any(one.state == "asleep" for one in _chosen(models, model))}


def _replica_states(model: Model) -> list[dict[str, Any]]:
    found = [(number, replica.health) for number, replica in model.replicas.items()]
    return [
        {"replica": number, "state": health.state} | ({"reason": health.reason} if health.reason else {})
        for number, health in found
    ]


def _chosen(models: Models, name: str | None) -> Collection[Model]:
    return models.bases() if name is None else [models.find(name)]


async def _change(models: Models, name: str | None, *, asleep: bool) -> dict[str, bool]:
    chosen = _chosen(models, name)
    await asyncio.gather(*[one.service.sleep() if asleep else one.service.wake() for one in chosen])
    return {"is_sleeping": asleep}
