"""Adapters on disk, in the forms that other programs read."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import TensorError, UsageError
from warpbus.formats.peft import MAX_RANK, write_peft
from warpbus.formats.ptuning import MAX_TOKENS, write_prefix
from warpbus.models.adapters.adapter import Lora, Prefix
from warpbus.models.adapters.sites import Site, sites
from warpbus.models.config import ModelConfig
from warpbus.models.families import BY_NAME
from warpbus.models.row_order import in_file_order


def save_lora(
    directory: str | Path,
    lora: Lora,
    config: ModelConfig,
    *,
    base: str,
    rank: int,
    alpha: float,
    overwrite: bool = False,
) -> None:
    """Write a LoRA in PEFT's format, for the modules that the family's own files have.

    Of a linear that such files have in parts, each part that is changed gets the whole A and its rows of B. Where the
    linear's rank is not `rank`, as that of one which came of several, a part gets the rows of A alone that it uses, and
    a rank of its own.

    Args:
        directory: a new one.
        lora: the LoRA to write; tensors are stored in their own dtype.
        config: of the decoder.
        base: the name or directory of the model that it belongs to.
        rank, alpha: the values for adapter_config.json; B is stored without their scaling, `alpha / rank`.
        overwrite: replace an adapter that is there.

    Raises:
        UsageError: if rank or alpha are out of range.
        TensorError: if the LoRA does not fit the model.
        StorageError: if the directory exists or cannot be written.
    """
    if not 1 <= rank <= MAX_RANK or not 0 < abs(alpha) <= 1e9:
        raise UsageError(
            f"rank {rank}, alpha {alpha:g}: expected a rank from 1 to {MAX_RANK} and an alpha that is not 0"
        )
    by_linear: dict[str, list[Site]] = {}
    for site in sites(config).values():
        by_linear.setdefault(site.linear, []).append(site)
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    ranks: dict[str, int] = {}
    for linear, part in lora.parts.items():
        members = by_linear.get(linear)
        expected = None if members is None else (members[0].linear_rows, members[0].columns)
        if members is None or (part.b.shape[0], part.a.shape[1]) != expected:
            raise TensorError(
                f"{lora.name}: {linear}: expected the matrix of a linear layer of {config.family}"
                f"{'' if expected is None else f', {list(expected)}'}, found {[part.b.shape[0], part.a.shape[1]]}"
            )
        scaled = in_file_order(config, f"{linear}.weight", part.b.detach().cpu())
        b_all = (scaled.to(torch.float32) / (alpha / rank)).to(scaled.dtype)
        changed = [site for site in members if bool(b_all[site.start : site.start + site.rows].any())]
        for site in changed or members:
            b = b_all[site.start : site.start + site.rows]
            used = b.ne(0).any(0) if changed and part.rank != rank else torch.ones(part.rank, dtype=torch.bool)
            matrices[site.module] = part.a.detach().cpu()[used], b[:, used]
            if (own := int(used.sum())) != rank:
                ranks[site.module] = own
    write_peft(
        Path(directory),
        matrices,
        {
            "base_model_name_or_path": base,
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": _targets(config, matrices.keys()),
            "rank_pattern": ranks,
            "alpha_pattern": {module: alpha * own / rank for module, own in ranks.items()},
        },
        overwrite=overwrite,
    )


def save_prefix(
    directory: str | Path, prefix: Prefix, config: ModelConfig, *, base: str, overwrite: bool = False
) -> None:
    """Write a prefix in the form of ChatGLM's P-Tuning v2: config.json with `pre_seq_len`, and the embedding.

    Args:
        directory: a new one.
        prefix: the prefix to write; tensors are stored in their own dtype.
        config: of the decoder.
        base: the name or directory of the model that it belongs to.
        overwrite: replace one that is there.

    Raises:
        TensorError: if the prefix does not fit the model.
        StorageError: if the directory exists or cannot be written.
    """
    heads = config.attention.num_kv_heads, config.attention.head_dim
    for tensor in (prefix.keys_lthd, prefix.values_lthd):
        if tuple(tensor.shape) != (config.num_layers, prefix.tokens, *heads) or not 1 <= prefix.tokens <= MAX_TOKENS:
            raise TensorError(
                f"{prefix.name}: expected keys and values [{config.num_layers}, 1 to {MAX_TOKENS}, {heads[0]}, "
                f"{heads[1]}], as the model has them, found {list(tensor.shape)}"
            )
    both = torch.stack([prefix.keys_lthd, prefix.values_lthd]).detach()
    rows = both.permute(2, 1, 0, 3, 4).reshape(prefix.tokens, -1)
    described: dict[str, Any] = {
        "_name_or_path": base,
        "model_type": BY_NAME[config.family].model_types[0],
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.attention.num_heads,
        "multi_query_attention": config.attention.num_kv_heads != config.attention.num_heads,
        "multi_query_group_num": config.attention.num_kv_heads,
        "kv_channels": config.attention.head_dim,
    }
    write_prefix(Path(directory), rows, described, overwrite=overwrite)


def _targets(config: ModelConfig, modules: Collection[str]) -> list[str]:
    """The value of PEFT's target_modules: the last parts of the names where every layer has the same, else all."""
    chosen = {module.rpartition(".")[2] for module in modules}
    meant = {module for module in sites(config) if module.rpartition(".")[2] in chosen}
    return sorted(chosen if meant == set(modules) else modules)
