"""The models of a server by name, and the interface that it needs of each.

Knows nothing of HTTP except for the errors that a request for a model may get.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar, get_args

from warpbus.engine import SamplingParams, TextPiece
from warpbus.engine.moving import Moved
from warpbus.engine.service_model import State
from warpbus.engine.stats import Stats
from warpbus.errors import UsageError
from warpbus.models.pooling import TextHeads, read_text_heads
from warpbus.models.templates import Template
from warpbus.models.templates.thinking import ThinkingTokens, find_thinking
from warpbus.models.templates.tools import ToolDialect, find_dialect
from warpbus.models.tokenizers import Tokenizer
from warpbus.server.request_error import RequestError

T = TypeVar("T")

STATES = ("starting", *get_args(State))
"""The states of a model; "starting" until it is loaded for the first time."""

RETRY_SECONDS = 5
"""The Retry-After while a model loads or its engine restarts."""


LONG_TEXT = 16384
"""Characters beyond which a text is tokenized in a thread of its own: it takes some milliseconds."""


class AnswerProtocol(Protocol):
    """The pieces of one answer; see `warpbus.engine.service.Answer`."""

    def __aiter__(self) -> AsyncIterator[TextPiece]:
        """The pieces."""

    async def aclose(self) -> None:
        """Abort the request if it still runs."""


class HealthProtocol(Protocol):
    """The state of a service; see `warpbus.engine.service_model.Health`."""

    @property
    def state(self) -> str:
        """One of `warpbus.engine.service_model.State`."""

    @property
    def reason(self) -> str:
        """Why it is not ready."""


class ReplicaProtocol(Protocol):
    """One engine of a model."""

    @property
    def health(self) -> HealthProtocol:
        """Its state."""

    async def stats(self) -> Stats:
        """The engine's `Stats`."""


class ServiceProtocol(Protocol):
    """The part of `warpbus.engine.service.Service` and `warpbus.engine.replicas.ReplicaSet` that the server uses."""

    model: Path
    tokenizer: Tokenizer
    template: Template
    generation_defaults: dict[str, float]
    max_model_len: int

    def generate(
        self, prompt: list[int], params: SamplingParams, adapter: str | None, *, cache_salt: bytes
    ) -> AnswerProtocol:
        """Start a request. Raises WarpbusErrors, as iterating over the answer does."""

    @property
    def replicas(self) -> Mapping[int, ReplicaProtocol]:
        """The engines of the model, by their numbers."""

    @property
    def health(self) -> HealthProtocol:
        """The state of the service."""

    @property
    def alive(self) -> bool:
        """Requests can be answered, or could be after `wake`."""

    async def sleep(self) -> None:
        """Offload the model and return the GPUs' memory."""

    async def wake(self) -> None:
        """Load the model to the GPUs again."""

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""

    async def move(self, device: str) -> Moved:
        """Move to another GPU."""

    async def load_adapter(self, name: str, directory: str) -> None:
        """Load a LoRA."""

    async def unload_adapter(self, name: str) -> None:
        """Drop a LoRA that no request uses."""

    async def close(self, *, drain: float = 0.0) -> None:
        """End the processes."""


class _ModelState:
    """The state that a model and its adapters share."""

    def __init__(self, name: str) -> None:
        self.dialect: ToolDialect | None = None
        self.thinking: ThinkingTokens | None = None
        self.heads = TextHeads()
        self.context: int | None = None
        self.service: ServiceProtocol | None = None
        # Short texts do not wait for long ones. More threads would only wait for each other's Python.
        self.short_texts = ThreadPoolExecutor(1, thread_name_prefix=f"short texts of {name}")
        self.long_texts = ThreadPoolExecutor(1, thread_name_prefix=f"long texts of {name}")


class Model:
    """A model, or a model with one of its adapters, under a name.

    Attributes:
        name: by which requests name it.
        created: when it was added to the server, in seconds since 1970.
        base: the model that has the adapter; None for a model without an adapter.
    """

    def __init__(self, name: str, base: Model | None = None) -> None:
        self.name = name
        self.created = int(time.time())
        self.base = base
        self._shared: _ModelState = _ModelState(name) if base is None else base._shared

    @property
    def dialect(self) -> ToolDialect | None:
        """The dialect of its tool calls, or None."""
        return self._shared.dialect

    @property
    def thinking(self) -> ThinkingTokens | None:
        """The tokens around its thinking, or None."""
        return self._shared.thinking

    @property
    def heads(self) -> TextHeads:
        """Its uses besides generation; none while it loads."""
        return self._shared.heads

    @property
    def context(self) -> int | None:
        """Tokens of the longest prompt with its answer; None while it loads."""
        return self._shared.context

    @property
    def generation_defaults(self) -> Mapping[str, float]:
        """The defaults of sampling parameters; empty while it loads."""
        service = self._shared.service
        return {} if service is None else service.generation_defaults

    @property
    def state(self) -> str:
        """One of `STATES`."""
        service = self._shared.service
        return "starting" if service is None else service.health.state

    @property
    def reason(self) -> str:
        """Why it is not ready; empty if it is ready or starts."""
        service = self._shared.service
        return "" if service is None else service.health.reason

    @property
    def replicas(self) -> Mapping[int, ReplicaProtocol]:
        """The engines of the model, by their numbers; empty while it loads."""
        service = self._shared.service
        return {} if service is None else service.replicas

    @property
    def retry_after(self) -> int | None:
        """Seconds after which a model that is not ready may be; None if it stays as it is."""
        return None if self.state in ("failed", "closing", "closed") else RETRY_SECONDS

    @property
    def service(self) -> ServiceProtocol:
        """The service. Raises RequestError (503) while the model loads or its engine restarts."""
        service = self._shared.service
        if service is not None and service.alive:
            return service
        raise RequestError(
            503,
            f"the model {self.name} is {self.state}" + (f": {self.reason}" if self.reason else ""),
            kind="service_unavailable",
            code="model_not_ready",
            retry_after=self.retry_after,
        )

    def awake(self) -> ServiceProtocol:
        """The service, for a request that generates. Raises RequestError (503) also if the model sleeps."""
        service = self.service
        if self.state == "asleep":
            raise RequestError(
                503,
                f"the model {self.name} sleeps: POST /wake_up first",
                kind="service_unavailable",
                code="asleep",
                retry_after=RETRY_SECONDS,
            )
        return service

    def generate(self, prompt: list[int], params: SamplingParams, cache_salt: bytes = b"") -> AnswerProtocol:
        """Start a request; it shares the prefix cache with requests of the same salt. Raises as `awake` and the service
        do."""
        return self.awake().generate(prompt, params, None if self.base is None else self.name, cache_salt=cache_salt)

    def loaded(self, service: ServiceProtocol) -> None:
        """Record that the model and its adapters are ready. CheckpointError if a file beside its weights is damaged."""
        self._shared.dialect = find_dialect(service.template)
        self._shared.thinking = find_thinking(service.template, service.tokenizer)
        self._shared.heads = read_text_heads(service.model, service.tokenizer)
        self._shared.context = service.max_model_len
        self._shared.service = service

    async def in_thread(self, work: Callable[[], T], size: int | None = None) -> T:
        """Run tokenization or rendering in a thread, so that it does not block the event loop.

        Args:
            size: characters of the text; None if they may be many.
        """
        long = size is None or size > LONG_TEXT
        thread = self._shared.long_texts if long else self._shared.short_texts
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    async def close(self, drain: float) -> None:
        """Close the model and its adapters: end its processes after at most `drain` seconds."""
        self._shared.short_texts.shutdown(wait=False, cancel_futures=True)
        self._shared.long_texts.shutdown(wait=False, cancel_futures=True)
        if self._shared.service is not None:
            await self._shared.service.close(drain=drain)


class Models:
    """All models of a server, in the order in which they were added; the first one is the default."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}
        self._aliases: dict[str, str] = {}

    def add(
        self,
        name: str,
        service: ServiceProtocol | None = None,
        *,
        adapters: Iterable[str] = (),
        alias: str | None = None,
    ) -> Model:
        """Add a model, which may be loaded later (`Model.loaded`), and its adapters.

        Args:
            alias: another name by which `find` finds it, unless a model or an adapter is called so.

        Raises UsageError if one of the names is already in use.
        """
        if alias is not None:
            self._aliases[alias] = name
        model = Model(name)
        for one in (model, *(Model(adapter, model) for adapter in adapters)):
            if one.name in self._models:
                raise UsageError(f"two models or adapters are called {one.name}: give each a name of its own")
            self._models[one.name] = one
        if service is not None:
            model.loaded(service)
        return model

    def check_free(self, name: str) -> None:
        """Raises RequestError (400) if a model or an adapter has the name."""
        if name in self._models:
            raise RequestError(400, f"{name[:200]!r} is served already: give another name", param="lora_name")

    def add_adapter(self, base: Model, name: str) -> None:
        """Add an adapter that the service of a model has loaded."""
        self._models[name] = Model(name, base)

    def remove_adapter(self, adapter: Model) -> None:
        """Remove an adapter, which its service has dropped."""
        del self._models[adapter.name]

    def all(self) -> Collection[Model]:
        """All models and adapters."""
        return self._models.values()

    def bases(self) -> Collection[Model]:
        """All models, without adapters."""
        return [model for model in self.all() if model.base is None]

    def find(self, name: str | None) -> Model:
        """The model of this name or alias, or the first. RequestError (404) if there is none."""
        if name is None and self._models:
            return next(iter(self._models.values()))
        if name is not None and name not in self._models:
            name = self._aliases.get(name, name)
        if name not in self._models:
            raise RequestError(
                404,
                f"the model {(name or '')[:200]!r} is not served here: give one of {', '.join(self._models)}",
                param="model",
                code="model_not_found",
            )
        return self._models[name]

    async def close(self, drain: float) -> None:
        """Close all models."""
        await asyncio.gather(*[model.close(drain) for model in self.bases()])
