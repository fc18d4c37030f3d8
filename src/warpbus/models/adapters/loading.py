"""Loads an adapter directory as a `Lora` or a `Prefix` of a decoder."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from warpbus.errors import CheckpointError, TensorError
from warpbus.formats.peft import CONFIG, PeftLora
from warpbus.formats.ptuning import is_prefix, read_prefix
from warpbus.models.adapters.adapter import Lora, LowRank, Prefix
from warpbus.models.adapters.sites import Site, placed
from warpbus.models.config import ModelConfig
from warpbus.models.row_order import in_decoder_order


def load_adapter(
    directory: str | Path,
    config: ModelConfig,
    *,
    name: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Lora | Prefix:
    """Read an adapter for a decoder: a LoRA in PEFT's format, or a prefix of ChatGLM's P-Tuning v2.

    All names and shapes are checked before memory is allocated for a tensor.

    Args:
        directory: of the adapter.
        config: of the whole decoder, also if it is sharded.
        name: the name that requests select it by; the directory's name by default.
        device, dtype: of its tensors.

    Raises:
        CheckpointError: the directory is not an adapter, is damaged or not supported, or is for another model.
        TensorError: a tensor is missing, has the wrong shape or type, or values that are not finite in `dtype`.
    """
    directory = Path(directory)
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "there is no such directory"
        raise CheckpointError(f"{directory}: {found}: expected the directory of an adapter, with {CONFIG}")
    name = name or directory.resolve().name
    if (directory / CONFIG).exists():
        return _load_lora(directory, config, name, device, dtype)
    if is_prefix(directory):
        return _load_prefix(directory, config, name, device, dtype)
    raise CheckpointError(
        f"{directory}: holds no adapter: expected {CONFIG} (LoRA), or a config.json with pre_seq_len (P-Tuning v2)"
    )


def _load_lora(directory: Path, config: ModelConfig, name: str, device: torch.device | str, dtype: torch.dtype) -> Lora:
    file = PeftLora.open(directory)
    by_linear: dict[str, list[tuple[str, Site]]] = {}
    for module, site in placed(file, config).items():
        by_linear.setdefault(site.linear, []).append((module, site))
    parts = {}
    for linear, members in by_linear.items():
        fused = _fused(config, [(site, *file.read(module)) for module, site in members])
        a, b = (_cast(matrix, f"{file.file}: {linear}", device, dtype) for matrix in fused)
        parts[linear] = LowRank(a, b)
    return Lora(name, parts)


def _fused(config: ModelConfig, members: Sequence[tuple[Site, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The update of a fused matrix of the decoder, from the updates of its parts.

    Parts with the same A share its rows: an update that was trained as one and saved in parts becomes one again.
    """
    distinct: list[Tensor] = []
    columns = []
    for _, a, _ in members:
        place = next((index for index, other in enumerate(distinct) if torch.equal(a, other)), len(distinct))
        if place == len(distinct):
            distinct.append(a)
        first = sum(len(other) for other in distinct[:place])
        columns.append(slice(first, first + len(a)))
    stacked = torch.cat(distinct)
    fused = stacked.new_zeros(members[0][0].linear_rows, len(stacked))
    for (site, _, b), where in zip(members, columns, strict=True):
        fused[site.start : site.start + site.rows, where] = b
    return stacked, in_decoder_order(config, f"{members[0][0].linear}.weight", fused)


def _load_prefix(
    directory: Path, config: ModelConfig, name: str, device: torch.device | str, dtype: torch.dtype
) -> Prefix:
    heads = config.attention.num_kv_heads, config.attention.head_dim
    rows = read_prefix(directory, config.num_layers * 2 * heads[0] * heads[1])
    placed_rows = _cast(rows, f"{directory}: the prefix", device, dtype)
    keys, values = placed_rows.view(len(rows), config.num_layers, 2, *heads).permute(2, 1, 0, 3, 4)
    return Prefix(name, keys.contiguous(), values.contiguous())


def _cast(tensor: Tensor, what: str, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype)
    if not bool(cast.isfinite().all()):
        raise TensorError(f"{what}: has values that {dtype} cannot hold: use bfloat16 or float32")
    return cast.to(device)
