"""The state of a service, and what it knows of its model without weights; several services of one model share this."""

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self

from warpbus.engine.options import ServiceOptions
from warpbus.engine.speculation import Speculation
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.formats.hub import find_model
from warpbus.models import ModelConfig, check_loadable, read_config
from warpbus.models.generation_defaults import read_generation_defaults
from warpbus.models.parallel import Part
from warpbus.models.templates import Template, load_template
from warpbus.models.tokenizers import Tokenizer, load_tokenizer

State = Literal["ready", "unresponsive", "asleep", "restarting", "failed", "closing", "closed"]


@dataclass(frozen=True)
class Health:
    """The state of a service.

    Attributes:
        state: "ready", "unresponsive" (the engine lives but makes no progress; requests are accepted and wait),
            "asleep" (see `Service.sleep`), "restarting" (the engine died), "failed" (it died too often and is not
            restarted any more), "closing" (no new requests are accepted) or "closed".
        reason: why it is not ready; empty if it is.
        restarts: how often the engine has been restarted.
    """

    state: State
    reason: str
    restarts: int


@dataclass(frozen=True)
class ServiceModel:
    """The config, tokenizer and template of a model directory.

    Attributes:
        directory: the model directory.
        config: the model's `ModelConfig`.
        tokenizer, template: how text and conversations become tokens.
        stop_ids: generation ends at any of these tokens.
        generation_defaults: see `read_generation_defaults`; empty if `options.generation_config` is "none".
        max_model_len: the longest prompt with its answer, in tokens; an engine may have less.
    """

    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer
    template: Template
    stop_ids: frozenset[int]
    generation_defaults: dict[str, float]
    max_model_len: int

    @classmethod
    async def find(cls, model: str | Path, options: ServiceOptions) -> Self:
        """Read them from a model directory, or from a model on a hub, which is downloaded unless it is on the disk.

        Raises:
            UsageError: `options.max_model_len` is beyond the model's context, or the model cannot be sharded.
            CheckpointError: a file is missing, damaged or not understood, or a hub does not give it.
        """
        check = partial(check_loadable, processes=options.tensor_parallel, expert_parallel=options.expert_parallel)
        return cls.read(Checkpoint(await asyncio.to_thread(find_model, model, check=check)), options)

    @classmethod
    def read(cls, checkpoint: Checkpoint, options: ServiceOptions) -> Self:
        """Read them from the files of a checkpoint.

        Raises:
            UsageError: `options.max_model_len` is beyond the model's context, or the model cannot be sharded.
            CheckpointError: a file is missing, damaged or not understood.
        """
        mtp = Speculation.parse(options.speculation).mtp
        config = read_config(checkpoint, mtp="required" if mtp else "unused")
        Part(config, 0, options.tensor_parallel, options.expert_parallel)  # refused before weights are read
        longest = options.max_model_len or config.max_context
        if longest > config.max_context:
            raise UsageError(f"max_model_len is {longest:,}: give 2 to {config.max_context:,}, the model's context")
        tokenizer = load_tokenizer(checkpoint.directory)
        template = load_template(checkpoint.directory, checkpoint.config, tokenizer)
        return cls(
            directory=checkpoint.directory,
            config=config,
            tokenizer=tokenizer,
            template=template,
            stop_ids=frozenset(config.stop_ids) | frozenset(template.stop_ids),
            generation_defaults={}
            if options.generation_config == "none"
            else read_generation_defaults(checkpoint.directory),
            max_model_len=longest,
        )


class ModelService:
    """The properties of the model of a `Service` or a `ReplicaSet`.

    Attributes:
        model: the model directory.
        options: of each engine; their adapters are those that requests can name now.
        config, tokenizer, template, stop_ids, generation_defaults: as of `ServiceModel`.
        max_model_len: the longest prompt with its answer, in tokens; of several engines the shortest.
    """

    def __init__(self, served: ServiceModel, options: ServiceOptions) -> None:
        self.model = served.directory
        self.options = options
        self.config, self.tokenizer, self.template = served.config, served.tokenizer, served.template
        self.stop_ids, self.generation_defaults = served.stop_ids, served.generation_defaults
        self.max_model_len = served.max_model_len
