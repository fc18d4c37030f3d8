"""The application: routes, and the guard before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import warpbus
from warpbus.server import adapter_routes, admin, embeddings, failures, generate, messages, openapi, responses_api
from warpbus.server.admission import with_text
from warpbus.server.answer_schema import ChatCompletion, CountedTokens, LoadAnswer, TextCompletion, documented
from warpbus.server.chat import ChatForm
from warpbus.server.completions import DEFAULT_TOKENS, TextForm, prefix_length, prompts_of, scored_prompt, text_size
from warpbus.server.conversations import count_prompt, named_model, prepare_chat, valid_body
from warpbus.server.generation import GenerationRequest
from warpbus.server.guard import AccessLog, Guard, cache_salt
from warpbus.server.json_body import JsonRoute
from warpbus.server.metrics import Metrics
from warpbus.server.options import ServerOptions
from warpbus.server.page import page_router
from warpbus.server.params import answers_of, for_answer, grammar_of, room, sampling_params, truncated
from warpbus.server.registry import Models
from warpbus.server.request_error import RequestError
from warpbus.server.responses import Responder
from warpbus.server.root_path import RootPath
from warpbus.server.schema import ChatRequest, CompletionRequest
from warpbus.server.tracing import Traces

# Routes of other servers for models that do not generate.
_NOT_SERVED = {
    "/pooling": "pooling",
    "/classify": "classification",
}
_GENERATING = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate", "/invocations")
)
_ANTHROPIC_HEADERS = ("anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access")


def create_app(models: Models, options: ServerOptions | None = None, tracer: Any = None) -> FastAPI:
    """The application for some models.

    Args:
        models: that requests can name; they may be loaded later, and are closed when the application ends.
        options: access control and limits; the caller listens on the socket.
        tracer: of OpenTelemetry, which gets a span per request; None: there are no traces.
    """
    options = options or ServerOptions()
    metrics = Metrics()
    middleware = [Middleware(AccessLog, metrics=metrics)]
    if options.root_path:
        middleware.insert(0, Middleware(RootPath, prefix=options.root_path))
    if tracer is not None:
        middleware.append(Middleware(Traces, tracer=tracer))
    if options.allow_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(options.allow_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["authorization", "content-type", "x-api-key", "x-request-id", *_ANTHROPIC_HEADERS],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    middleware.append(Middleware(Guard, options=options, is_open=_is_open, generates=_generates))
    app = FastAPI(
        title="Warpbus",
        version=warpbus.__version__,
        middleware=middleware,
        lifespan=_closing(models),
        docs_url=None,
        redoc_url=None,
        servers=[{"url": options.root_path}] if options.root_path else None,
        responses=openapi.ERRORS,
    )
    app.router.route_class = JsonRoute
    failures.install(app)
    responder = Responder(options, metrics)
    app.state.running = responder.running
    _add_generation(app, models, responder)
    messages.add_routes(app, models, responder)
    responses_api.add_routes(app, models, responder)
    generate.add_routes(app, models, responder)
    embeddings.add_routes(app, models, responder)
    adapter_routes.add_routes(app, models, options)
    admin.add_routes(app, models, metrics, options)
    app.include_router(page_router())
    openapi.install(app, has_keys=bool(options.api_keys), is_open=_is_open)
    return app


def _add_generation(app: FastAPI, models: Models, responder: Responder) -> None:
    options = responder.options

    @app.post("/v1/chat/completions", **documented(ChatCompletion, events="ChatCompletionChunk, then [DONE]"))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        chat = await prepare_chat(body, named_model(models, body, request, options), request, options)
        return await responder.respond(
            request,
            chat.model,
            ChatForm(chat, body),
            chat.requests,
            per_prompt=len(chat.requests),
            stream=bool(body.stream),
        )

    @app.post("/v1/chat/completions/input_tokens", **documented(CountedTokens))
    async def input_tokens(body: ChatRequest, request: Request) -> dict[str, int]:
        """The number of tokens of a conversation."""
        return {"input_tokens": await count_prompt(body, named_model(models, body, request, options), request, options)}

    @app.post("/v1/completions", **documented(TextCompletion, events="TextCompletion, then [DONE]"))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        model = named_model(models, body, request, options)
        service = model.awake()
        salt = cache_salt(request.scope, body.cache_salt)
        tokenizer = service.tokenizer
        grammar = grammar_of(body, options)
        prompts = await with_text(request, model, text_size(body), lambda: prompts_of(body, tokenizer))
        wanted = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        kept = prefix_length(body, tokenizer)
        prompts = [truncated(prompt, body, service.max_model_len, wanted, kept=kept) for prompt in prompts]
        count = answers_of(body, len(prompts), options)
        if not all(prompts):
            raise RequestError(400, "prompt: it is empty, and there is nothing to continue", param="prompt")
        requests = []
        for prompt in prompts:
            space = room(prompt, service.max_model_len)
            params = sampling_params(
                body,
                wanted=min(space, DEFAULT_TOKENS) if body.max_tokens is None else body.max_tokens or 1,
                space=space,
                logprobs=body.logprobs,
                prompt_logprobs=scored_prompt(body),
                options=options,
                defaults=service.generation_defaults,
                grammar=grammar,
                continues_text=True,
            )
            silent = body.max_tokens == 0
            requests += [GenerationRequest(prompt, for_answer(params, index), salt, silent) for index in range(count)]
        return await responder.respond(
            request,
            model,
            TextForm(model, tokenizer, body, [request.prompt for request in requests]),
            requests,
            per_prompt=count,
            stream=bool(body.stream),
        )

    @app.post("/invocations", include_in_schema=False)
    async def invocations(fields: dict[str, Any], request: Request) -> Response:
        """SageMaker's route: a chat, or a completion."""
        if "messages" in fields:
            return await chat_completions(valid_body(ChatRequest, fields), request)
        if "prompt" in fields:
            return await completions(valid_body(CompletionRequest, fields), request)
        raise RequestError(400, "give messages, for a chat, or a prompt", param="messages")

    @app.get("/load", **documented(LoadAnswer))
    async def load() -> dict[str, int]:
        """How busy the server is."""
        return {"server_load": responder.running.count}

    for path, what in _NOT_SERVED.items():
        app.post(path, include_in_schema=False)(_refusing(what))


def _refusing(what: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        message = f"these models generate text: they are not served for {what}"
        raise RequestError(501, message, code=f"{what}_not_supported")

    return refuse


def _is_open(path: str) -> bool:
    """Needs no key: whether the server is up, and the chat page's files, which hold no secret."""
    return path in ("/", "/health", "/ready", "/ping") or path.startswith("/page/")


def _generates(path: str) -> bool:
    """Requests to the path are admitted one after another."""
    return path in _GENERATING


def _closing(models: Models) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await models.close(0.0)

    return lifespan
