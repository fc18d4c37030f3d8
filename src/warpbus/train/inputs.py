"""The inputs of a run: the model's config, the tokenized data, and the number of steps."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from warpbus.errors import CheckpointError, UsageError
from warpbus.formats import Checkpoint, format_of, read_schemes
from warpbus.formats.dequantizing import dequantized
from warpbus.models import LatentAttentionSpec, ModelConfig, quantized_parameters, read_config
from warpbus.qtensor import Scheme
from warpbus.train.dataset import Batches, Documents, tokenize
from warpbus.train.settings import TrainingSettings

# Also of forms that are not read: a directory with one of them is no model without weights, and is refused.
_WEIGHT_FILES = tuple(
    f"*.{suffix}"
    for kind in ("safetensors", "bin", "gguf", "pt", "pth", "h5", "msgpack", "onnx")
    for suffix in (kind, f"{kind}.index.json")
)
_MOST_HASHED, _HASHED_BYTES = 2048, 4096


@dataclass(frozen=True)
class Inputs:
    """The model and the data of a run, checked; weights are not loaded.

    Attributes:
        checkpoint: of the model, with or without weights.
        config: of the model.
        batches: of the data.
        settings: with the numbers of steps filled in.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    batches: Batches
    settings: TrainingSettings

    @classmethod
    def read(cls, model: Path, data: Path, settings: TrainingSettings, workers: int) -> "Inputs":
        """Read and check the inputs.

        Args:
            workers: number of tokenizing processes.

        Raises:
            UsageError: the settings do not fit the model.
            CheckpointError: the model is not supported, or its tokenizer does not belong to it.
            DataError: the data are missing or malformed.
        """
        checkpoint = Checkpoint(model, weights=any(any(model.glob(pattern)) for pattern in _WEIGHT_FILES))
        if format_of(checkpoint.config) is None:
            checkpoint = dequantized(checkpoint)  # a trained model is not written in FP8
        config = _config_of(checkpoint, settings)
        _check_fit(checkpoint, config, settings)
        documents = _read(data, checkpoint, config, settings.length, workers)
        batches = Batches(documents, settings.length, settings.rows_per_step, settings.seed)
        return cls(checkpoint, config, batches, settings.resolved(batches.steps_per_epoch()))

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of a model with quantized layers, that of their first matrix if there are several; else None."""
        found = quantized_parameters(self.checkpoint, self.config)
        return next((scheme for name, scheme in found.items() if name.startswith("layers.")), None)

    def weights_digest(self) -> str | None:
        """A hash of the beginnings of up to `_MOST_HASHED` weights; None if there are none.

        It distinguishes models with the same config, also after their directories were moved.
        """
        names = self.checkpoint.names()
        if not names:
            return None
        hashed = hashlib.blake2b(digest_size=16)
        for name in names[:: math.ceil(len(names) / _MOST_HASHED)]:
            hashed.update(name.encode())
            hashed.update(next(iter(self.checkpoint.chunks(name)), b"")[:_HASHED_BYTES])
        return hashed.hexdigest()

    def held_out(self, data: Path, workers: int) -> Documents:
        """Tokenize validation data; arguments and errors as `read`."""
        return _read(data, self.checkpoint, self.config, self.settings.length, workers)


def _config_of(checkpoint: Checkpoint, settings: TrainingSettings) -> ModelConfig:
    """The config of the model, with the layer of multi-token prediction if that is trained."""
    if not settings.mtp_weight:
        return read_config(checkpoint)
    fresh = not checkpoint.names()
    config = read_config(checkpoint, mtp="announced" if fresh else "required")
    if config.mtp is None:
        raise UsageError(
            f"--mtp-weight {settings.mtp_weight}: config.json of {checkpoint.directory} announces no layer of "
            "multi-token prediction (num_nextn_predict_layers): drop it, or use another model"
        )
    return config


def _check_fit(checkpoint: Checkpoint, config: ModelConfig, settings: TrainingSettings) -> None:
    model = checkpoint.directory
    if isinstance(config.attention, LatentAttentionSpec):
        raise UsageError(f"{model}: multi-head latent attention cannot be trained in this version: use another model")
    if config.has_experts and settings.fp8:
        raise UsageError(f"--fp8: {model} is a mixture of experts, which are not multiplied in FP8: drop --fp8")
    if config.has_experts and settings.compile and settings.recompute:
        raise UsageError(f"--compile and --recompute: {model} is a mixture of experts: use only one of the two")
    if read_schemes(checkpoint.config).distinct():
        if settings.method == "full":
            raise UsageError(
                f"{model}: the weights of a quantized model cannot be trained: use the original model, or train an "
                "adapter (--method lora or ptuning)"
            )
        if settings.quantize is not None:
            raise UsageError(f"--quantize {settings.quantize}: {model} is quantized already: drop --quantize")
    if settings.quantize is not None:
        for matrix in (matrix for layer in dict.fromkeys(config.all_layers) for matrix in layer.matrices):
            Scheme.parse(settings.quantize).groups(matrix.columns.length, f"--quantize: {matrix.name}")
    if settings.length > config.max_context:
        raise UsageError(f"--length {settings.length}: the context of {model} is {config.max_context} tokens: lower it")


def _read(data: Path, checkpoint: Checkpoint, config: ModelConfig, length: int, workers: int) -> Documents:
    model = checkpoint.directory
    documents = tokenize(data, model, checkpoint.config, length=length, workers=workers)
    if documents.tokens.max() >= config.vocab_size:
        raise CheckpointError(
            f"{model}: its tokenizer has more tokens than the vocab_size in config.json ({config.vocab_size}): "
            "check that they belong together"
        )
    return documents
