"""What a service knows of its model without weights; several services of one model share it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from warpbus.engine.options import ServiceOptions
from warpbus.engine.speculation import Speculation
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.models import ModelConfig, read_config
from warpbus.models.generation_defaults import read_generation_defaults
from warpbus.models.templates import Template, load_template
from warpbus.models.tokenizers import Tokenizer, load_tokenizer


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
    def read(cls, checkpoint: Checkpoint, options: ServiceOptions) -> Self:
        """Read them from the files of a checkpoint.

        Raises:
            UsageError: `options.max_model_len` is beyond the model's context.
            CheckpointError: a file is missing, damaged or not understood.
        """
        mtp = Speculation.parse(options.speculation).mtp
        config = read_config(checkpoint, mtp="required" if mtp else "unused")
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
