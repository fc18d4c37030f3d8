"""Transfers between this process and the remote GPU: uploads, reads, copies; also `set_` and `resize_`."""

import hashlib
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import DeviceError
from warpbus.pool.client import links
from warpbus.pool.client.dispatch import Operator
from warpbus.pool.client.marks import behind, computed, is_marked
from warpbus.pool.client.selection import session_of
from warpbus.pool.client.session import Session, current, is_connected, selected, session_at
from warpbus.pool.client.tensors import NAME, geometry_of, is_remote, new_tensor, remote_of, set_geometry
from warpbus.pool.protocol.geometry import Geometry, contiguous
from warpbus.pool.protocol.signature import New

_HASHED_BYTES = 1 << 20
"""Uploads of at least this many bytes are offered by their hash first: the pool may have the content already."""

_IN_VAIN = 64
"""After this many unknown uploads of one size in a row, uploads of that size are sent without an offer."""

_SAME_DATA = frozenset({"cpu", "cuda", NAME})
"""Device types whose dense tensors PyTorch represents alike, so that a tensor can move among them in place."""

_NUMBERS = {
    dtype: Struct("<" + form)
    for dtype, form in {
        torch.bool: "?",
        torch.uint8: "B",
        torch.int8: "b",
        torch.int16: "h",
        torch.int32: "i",
        torch.int64: "q",
        torch.float16: "e",
        torch.float32: "f",
        torch.float64: "d",
    }.items()
}
"""Numbers that Python can read from their bytes itself."""

_aten = torch.ops.aten


def empty(size: Sequence[int], *, dtype: torch.dtype | None = None, memory_format: Any = None, **_: Any) -> Tensor:
    """`aten::empty.memory_format`; zeros, so that nobody sees what another tenant left."""
    geometry = contiguous(dtype or torch.get_default_dtype(), tuple(size))
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        like = torch.empty(size, dtype=geometry.dtype, memory_format=memory_format, device="meta")
        geometry = geometry_of(like)
    return _allocate(geometry)


def empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """`aten::empty_strided`."""
    return _allocate(Geometry(dtype or torch.get_default_dtype(), tuple(size), tuple(stride)))


def zeros(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """`aten::_efficientzerotensor`, which forward-mode derivatives are made of: zeros in memory."""
    return torch.zeros(size, dtype=dtype, device=current().device)


def _allocate(geometry: Geometry) -> Tensor:
    nbytes = geometry.extent
    return new_tensor(New(geometry, nbytes), current().allocate(nbytes))


def upload(source: Tensor) -> Tensor:
    """A tensor of the current session's device with the values, sizes and strides of one of the CPU."""
    target = torch.empty_like(source, device=current().device)
    fill(target, source)
    return target


def fill(target: Tensor, source: Tensor) -> None:
    """Write a CPU tensor into one of this device of the same sizes and dtype that has no gaps."""
    ordered = source.resolve_conj().resolve_neg().detach()
    if ordered.stride() != target.stride() or ordered.dtype != target.dtype:
        ordered = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device="cpu").copy_(ordered)
    data = _bytes(ordered, target.numel())
    session, remote = session_of(target), remote_of(target)
    offset = int(target.storage_offset()) * target.dtype.itemsize
    if len(data) < _HASHED_BYTES or session.recording or session.unknown[len(data)] >= _IN_VAIN:
        session.write(remote, offset, data)
        return
    digest = hashlib.sha256(data).digest()
    with session.lock:
        if session.ask(["known", [digest]]) == [True]:
            session.unknown[len(data)] = 0
            session.writer.known(remote.handle, offset, len(data), digest)
            session.advance()
        else:
            session.unknown[len(data)] += 1
            session.write(remote, offset, data)


def download(source: Tensor) -> Tensor:
    """A CPU tensor with the values, sizes and strides of one of this device."""
    source = computed(source)
    if not _dense(source):
        source = source.contiguous()
    target = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="cpu")
    if source.numel():
        offset = int(source.storage_offset()) * source.dtype.itemsize
        session_of(source).read(remote_of(source), offset, _bytes(target, source.numel()))
    return target


def fetch(source: Tensor) -> Callable[[], Tensor]:
    """As `download`, but asynchronous: the read is requested now, and calling the result waits for it.

    The tensor must not be written any more.
    """
    source = computed(source)
    if not _dense(source):
        source = source.contiguous()
    session, elements = session_of(source), source.numel()
    offset, nbytes = int(source.storage_offset()) * source.dtype.itemsize, elements * source.dtype.itemsize
    reading = session.ask_for(remote_of(source), offset, nbytes) if elements else None

    def arrived() -> Tensor:
        target = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="cpu")
        if reading is not None:
            _bytes(target, elements)[:] = session.wait_for(reading)
        return target

    return arrived


class Copies:
    """`aten::copy_` and `aten::_to_copy` in all directions.

    Attributes:
        within: the kernel of `copy_` for two tensors of one device.
        converting: that of `_to_copy`.
    """

    def __init__(self) -> None:
        self.within = Operator(_aten.copy_.default, upload)
        self.converting = Operator(_aten._to_copy.default, upload)

    def copy_(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy from or to the CPU; the values are converted to the target's dtype on the CPU. Between two remote GPUs
        the bytes do not pass through this process."""
        if not current().beside:
            return self._copied(target, source)
        if is_remote(target) and is_remote(source) and target.get_device() != source.get_device():
            return self._copied_across(target, source)
        with selected(session_of(target if is_remote(target) else source)):
            return self._copied(target, source)

    def _copied_across(self, target: Tensor, source: Tensor) -> Tensor:
        """Convert on the source's GPU, and order the elements on the target's."""
        with selected(session_of(source)):
            source = computed(source).to(target.dtype).expand(target.shape)
            if not _dense(source):
                source = source.contiguous()
        with selected(session_of(target)):
            if source.stride() == target.stride() and _dense(target) and not is_marked(target):
                links.copy(source, target)
            else:
                found = empty_strided(source.shape, source.stride(), dtype=source.dtype)
                links.copy(source, found)
                self._copied(target, found)
        return target

    def _copied(self, target: Tensor, source: Tensor) -> Tensor:
        if is_remote(target) and is_marked(target):
            self._copied(*behind(target, source))
        elif not is_remote(source):
            values = source.to(target.dtype).expand(target.shape)
            if _dense(target):
                fill(target, values)
            else:
                self.within(target, upload(values.contiguous()))
        elif is_remote(target):
            self.within(target, computed(source))
        else:
            target.copy_(download(source))
        return target

    def to_copy(self, source: Tensor, *, device: torch.device | None = None, **options: Any) -> Tensor:
        """Copy within the device by one remote call; from and to the CPU, convert the values here."""
        options.pop("non_blocking", None)
        options.pop("pin_memory", None)
        if not current().beside:
            return self._to_copy(source, device, options)
        if not is_remote(source):
            with selected(session_at(None if device is None else device.index)):
                return self._to_copy(source, device, options)
        with selected(session_of(source)):
            if device is None or device.type != NAME or device.index in (None, source.get_device()):
                return self._to_copy(source, device, options)
            source = self._to_copy(source, None, options) if options else source
        with selected(session_at(device.index)):
            like = source if _dense(source) else torch.empty_like(source, device="meta")
            return self._copied_across(empty_strided(like.shape, like.stride(), dtype=like.dtype), source)

    def _to_copy(self, source: Tensor, device: torch.device | None, options: dict[str, Any]) -> Tensor:
        if not is_remote(source):
            # Where nothing is converted, PyTorch's copy of it would only keep all threads of the CPU busy.
            kept = all(
                value in (None, source.dtype, torch.strided, torch.preserve_format) for value in options.values()
            )
            return upload(source if kept else _aten._to_copy.default(source, **options))
        if device is not None and device.type != NAME:
            return _aten._to_copy.default(download(source), device=device, **options)
        return self.converting(source, **options)


def item(source: Tensor) -> bool | int | float | complex:
    """`aten::_local_scalar_dense`: one round trip."""
    form = _NUMBERS.get(source.dtype)
    if form is None or source.is_neg():
        return download(source).item()
    offset = int(source.storage_offset()) * form.size
    (number,) = form.unpack(current().read_little(remote_of(source), offset, form.size))
    return number


def equal(left: Tensor, right: Tensor) -> bool:
    """`aten::equal`: compared on the other side."""
    if left.shape != right.shape:
        return False
    return bool((left == right).all().item())


def resize_(tensor: Tensor, size: Sequence[int], *, memory_format: Any = None) -> Tensor:
    """`aten::resize_`: a storage that is too small is replaced by a larger one with the same beginning."""
    geometry = Geometry(
        tensor.dtype, tuple(size), contiguous(tensor.dtype, tuple(size)).stride, int(tensor.storage_offset())
    )
    storage, remote = tensor.untyped_storage(), remote_of(tensor)
    if geometry.extent > remote.nbytes:
        larger = _allocate(contiguous(torch.uint8, (geometry.extent,)))
        if remote.nbytes:
            old = new_tensor(New(contiguous(torch.uint8, (remote.nbytes,)), remote.nbytes), remote)
            larger[: remote.nbytes].copy_(old)
        storage.remote = remote_of(larger)  # type: ignore[attr-defined]
    return set_geometry(tensor, storage, geometry)


def pin_memory(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """`aten::pin_memory` of a CPU tensor: itself, since an upload to a remote GPU is fast from any memory.

    Without a remote GPU this is PyTorch's own.
    """
    if is_connected() and (device is None or device.type == NAME):
        return tensor
    return tensor if tensor.is_pinned() else _aten._pin_memory(tensor, device)


def as_strided_(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    """`aten::as_strided_`: another geometry in the same storage. `squeeze_`, `transpose_` and others are made of it."""
    geometry = Geometry(
        tensor.dtype, tuple(size), tuple(stride), int(tensor.storage_offset()) if offset is None else offset
    )
    geometry.check(remote_of(tensor).nbytes)
    return set_geometry(tensor, tensor.untyped_storage(), geometry)


def can_replace_data(tensor: Tensor, data: Tensor) -> bool:
    """`aten::_has_compatible_shallow_copy_type`: whether `tensor.data = data` may be set between these devices.

    `Module.to` asks this for each parameter. Where the answer is no, PyTorch puts new parameters into the module: tied
    weights come apart, and an optimizer that has the old parameters trains nothing.
    """
    return all(each.layout is torch.strided and each.device.type in _SAME_DATA for each in (tensor, data))


def set_(tensor: Tensor, source: Any = None, offset: int = 0, size: Any = None, stride: Any = None) -> Tensor:
    """The overloads of `aten::set_`: another storage of the device, or another tensor's place."""
    if isinstance(source, Tensor):
        return set_geometry(tensor, source.untyped_storage(), geometry_of(source))
    if source is None:
        empty_one = _allocate(Geometry(tensor.dtype, (0,), (1,)))
        return set_geometry(tensor, empty_one.untyped_storage(), geometry_of(empty_one))
    remote = getattr(source, "remote", None)
    if remote is None:
        raise DeviceError(f"set_: the storage is on {source.device}, the tensor on {tensor.device}")
    shape = (remote.nbytes // tensor.dtype.itemsize,) if size is None else tuple(size)
    steps = contiguous(tensor.dtype, shape).stride if stride is None else tuple(stride)
    geometry = Geometry(tensor.dtype, shape, steps, offset)
    geometry.check(remote.nbytes)
    return set_geometry(tensor, source, geometry)


def storage_bytes(session: Session, storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the CPU with the bytes of one of this device: what `torch.save` writes."""
    remote = storage.remote  # type: ignore[attr-defined]
    target = torch.empty(remote.nbytes, dtype=torch.uint8)
    if remote.nbytes:
        session.read(remote, 0, _bytes(target, remote.nbytes))
    return target.untyped_storage()


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill their part of the storage, in any order of the axes."""
    expected = 1
    for step, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if step != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _bytes(tensor: Tensor, elements: int) -> memoryview:
    """The memory of a dense CPU tensor."""
    return tensor.as_strided((elements,), (1,)).view(torch.uint8).numpy().data
