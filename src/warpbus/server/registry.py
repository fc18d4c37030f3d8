"""The models that a server answers for, by name, and what it needs of each.

Knows nothing of HTTP beyond the errors that a request for a model may get.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, get_args

from warpbus.engine import Piece, SamplingParams
from warpbus.engine.moving import Moved
from warpbus.engine.service import State
from warpbus.engine.stats import Stats
from warpbus.errors import UsageError
from warpbus.models.templates import Template
from warpbus.models.templates.tools import ToolDialect, find_dialect
from warpbus.models.tokenizers import Tokenizer
from warpbus.server.request_error import RequestError

T = TypeVar("T")

STATES = ("starting", *get_args(State))
"""What a model can be in; "starting" until it is loaded for the first time."""

RETRY_SECONDS = 5
"""What a client is told to wait while a model loads or its engine starts again."""


class Answer(Protocol):
    """One request's pieces; see `warpbus.engine.service.Answer`."""

    def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces."""

    async def aclose(self) -> None:
        """Call the request off, if it still runs."""


class Health(Protocol):
    """How a service is; see `warpbus.engine.service.Health`."""

    @property
    def state(self) -> str:
        """One of `warpbus.engine.service.State`."""

    @property
    def reason(self) -> str:
        """Why it is not ready."""


class Service(Protocol):
    """What the server asks of `warpbus.engine.service.Service`."""

    tokenizer: Tokenizer
    template: Template
    max_model_len: int

    def generate(self, prompt: list[int], params: SamplingParams, adapter: str | None, *, cache_salt: bytes) -> Answer:
        """Begin a request. Raises WarpbusErrors, as iterating the answer does."""

    async def stats(self) -> Stats:
        """The engine's `Stats`."""

    @property
    def health(self) -> Health:
        """How it is."""

    @property
    def alive(self) -> bool:
        """Requests can be answered, or could be after `wake`."""

    async def sleep(self) -> None:
        """Give the GPUs' memory back."""

    async def wake(self) -> None:
        """Get it back."""

    async def move(self, device: str) -> Moved:
        """Go on on another GPU."""

    async def close(self, *, drain: float = 0.0) -> None:
        """End the processes."""


class _Shared:
    """What a model and its adapters share."""

    def __init__(self, name: str) -> None:
        self.dialect: ToolDialect | None = None
        self.context: int | None = None
        self.service: Service | None = None
        # One thread: tokenizers and templates keep caches that are not made for several.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"text of {name}")


class Model:
    """A model, or a model with one of its adapters, under a name.

    Attributes:
        name: what requests call it.
        created: when the server took it up, in seconds since 1970.
        base: the model that has the adapter; None for a model as it is.
    """

    def __init__(self, name: str, base: Model | None = None) -> None:
        self.name = name
        self.created = int(time.time())
        self.base = base
        self._shared: _Shared = _Shared(name) if base is None else base._shared

    @property
    def dialect(self) -> ToolDialect | None:
        """How it calls tools, or None."""
        return self._shared.dialect

    @property
    def context(self) -> int | None:
        """Tokens of the longest prompt with its answer; None while it loads."""
        return self._shared.context

    @property
    def state(self) -> str:
        """One of `STATES`."""
        service = self._shared.service
        return "starting" if service is None else service.health.state

    @property
    def reason(self) -> str:
        """Why it is not ready; empty where it is, and while it starts."""
        service = self._shared.service
        return "" if service is None else service.health.reason

    @property
    def service(self) -> Service:
        """Raises RequestError (503) while the model loads or its engine starts again."""
        service = self._shared.service
        if service is not None and service.alive:
            return service
        raise RequestError(
            503,
            f"the model {self.name} is {self.state}" + (f": {self.reason}" if self.reason else ""),
            kind="service_unavailable",
            code="model_not_ready",
            retry_after=RETRY_SECONDS,
        )

    def awake(self) -> Service:
        """The service, for a request that generates. Raises RequestError (503) also where it sleeps."""
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

    def generate(self, prompt: list[int], params: SamplingParams, cache_salt: bytes = b"") -> Answer:
        """Begin a request, which shares what is stored of prompts with those of the same salt. Raises as `awake` and
        the service do."""
        return self.awake().generate(prompt, params, None if self.base is None else self.name, cache_salt=cache_salt)

    def loaded(self, service: Service) -> None:
        """The model, with its adapters, can answer from now on."""
        self._shared.dialect = find_dialect(service.template)
        self._shared.context = service.max_model_len
        self._shared.service = service

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Tokenizing and rendering: the event loop goes on meanwhile, however long the text is."""
        return await asyncio.get_running_loop().run_in_executor(self._shared.thread, work)

    async def close(self, drain: float) -> None:
        """End the model's processes, after `drain` seconds at most; its adapters are gone too."""
        self._shared.thread.shutdown(wait=False, cancel_futures=True)
        if self._shared.service is not None:
            await self._shared.service.close(drain=drain)


class Models:
    """All models of a server, in the order in which they were added; the first is asked where none is named."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}

    def add(self, name: str, service: Service | None = None, *, adapters: Iterable[str] = ()) -> Model:
        """Take up a model, which may be loaded later (`Model.loaded`), and after it its adapters.

        Raises UsageError where something is called by one of these names already.
        """
        model = Model(name)
        for one in (model, *(Model(adapter, model) for adapter in adapters)):
            if one.name in self._models:
                raise UsageError(f"two models or adapters are called {one.name}: give each a name of its own")
            self._models[one.name] = one
        if service is not None:
            model.loaded(service)
        return model

    def all(self) -> Collection[Model]:
        """Every name that a request can give."""
        return self._models.values()

    def bases(self) -> Collection[Model]:
        """Every model, its adapters left out."""
        return [model for model in self.all() if model.base is None]

    def find(self, name: str | None) -> Model:
        """The model of this name, or the first. RequestError (404) if there is none."""
        if name is None and self._models:
            return next(iter(self._models.values()))
        if name not in self._models:
            raise RequestError(
                404,
                f"the model {(name or '')[:200]!r} is not served here: give one of {', '.join(self._models)}",
                param="model",
                code="model_not_found",
            )
        return self._models[name]

    async def close(self, drain: float) -> None:
        """End all models."""
        await asyncio.gather(*[model.close(drain) for model in self.bases()])
