"""The adapters of an engine: LoRAs beside its model's linears, the names that requests give, and salts for blocks."""

import hashlib
from collections.abc import Collection, Sequence

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


def adapt(model: Decoder, adapters: Sequence[Adapter]) -> Selection:
    """Put the LoRAs among some adapters beside a model's linears; which row has which is the selection's to say.

    A model that has the same ones already, a copy of another's for instance, keeps them.

    Args:
        model: in eval mode; one of several processes' parts (`Part`) with its part of the LoRAs (`cut`).

    Raises:
        UsageError: the model has others already.
        CheckpointError: a LoRA does not fit the model, or holds NaN or infinity in the model's dtype.
    """
    loras = [adapter for adapter in adapters if isinstance(adapter, Lora)]
    there = next((part.selection for part in model.modules() if isinstance(part, Adapted)), Selection(()))
    if not loras or (len(there.source) == len(loras) and all(map(_is, there.source, loras))):
        return there
    if there.source:
        raise UsageError("the model has adapters of another engine: load it once more for these")
    selection, like = Selection(loras), model.final_norm.weight
    for name in sorted({name for lora in loras for name in lora.parts}):
        parent, attribute, linear = _linear(model, name, loras)
        pairs = [_pair(lora, name, linear, like.dtype) for lora in loras]
        parent.add_module(attribute, Adapted(linear, pairs, selection, dtype=like.dtype, device=like.device))
    return selection


def cut(adapter: Adapter, part: Part) -> Adapter:
    """What one of the processes that share a model needs of an adapter: of each a and b what it has of the linear."""
    if isinstance(adapter, Prefix):
        keys = part.kv_spans
        return Prefix(adapter.name, _heads(adapter.keys_lthd, keys), _heads(adapter.values_lthd, keys))
    return Lora(adapter.name, {name: _cut(low, name, part) for name, low in adapter.parts.items()})


def stacked_bytes(adapters: Sequence[Adapter], dtype: torch.dtype) -> int:
    """What the LoRAs among some adapters take on the device."""
    loras = [adapter for adapter in adapters if isinstance(adapter, Lora)]
    total = 0
    for name in {name for lora in loras for name in lora.parts}:
        parts = [lora.parts[name] for lora in loras if name in lora.parts]
        columns = padded(sum(part.rank for part in parts))
        total += columns * (parts[0].a.shape[1] + parts[0].b.shape[0]) * dtype.itemsize
    return total


def check_adapter(name: str | None, names: Collection[str]) -> None:
    """Raises UsageError where a request names an adapter that is not among those that were loaded."""
    if name is not None and name not in names:
        there = f"give one of {', '.join(names)}" if names else "the model was loaded without any"
        raise UsageError(f"there is no adapter {name[:200]!r}: {there}")


def salt_of(name: str | None, cache_salt: bytes = b"") -> bytes:
    """What keeps blocks from being shared between adapters, whose keys and values are their own, and between requests
    of different salts, which may not learn of each other (`Request.salt`); empty for a request with neither.

    Args:
        name: of the adapter, not empty.
        cache_salt: at most 64 bytes.
    """
    if name is None and not cache_salt:
        return b""
    return hashlib.blake2b((name or "").encode(), digest_size=16, key=cache_salt).digest()


def _is(one: object, other: object) -> bool:
    return one is other


def _linear(model: Decoder, name: str, loras: Sequence[Lora]) -> tuple[nn.Module, str, nn.Linear | QuantizedLinear]:
    """Where a linear of the layers stands: the module that has it, by which name, and the linear."""
    path, _, attribute = name.rpartition(".")
    try:
        parent = model.get_submodule(path)
        linear = parent.get_submodule(attribute)
    except AttributeError:
        linear = None
    if isinstance(linear, Parallel):
        parent, attribute, linear = linear, "part", linear.part
    # The head has other rows than the layers.
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
    # Others' rows are multiplied by them too, and 0 times infinity is no number.
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
    """Of keys or values those heads whose rows of a whole matrix of keys these are."""
    rows = [x_lthd.flatten(2)[..., span.start : span.stop] for span in keys]
    return torch.cat(rows, dim=-1).unflatten(-1, (-1, x_lthd.shape[-1]))
