"""`warpbus serve`: an OpenAI-compatible API and a chat page for one or more models."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from warpbus.cli.adapters import Named, adapters_by_model
from warpbus.cli.completion import complete_model
from warpbus.cli.language import Console
from warpbus.cli.models import DEMO, model_directory, model_name
from warpbus.cli.options import FieldOption, options_of
from warpbus.cli.progress import progress_bar
from warpbus.demo import model_path
from warpbus.dist.interpreters import end_early, permanent_objects
from warpbus.dist.watchdog import SHORTEST_LIMIT
from warpbus.engine.options import ReplicaOptions, ServiceOptions
from warpbus.engine.prestart import start_processes
from warpbus.errors import DataError, UsageError
from warpbus.server.options import ServerOptions

KEY_VARIABLE = "WARPBUS_API_KEY"


@options_of(
    {"server": ServerOptions, "service": ServiceOptions, "copies": ReplicaOptions},
    host="address to listen on",
    port="port to listen on; 0: any free port",
    served_model_name=...,
    adapter=...,
    device="auto, cpu, cuda or cuda:N",
    dtype="dtype of activations: auto, float32, float16 or bfloat16",
    max_model_len="maximum context length in tokens",
    max_num_seqs="maximum number of sequences in a batch",
    max_num_batched_tokens="maximum number of tokens in a step, of prompts and of running requests",
    inter_token_latency=FieldOption(
        "target of the time between two tokens of a request, such as 50ms: limits prompt tokens per step",
        metavar="TIME",
    ),
    max_queue="maximum number of waiting requests",
    memory="GPU memory per model: 6GB, 5.5GiB, 50%",
    kv_cache_dtype=FieldOption("dtype of the KV cache: auto, int8, fp8, int4 or unquantized", field="kv_dtype"),
    activation_dtype="activations of prompts: auto (16 bits), fp8 (from Ada on) or int8 (Ampere); weights of 4 bits",
    kv_cache_tokens=FieldOption(
        "maximum number of tokens in the KV cache; requests beyond that wait", field="cache_tokens"
    ),
    kv_host_memory=FieldOption(
        "main memory per replica for evicted blocks of the KV cache, such as 64GB", metavar="SIZE"
    ),
    kv_disk=FieldOption(
        "directory for evicted blocks of the KV cache, which are found again after a restart", metavar="DIR"
    ),
    kv_disk_size=FieldOption("maximum size of these files per replica, such as 500GB", metavar="SIZE"),
    prefix_caching="reuse the KV cache of common prompt prefixes",
    speculation=FieldOption(
        "draft tokens per step: N for n-gram lookup, mtp:1 to mtp:4 for multi-token prediction", metavar="N|mtp:N"
    ),
    tensor_parallel_size=FieldOption("number of GPUs per replica of a model", field="tensor_parallel"),
    expert_parallel="with --tensor-parallel-size: each GPU has whole experts instead of a part of every expert",
    data_parallel_size=FieldOption("number of replicas of each model on this machine", field="data_parallel"),
    cluster=FieldOption("run the models on a Ray cluster: auto, or ray://HOST:PORT", metavar="ADDRESS"),
    replicas=FieldOption("with --cluster: number of replicas of each model at the start"),
    min_replicas="with --cluster: the fewest replicas; their number follows the queues",
    max_replicas="with --cluster: the most replicas",
    api_key=...,
    api_key_file=...,
    share_prefixes="share the prefix cache among all API keys",
    ssl_certfile="PEM certificate; enables TLS",
    ssl_keyfile="PEM key of the certificate",
    insecure="accept unauthenticated or unencrypted connections from other machines",
    allow_origin=FieldOption("allowed CORS origin", field="allow_origins"),
    allowed_host=FieldOption("additional host name accepted on loopback", field="allowed_hosts"),
    generation_config="auto: the model's generation_config.json gives default sampling parameters; none: it does not",
    root_path=FieldOption("prefix of all paths behind a proxy, such as /llm", metavar="PATH"),
    strict="refuse requests with unknown fields, which are otherwise ignored with a warning",
    max_tokens="maximum max_tokens of a request",
    max_n="maximum n of a request",
    max_body_bytes="maximum size of a request",
    max_connections="maximum number of open connections",
    adapter_dir=FieldOption("directory from which requests may load LoRAs; repeatable", field="adapter_dirs"),
    log_format="text, or json: one JSON object per line of the log",
    otlp_endpoint="URL of an OpenTelemetry collector for traces, such as http://127.0.0.1:4318/v1/traces",
    max_stored_responses="maximum number of responses of /v1/responses kept in memory",
    request_timeout="maximum seconds per answer",
    shutdown_timeout="seconds for running requests to finish at shutdown",
    watchdog_timeout=FieldOption("seconds after which a stalled engine is restarted", least=SHORTEST_LIMIT),
)
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODELS",
            autocompletion=complete_model,
            help="model directories, names on a hub, or demo for the packaged poet",
        ),
    ],
    server: dict[str, Any],
    service: dict[str, Any],
    copies: dict[str, Any],
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="model names in the API, one per model; default: the names of their directories, and MODELS as given"
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=DIR: serve the LoRA or prefix in DIR as model NAME; MODEL:NAME=DIR if it fits several models"
        ),
    ] = None,
    api_key: Annotated[list[str] | None, typer.Option(help=f"accepted API key; also {KEY_VARIABLE}")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="file with one accepted API key per line")] = None,
) -> None:
    """Serve MODELS with an OpenAI-compatible API and a chat page.

    Binds to localhost by default. To expose it: --host, --api-key, --ssl-certfile and --ssl-keyfile.
    """
    names = served_model_name or [model_name(model) for model in models]
    if len(names) != len(models):
        raise UsageError(f"--served-model-name: {len(names)} for {len(models)} models: give one per model, in order")
    if len(set(names)) < len(names):
        raise UsageError(f"two models are called {_twice(names)}: give different names with --served-model-name")
    options = ServerOptions(**server, api_keys=keys_of(api_key or [], api_key_file))
    engine = ServiceOptions(**service)
    replicas = ReplicaOptions(**copies)
    try:
        # Processes that the model has no heads for are refused below; starting them would only delay that.
        if replicas.most == 1 and all(_has_heads(name, engine.tensor_parallel) for name in models):
            start_processes(engine)
        # Programs that were written for other servers send the argument itself.
        aliases = [None if served_model_name else model for model in models]
        _serve(models, names, aliases, options, engine, replicas, adapter or [])
    finally:
        end_early()


def _has_heads(model: str, processes: int) -> bool:
    """Whether the config.json of a model on the disk, if it can be read, has an attention head for each process."""
    directory = model_path() if model == DEMO else Path(model)
    try:
        heads = json.loads((directory / "config.json").read_bytes())["num_attention_heads"]
    except (OSError, ValueError, LookupError, TypeError):
        return True
    return not isinstance(heads, int) or heads >= processes


def _serve(
    models: Sequence[str],
    names: Sequence[str],
    aliases: Sequence[str | None],
    options: ServerOptions,
    engine: ServiceOptions,
    replicas: ReplicaOptions,
    adapter: list[str],
) -> None:
    """Serve models under these names; see `serve`."""
    with serve_extra("serving"), permanent_objects():
        from warpbus.engine.placement import check_replicas, replica_devices
        from warpbus.server.listening import ModelToServe
        from warpbus.server.listening import serve as run
        from warpbus.server.logs import formatter

    check_replicas(engine, replicas)
    replica_devices(engine, replicas.count)  # raises for missing GPUs, before anything is downloaded
    directories = [
        model_directory(name, processes=engine.tensor_parallel, expert_parallel=engine.expert_parallel)
        for name in models
    ]
    adapters = adapters_by_model(adapter, dict(zip(names, directories, strict=True)))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(options.log_format))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("warpbus").setLevel(logging.INFO)
    wanted = [
        ModelToServe(name, path, adapters[name], alias)
        for name, path, alias in zip(names, directories, aliases, strict=True)
    ]
    with ExitStack() as loading:
        show = loading.enter_context(progress_bar(of_bytes=True))

        def progress(name: str) -> Callable[[int, int], None]:
            return lambda done, total: show(f"loading {name}", done, total)

        def ready(url: str) -> None:
            loading.close()
            _greet(url, names[0], adapters, has_key=bool(options.api_keys))

        run(wanted, options, engine, progress=progress, ready=ready, replicas=replicas)


@contextmanager
def serve_extra(what: str) -> Iterator[None]:
    """A block that imports the server: UsageError if packages of the extra `serve` are missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in (
            "fastapi",
            "pydantic",
            "prometheus_client",
            "starlette",
            "uvicorn",
        ):
            raise
        raise UsageError(f"{what} needs {error.name}, which is missing: pip install 'warpbus[serve]'") from None


def keys_of(given: list[str], file: Path | None) -> tuple[str, ...]:
    """The accepted API keys: from options, a file, and the environment.

    Raises:
        DataError: the file cannot be read, or has no key.
    """
    found = list(given)
    if file is not None:
        try:
            found += [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--api-key-file {file}: cannot be read ({error}); give a text file of keys") from None
        if len(found) == len(given):
            raise DataError(f"--api-key-file {file}: has no key; give one per line")
    found += [key for key in (os.environ.get("WARPBUS_API_KEY"),) if key]
    return tuple(dict.fromkeys(found))


def _twice(names: list[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _greet(url: str, name: str, adapters: Mapping[str, Sequence[Named]], *, has_key: bool) -> None:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "你好"}]}, ensure_ascii=False)
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_key else ""
    example = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold]ready[/] at {escape(url)}: chat there in a browser, or")
    console.print(escape(example))
    for model, found in adapters.items():
        if found:
            console.print(
                escape(f"adapters of {model}, to be asked for by name: {', '.join(each for each, _ in found)}")
            )
