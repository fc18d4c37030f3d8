"""The adapters of an engine: installs LoRAs in its model, checks the names of requests, and salts block keys."""

import hashlib
from collections import abc
from collections.abc import Collection

import torch
from torch import Tensor, nn

from warpbus.errors import CheckpointError, UsageError
from warpbus.models import Decoder
from warpbus.models.adapters import Lora, LowRank, Prefix
from warpbus.models.layers import Adapted, QuantizedLinear, Selection
from warpbus.models.layers.adapted import padded
from warpbus.models.layers.parallel import Parallel
from warpbus.models.parallel import Part, Span, Spans, copy_spans, joined

Adapter = Lora | Prefix


def adapt(model: Decoder, adapters: abc.Sequence[Adapter]) -> Selection:
    """Add the LoRAs among some adapters to a model's linear layers; the returned selection sets the LoRA of each row.

    A model that already has the same LoRAs, for instance a copy of an adapted model, keeps them.

    Args:
        model: in eval mode; one of several processes' parts (`Part`) with its part of the LoRAs (`cut`).

    Raises:
        UsageError: the model already has other LoRAs.
        CheckpointError: a LoRA does not fit the model, or holds NaN or infinity in the model's dtype.
    """
    loras = [adapter for adapter in adapters if isinstance(adapter, Lora)]
    there = next((part.selection for part in model.modules() if isinstance(part, Adapted)), Selection(()))
    if not loras or (len(there.source) == len(loras) and all(map(_is, there.source, loras))):
        return there
    if there.source:
        raise UsageError("the model has adapters of another engine: load it once more for these")
    selection, like = Selection(loras), model.final_norm.weight
    matrices = {f"layers.{index}.{matrix.name}": matrix for index, matrix in model.config.matrices}
    for name in sorted({name for lora in loras for name in lora.parts}):
        owner = next(lora for lora in loras if name in lora.parts)
        if name in matrices and matrices[name].expert is not None:
            raise CheckpointError(
                f"{owner.name}: {name}: LoRAs of routed experts are not supported here: merge it with warpbus merge, "
                "or use one for attention and the shared expert"
            )
        if name in matrices and matrices[name].dequantized:
            raise CheckpointError(
                f"{owner.name}: {name}: LoRAs of this matrix are not supported here, because decoding absorbs it into "
                "queries and outputs: merge it with warpbus merge, or use one for the other matrices"
            )
        parent, attribute, linear = _linear(model, name, loras)
        pairs = [_pair(lora, name, linear, like.dtype) for lora in loras]
        parent.add_module(attribute, Adapted(linear, pairs, selection, dtype=like.dtype, device=like.device))
    return selection


def readapt(model: Decoder, adapters: abc.Sequence[Adapter]) -> Selection:
    """Give a model the LoRAs among some adapters instead of those that it has.

    Raises:
        CheckpointError: as `adapt`; the model then has its former LoRAs.
    """
    former = _strip(model)
    try:
        return adapt(model, adapters)
    except BaseException:
        _strip(model)
        for parent, name, adapted in former:
            parent.add_module(name, adapted)
        raise


def _strip(model: Decoder) -> list[tuple[nn.Module, str, Adapted]]:
    """Remove all LoRAs from a model; their parents, their names there, and themselves."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, Adapted)
    ]
    for parent, name, adapted in found:
        parent.add_module(name, adapted.part)
    return found


def cut(adapter: Adapter, part: Part) -> Adapter:
    """One process's shard of an adapter: the rows and columns of a and b that belong to its part of each linear."""
    if isinstance(adapter, Prefix):
        keys = part.kv_spans
        return Prefix(adapter.name, _heads(adapter.keys_lthd, keys), _heads(adapter.values_lthd, keys))
    return Lora(adapter.name, {name: _cut(low, name, part) for name, low in adapter.parts.items()})


def stacked_bytes(adapters: abc.Sequence[Adapter], dtype: torch.dtype) -> int:
    """The bytes of the LoRAs among some adapters on the device."""
    loras = [adapter for adapter in adapters if isinstance(adapter, Lora)]
    total = 0
    for name in {name for lora in loras for name in lora.parts}:
        parts = [lora.parts[name] for lora in loras if name in lora.parts]
        columns = padded(sum(part.rank for part in parts))
        total += columns * (parts[0].a.shape[1] + parts[0].b.shape[0]) * dtype.itemsize
    return total


def check_adapter(name: str | None, names: Collection[str]) -> None:
    """Raises UsageError if a request names an adapter that is not loaded."""
    if name is not None and name not in names:
        there = f"give one of {', '.join(names)}" if names else "the model was loaded without any"
        raise UsageError(f"there is no adapter {name[:200]!r}: {there}")


def lora_numbers(adapters: abc.Sequence[Adapter]) -> dict[str | None, int]:
    """The numbers of the LoRAs in `Selection.rows`, by name."""
    loras = [adapter.name for adapter in adapters if isinstance(adapter, Lora)]
    return {name: number for number, name in enumerate(loras, start=1)}


def salt_of(name: str | None, cache_salt: bytes = b"", content: bytes = b"") -> bytes:
    """The salt of block keys (`SchedulerState.salt`), which keeps different adapters from sharing blocks, because their
    keys and values differ, and requests of different cache salts, for privacy; empty for a request with neither.

    Args:
        name: of the adapter, not empty.
        cache_salt: at most 64 bytes.
        content: the digest of the adapter's tensors, where blocks outlive the adapter.
    """
    if name is None and not cache_salt:
        return b""
    return hashlib.blake2b(content + (name or "").encode(), digest_size=16, key=cache_salt).digest()


class BlockSalts:
    """The salts of an engine's requests.

    Args:
        outliving: blocks may outlive the engine, when another adapter may have got the name of one: the salt depends on
            the adapter's tensors, too.
    """

    def __init__(self, *, outliving: bool) -> None:
        self._outliving = outliving
        self._digests: dict[str, tuple[Adapter, bytes]] = {}

    def of(self, adapter: Adapter | None, cache_salt: bytes) -> bytes:
        """As `salt_of`, for an adapter."""
        if adapter is None or not self._outliving:
            return salt_of(None if adapter is None else adapter.name, cache_salt)
        known = self._digests.get(adapter.name)
        if known is None or known[0] is not adapter:
            known = self._digests[adapter.name] = adapter, _content(adapter)
        return salt_of(adapter.name, cache_salt, known[1])


def _content(adapter: Adapter) -> bytes:
    """The digest of an adapter's tensors."""
    digest = hashlib.blake2b(digest_size=32)
    if isinstance(adapter, Prefix):
        tensors = {"keys": adapter.keys_lthd, "values": adapter.values_lthd}
    else:
        tensors = {f"{name} {part}": getattr(low, part) for name, low in adapter.parts.items() for part in ("a", "b")}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _is(one: object, other: object) -> bool:
    return one is other


def _linear(model: Decoder, name: str, loras: abc.Sequence[Lora]) -> tuple[nn.Module, str, nn.Linear | QuantizedLinear]:
    """The parent module of a linear of the layers, its attribute name there, and the linear itself."""
    path, _, attribute = name.rpartition(".")
    try:
        parent = model.get_submodule(path)
        linear = parent.get_submodule(attribute)
    except AttributeError:
        linear = None
    if isinstance(linear, Parallel):
        parent, attribute, linear = linear, "part", linear.part
    # The head is not adapted: its rows are not those of the layers.
    if not name.startswith("layers.") or not isinstance(linear, nn.Linear | QuantizedLinear):
        owner = next(lora for lora in loras if name in lora.parts)
        raise CheckpointError(f"adapter {owner.name}: it changes {name}, which is no linear of this model's layers")
    return parent, attribute, linear


def _pair(
    lora: Lora, name: str, linear: nn.Linear | QuantizedLinear, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """A LoRA's a and b for a linear, in the dtype of the activations."""
    if name not in lora.parts:
        return None
    a, b = lora.parts[name].a.to(dtype), lora.parts[name].b.to(dtype)
    if a.shape != (len(a), linear.in_features) or b.shape != (linear.out_features, len(a)):
        raise CheckpointError(
            f"adapter {lora.name}: its matrices of {name} are {list(a.shape)} and {list(b.shape)}, expected "
            f"[rank, {linear.in_features}] and [{linear.out_features}, rank]: it is another model's"
        )
    # Rows of other requests are multiplied by them too (times 0), and 0 times infinity is NaN.
    if not (a.isfinite().all() and b.isfinite().all()):
        raise CheckpointError(
            f"adapter {lora.name}: its matrices of {name} hold NaN or infinity in {dtype}: it is damaged, or needs "
            "dtype bfloat16 or float32"
        )
    return a, b


def _cut(low: LowRank, name: str, part: Part) -> LowRank:
    rank, width = low.a.shape
    _, rows = joined(part.rows(f"{name}.weight", len(low.b)))
    _, columns = part.columns(f"{name}.weight", width)
    a = low.a.new_empty(rank, sum(span.size for span in columns))
    b = low.b.new_empty(sum(span.size for span in rows), rank)
    copy_spans(a, low.a, (Span(0, rank),), columns, low.a.numel())
    copy_spans(b, low.b, rows, None, low.b.numel())
    return LowRank(a, b)


def _heads(x_lthd: Tensor, keys: Spans) -> Tensor:
    """The heads of keys or values that belong to these rows of the full key projection."""
    rows = [x_lthd.flatten(2)[..., span.start : span.stop] for span in keys]
    return torch.cat(rows, dim=-1).unflatten(-1, (-1, x_lthd.shape[-1]))
