"""What a run is made of before it begins: a model's config, its data, and how many steps there will be."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from warpbus.errors import CheckpointError, UsageError
from warpbus.formats import Checkpoint, read_schemes
from warpbus.models import ModelConfig, quantized_parameters, read_config
from warpbus.qtensor import Scheme
from warpbus.train.dataset import Batches, Documents, tokenize
from warpbus.train.settings import TrainingSettings

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")


@dataclass(frozen=True)
class Inputs:
    """The model to train and the data, read and found to fit; no weights.

    Attributes:
        checkpoint: the model's, without weights where it has none.
        config: its config.
        batches: of the data.
        settings: with the number of steps.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    batches: Batches
    settings: TrainingSettings

    @classmethod
    def read(cls, model: Path, data: Path, settings: TrainingSettings, workers: int) -> "Inputs":
        """Read all of it.

        Args:
            workers: processes to tokenize with.

        Raises:
            UsageError: settings that do not fit the model.
            CheckpointError: the model is not understood, or its tokenizer does not belong to it.
            DataError: the data are missing or malformed.
        """
        checkpoint = Checkpoint(model, weights=any(weight_files(model)))
        config = read_config(checkpoint)
        _check_fit(checkpoint, config, settings)
        documents = _read(data, checkpoint, config, settings.length, workers)
        batches = Batches(documents, settings.length, settings.rows_per_step, settings.seed)
        if settings.steps == 0:
            settings = replace(settings, steps=max(1, round(settings.epochs * batches.steps_per_epoch())))
        return cls(checkpoint, config, batches, settings)

    @property
    def scheme(self) -> Scheme | None:
        """Of the layers' matrices, where the model is quantized already; of the first where there are several."""
        return next(iter(quantized_parameters(self.checkpoint, self.config).values()), None)

    def held_out(self, data: Path, workers: int) -> Documents:
        """Further data, for validation; arguments and errors as of `read`."""
        return _read(data, self.checkpoint, self.config, self.settings.length, workers)


def weight_files(directory: Path) -> Iterator[Path]:
    """The files of weights of a model directory."""
    return (file for pattern in _WEIGHT_FILES for file in directory.glob(pattern))


def _check_fit(checkpoint: Checkpoint, config: ModelConfig, settings: TrainingSettings) -> None:
    model = checkpoint.directory
    if read_schemes(checkpoint.config).distinct():
        if settings.method == "full":
            raise UsageError(
                f"{model}: the weights of a quantized model cannot be trained: give the one that it was made from, or "
                "train an adapter for it (--method lora or ptuning)"
            )
        if settings.quantize is not None:
            raise UsageError(f"--quantize {settings.quantize}: {model} is quantized already: leave it out")
    if settings.quantize is not None:
        for matrix in config.layers[0].matrices:
            Scheme.parse(settings.quantize).groups(matrix.columns.length, f"--quantize: {matrix.name}")
    if settings.length > config.max_context:
        raise UsageError(f"--length {settings.length}: the positions of {model} end at {config.max_context}: lower it")


def _read(data: Path, checkpoint: Checkpoint, config: ModelConfig, length: int, workers: int) -> Documents:
    model = checkpoint.directory
    documents = tokenize(data, model, checkpoint.config, length=length, workers=workers)
    if documents.tokens.max() >= config.vocab_size:
        raise CheckpointError(
            f"{model}: its tokenizer knows more tokens than the {config.vocab_size} that config.json says: "
            "check that they belong together"
        )
    return documents
