"""Adapters that come and go: POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse

from warpbus.errors import CheckpointError
from warpbus.server.conversations import named_model
from warpbus.server.options import ServerOptions
from warpbus.server.registry import Model, Models
from warpbus.server.request_error import RequestError
from warpbus.server.schema import LoadAdapterRequest, UnloadAdapterRequest


def add_routes(app: FastAPI, models: Models, options: ServerOptions) -> None:
    """Add the routes to the application."""
    # One change at a time: a name that is being loaded is not free.
    changing = asyncio.Lock()

    @app.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> PlainTextResponse:
        """Load a LoRA from a directory that --adapter-dir allows, and serve it under a name."""
        base = _base(named_model(models, body, request, options))
        async with changing:
            models.check_free(body.lora_name)
            directory = await asyncio.to_thread(allowed_directory, body.lora_path, options.adapter_dirs)
            try:
                await base.service.load_adapter(body.lora_name, str(directory))
            except CheckpointError as error:  # of the client's choice; the server's own paths are no one's business
                message = str(error).replace(str(directory), body.lora_path)
                raise RequestError(400, f"lora_path: {message}", param="lora_path") from None
            models.add_adapter(base, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> PlainTextResponse:
        """Drop a LoRA. Refused while requests use it."""
        async with changing:
            adapter = models.find(body.lora_name)
            if adapter.base is None:
                raise RequestError(400, f"{body.lora_name[:200]!r} is a model, no adapter", param="lora_name")
            await adapter.base.service.unload_adapter(body.lora_name)
            models.remove_adapter(adapter)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _base(model: Model) -> Model:
    if model.base is not None:
        raise RequestError(400, f"model: {model.name!r} is an adapter: name the model below it", param="model")
    return model


def allowed_directory(path: str, allowed: Sequence[str]) -> Path:
    """The directory of an adapter, within one of the allowed ones.

    Args:
        path: absolute, or relative to one of the allowed directories.

    Raises:
        RequestError: no directory is allowed, or this one is not, or is not there.
    """
    if not allowed:
        raise RequestError(
            403,
            "this server loads no adapters: start it with --adapter-dir",
            kind="permission_error",
            param="lora_path",
            code="adapters_not_allowed",
        )
    if "\0" not in path:
        for root in map(Path, allowed):
            # Symbolic links must not lead out of it.
            found = (root / path).resolve()
            if found.is_relative_to(root.resolve()) and found.is_dir():
                return found
    raise RequestError(
        404,
        f"lora_path: the directories of --adapter-dir have no directory {path[:200]!r}",
        param="lora_path",
        code="adapter_not_found",
    )
