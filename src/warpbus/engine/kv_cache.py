"""The paged KV cache: keys and values in blocks of tokens, in memory that is committed as it is needed.

Knows layers, blocks and bytes, and nothing of token ids, text, sampling or requests: `blocks` and `scheduler` decide
which block holds which tokens.
"""

from collections import abc

import torch
from torch import Tensor

from warpbus.cuda.vmm import Arena
from warpbus.engine.blocks import BLOCK
from warpbus.engine.logits import to_device
from warpbus.errors import DeviceError, UsageError
from warpbus.formats.kv_cache import KVCacheScheme
from warpbus.kernels.ops import attention, mla
from warpbus.kernels.reference.cache import INT4, stored_length
from warpbus.kernels.reference.latent_cache import LATENT_CODES
from warpbus.kernels.reference.latent_cache import token_bytes as latent_bytes
from warpbus.models import Decoder, LatentAttentionSpec, ModelConfig
from warpbus.models.cost import kv_cache_bytes
from warpbus.models.kv_scales import KVScales

KV_DTYPES = ("auto", "int8", "fp8", "int4", "unquantized")
"""Storage types of a cache: that of the checkpoint's scales, else the dtype of the activations; 8 bits with the
checkpoint's scales if it has them for this type, else with one scale per token and head; 4 bits after a Hadamard
rotation, with one scale per token and head; the dtype of the activations. Latents (MLA) can be stored in "fp8" only.
"""

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": INT4}

_GROWTH = 128 * 2**20  # bytes committed at once: each mapping has a fixed cost, and the memory is zeroed


class KVCache:
    """Keys and values of `count` blocks, of which the first ones have committed memory.

    A block holds all layers of its tokens: `[layers, 2, kv_heads, BLOCK, head_dim]`. So the cache grows and shrinks at
    its end and addresses do not change: captured graphs stay valid. With multi-head latent attention it is
    `[layers, 1, 1, BLOCK, kv_rank + rope_dim]`: latents, which stand for keys and values, and rotary keys. If layers
    have indexers, their keys are stored too: `[indexers, 1, BLOCK, index_dim]`. Of "fp8" latents each token is a row of
    bytes with its own scales (`kernels.reference.latent_cache`).

    Args:
        config: of the model, or of one process's part of it.
        count: blocks for which addresses are reserved.
        dtype: of the activations.
        kv_dtype: one of `KV_DTYPES`.
        scales: of the checkpoint, for this part of the model; used if they are for the storage type.

    Attributes:
        count: blocks for which addresses are reserved.
        committed: how many blocks, the first ones, have memory.
        layers: of each layer, that of multi-token prediction included, keys and values `[count, kv_heads, BLOCK,
            head_dim]`, for int4 head_dim / 2 bytes; and for codes their float32 scales `[count, kv_heads, BLOCK]`, else
            None twice. With multi-head latent attention the values are a view of the keys, and "fp8" latents, which
            hold their scales, are `[count, 1, BLOCK, bytes]` twice. Only committed blocks may be accessed.
        fixed_scales: of each layer the scales that keys and values are written with, float32 `[kv_heads]` each; None if
            each vector has its own.
        index_keys: of each layer the keys of its indexer `[count, 1, BLOCK, index_dim]`; None if it has none.
    """

    def __init__(
        self,
        config: ModelConfig,
        count: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: str = "auto",
        scales: KVScales | None = None,
    ) -> None:
        self.count = count
        self.committed = 0
        stored, entry = stored_dtype(config, kv_dtype, dtype), config.attention.cache_entry
        shape = (count, len(config.all_layers), entry.vectors, entry.heads, BLOCK)
        key_length, value_length = (stored_length(dim, stored) for dim in (entry.key_dim, entry.value_dim))
        rows_of_bytes = entry.latent and stored == LATENT_CODES
        if rows_of_bytes:
            key_length = value_length = latent_bytes(entry.value_dim, entry.key_dim - entry.value_dim, dtype)
        self._parts = [_ArenaTensor((*shape, key_length), stored, device)]
        if stored != dtype and not rows_of_bytes:
            self._parts.append(_ArenaTensor(shape, torch.float32, device))
        self.layers: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
        for layer in range(len(config.all_layers)):
            keys, values, *own_scales = (part.data[:, layer, which] for part in self._parts for which in (0, -1))
            values = values[..., :value_length]
            key_scales, value_scales = own_scales or (None, None)
            self.layers.append((keys, values, key_scales, value_scales))
        self.fixed_scales: list[tuple[Tensor, Tensor] | None] = [None] * len(config.all_layers)
        if scales is not None and scales.scheme.stored == stored:
            of_layers = zip(scales.keys, scales.values, strict=False)  # that of multi-token prediction may be unused
            moved = [(keys.to(device), values.to(device)) for keys, values in of_layers]
            self.fixed_scales = list(moved[: len(config.all_layers)])
        dims = [layer.attention.cache_entry.index_dim for layer in config.all_layers]
        self.index_keys: list[Tensor | None] = [None] * len(dims)
        indexers = [layer for layer, dim in enumerate(dims) if dim]
        if indexers:
            self._parts.append(_ArenaTensor((count, len(indexers), 1, BLOCK, max(dims)), dtype, device))
            for at, layer in enumerate(indexers):
                self.index_keys[layer] = self._parts[-1].data[:, at]

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._parts[0].data.device

    @property
    def kind(self) -> str | None:
        """How keys and values are stored as codes, in words; None for the dtype of the activations."""
        names = {dtype: name for name, dtype in CODES.items()}
        name = names.get(self._parts[0].data.dtype)
        if name is None:
            return None
        return name if self.fixed_scales[0] is None else f"{name} with the checkpoint's scales"

    @property
    def nbytes(self) -> int:
        """Bytes of committed memory."""
        return sum(part.arena.mapped for part in self._parts)

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return sum(part.block_bytes for part in self._parts)

    def commit(self, blocks: int) -> int:
        """Commit memory for the first `blocks` blocks and some more, as far as there is memory; how many have it
        then."""
        if blocks > self.committed:
            more = max(blocks - self.committed, _GROWTH // self.block_bytes)
            for wanted in (min(self.committed + more, self.count), blocks):
                try:
                    self._resize(wanted)
                    break
                except DeviceError:  # no more memory: the caller gets fewer blocks
                    self._resize(self.committed)
        return self.committed

    def shrink(self, blocks: int) -> None:
        """Return the memory of all but the first `blocks` blocks, except for the rest of the last mapped piece."""
        self._resize(min(blocks, self.committed))

    def fetch(self, blocks: abc.Sequence[int]) -> list[Tensor]:
        """The content of some blocks, for `store`, in memory of torch, which can be copied to any device."""
        return [part.rows().index_select(0, to_device(blocks, torch.int64, part.data.device)) for part in self._parts]

    def store(self, blocks: abc.Sequence[int], contents: abc.Sequence[Tensor]) -> None:
        """Write the content of as many blocks of another cache of the same shape to committed blocks."""
        for part, content in zip(self._parts, contents, strict=True):
            device = part.data.device
            part.rows().index_copy_(0, to_device(blocks, torch.int64, device), content.to(device, non_blocking=True))

    def rows(self) -> list[Tensor]:
        """The content of all blocks as int64 `[count, elements]`, in one or several tensors."""
        return [part.rows() for part in self._parts]

    def copy(self, source: int, target: int) -> None:
        """Copy the content of one block to another."""
        for rows in self.rows():
            rows[target].copy_(rows[source])

    def close(self) -> None:
        """Return all memory and addresses."""
        self.layers, self.index_keys = [], []
        for part in self._parts:
            part.data = part.data.new_empty(0)
            part.arena.close()

    def _resize(self, blocks: int) -> None:
        for part in self._parts:
            part.arena.resize(blocks * part.block_bytes)
        committed = min(self.count, *(part.arena.mapped // part.block_bytes for part in self._parts))
        if committed > self.committed:
            # Zeros, not NaN: kernels multiply the unwritten end of a block by attention weights of 0.
            for part in self._parts:
                part.data[self.committed : committed].view(torch.uint8).zero_()
        self.committed = committed


class _ArenaTensor:
    """The part of all blocks that has one element type: keys and values, or their scales."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.block_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
        self.arena = Arena(shape[0] * self.block_bytes, device)
        self.data = self.arena.tensor(shape, dtype)

    def rows(self) -> Tensor:
        """The same as int64 `[blocks, elements]`, which torch copies fast whatever the element type is."""
        return self.data.view(len(self.data), -1).view(torch.int64)


def stored_dtype(config: ModelConfig, kv_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """The storage dtype of a `kv_dtype` for activations of `dtype`.

    Raises:
        UsageError: not one of `KV_DTYPES`, or not supported for the model's attention.
    """
    if kv_dtype not in KV_DTYPES:
        raise UsageError(f"kv_dtype is {kv_dtype!r}: give {', '.join(KV_DTYPES)}")
    if kv_dtype in CODES and kv_dtype != "fp8" and config.attention.cache_entry.latent:
        raise UsageError(
            f"kv_dtype is {kv_dtype!r}: the latents of multi-head latent attention are cached in the dtype of the "
            "activations or in FP8: give auto or fp8"
        )
    if kv_dtype == "int4" and (size := config.attention.cache_entry.key_dim) % 2:
        raise UsageError(f"kv_dtype is 'int4', and heads have {size} dimensions, an odd number: give int8 or fp8")
    return CODES.get(kv_dtype, dtype)


def chosen_dtype(kv_dtype: str, scheme: KVCacheScheme | None) -> str:
    """`kv_dtype`; for "auto", the one for a checkpoint whose KV cache has this scheme."""
    return scheme.dtype if kv_dtype == "auto" and scheme is not None else kv_dtype


def usable_dtype(model: Decoder, kv_dtype: str) -> str:
    """The `chosen_dtype` for a model.

    Raises:
        UsageError: as `stored_dtype`; or codes on a GPU without kernels. On a CPU PyTorch's operators do the work.
    """
    weight = model.final_norm.weight
    kv_dtype = chosen_dtype(kv_dtype, None if model.kv_scales is None else model.kv_scales.scheme)
    stored, device = stored_dtype(model.config, kv_dtype, weight.dtype), weight.device
    if stored == weight.dtype or weight.is_cpu or has_decode_kernels(model.config, weight.dtype, device, stored):
        return kv_dtype
    if stored == INT4 and has_decode_kernels(model.config, weight.dtype, device):
        raise UsageError(
            f"kv_dtype is 'int4', but its kernels on {device} are for heads of a multiple of 32 dimensions, and this "
            f"model's have {model.config.attention.cache_entry.key_dim}: give int8 or fp8"
        )
    raise UsageError(
        f"kv_dtype is {kv_dtype!r}, but there are no kernels for it for this model in {weight.dtype} on {device}: give "
        "unquantized, or float16 or bfloat16 on a GPU"
    )


def token_bytes(config: ModelConfig, dtype: torch.dtype, kv_dtype: str) -> int:
    """Bytes per token in a `KVCache`."""
    return kv_cache_bytes(config, dtype, stored_dtype(config, kv_dtype, dtype))


def has_decode_kernels(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, stored: torch.dtype | None = None
) -> bool:
    """Whether attention of single tokens has kernels that read the cache, so that CUDA graphs can capture a step.

    Args:
        dtype: of the activations; `stored`: of the cache, by default that of the activations.
    """
    spec = config.attention
    if isinstance(spec, LatentAttentionSpec):
        return stored in (None, dtype, LATENT_CODES) and mla.has_kernel(
            dtype, spec.nope_dim, spec.rope_dim, spec.kv_rank, spec.value_dim, device
        )
    return attention.has_kernel(dtype, spec.head_dim, device, stored)
