"""Maps the modules of a LoRA file to rows of the decoder's matrices."""

from collections.abc import Mapping
from dataclasses import dataclass

from warpbus.errors import CheckpointError, TensorError
from warpbus.formats.peft import PeftLora
from warpbus.formats.safetensors_io import shown
from warpbus.models.config import ModelConfig
from warpbus.models.parameter_source import tensor_map


@dataclass(frozen=True)
class Site:
    """A linear layer as a checkpoint has it.

    Attributes:
        module: its name there.
        linear: the decoder's linear of which it is a part, or all: "layers.0.attention.qkv".
        linear_rows: number of rows of that linear.
        start: its first row there.
        rows, columns: its shape.
    """

    module: str
    linear: str
    linear_rows: int
    start: int
    rows: int
    columns: int


def sites(config: ModelConfig) -> dict[str, Site]:
    """The linear layers of all decoder layers, by their modules' names in a checkpoint."""
    tensors, found = tensor_map(config), {}
    for index, matrix in config.matrices:
        linear, start = f"layers.{index}.{matrix.name}", 0
        total, columns = matrix.shape
        names = tensors[f"{linear}.weight"]
        for name, rows in zip(names, matrix.part_rows(len(names)), strict=True):
            module = name.removesuffix(".weight")
            found[module] = Site(module, linear, total, start, rows, columns)
            start += rows
    return found


def placed(lora: PeftLora, config: ModelConfig) -> dict[str, Site]:
    """The site of each module of a file, by its name in the file; no tensor is read.

    Raises:
        CheckpointError: if the model has no linear layer of a name, or the settings do not name it.
        TensorError: if a matrix is missing or does not fit the model.
    """
    known = _spelled(sites(config), lora.modules[0])
    for module in lora.modules:
        if module not in known:
            raise CheckpointError(
                f"{lora.file}: {shown(module)}: a decoder layer of this {config.family} model has no linear layer of "
                "that name, and nothing else is adapted: check that the adapter was trained for this model"
            )
        if lora.settings.is_target(module) is False:
            raise CheckpointError(
                f"{lora.file}: {shown(module)}: it has matrices, but adapter_config.json does not have it among its "
                "target_modules: check that the two files belong together"
            )
        site, (out, rank, width) = known[module], lora.shape(module)
        if (out, width) != (site.rows, site.columns):
            raise TensorError(
                f"{lora.file}: {shown(module)}: expected matrices [{rank}, {site.columns}] and [{site.rows}, {rank}], "
                f"as the model has it, found [{rank}, {width}] and [{out}, {rank}]: use an adapter trained for "
                "this model"
            )
    for module in known.keys() - set(lora.modules):
        if lora.settings.is_target(module):
            raise TensorError(
                f"{lora.file}: {module}: adapter_config.json has it among its target_modules, but the matrices are "
                "missing: save the adapter again"
            )
    return {module: known[module] for module in lora.modules}


def _spelled(known: Mapping[str, Site], first: str) -> Mapping[str, Site]:
    """The modules as a file calls them whose first one is `first`.

    An adapter of a model without its head has names that lack the first part, one of a model within another has a
    further `model.` in front.
    """
    spellings = (
        known,
        {module.partition(".")[2]: site for module, site in known.items()},
        {f"model.{module}": site for module, site in known.items()},
    )
    return next((spelling for spelling in spellings if first in spelling), known)
