"""Translates device names: `cuda` in arguments of PyTorch, and the leased device in results.

A program sees its tensors on `cuda:0`, which is a PyTorch device object as any. PyTorch's dispatcher knows the same
tensors as those of the device `warpbus:0`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext, _device_constructors

from warpbus.errors import UsageError
from warpbus.pool.client.as_cuda.lease import CUDA, REMOTE, lease
from warpbus.pool.client.tensors import NAME

Function = Callable[..., Any]

_CONSTRUCTORS = """
    arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted empty_strided eye full
    full_like hamming_window hann_window kaiser_window linspace logspace ones ones_like rand rand_like randint
    randint_like randn randn_like randperm range scalar_tensor tensor tril_indices triu_indices zeros zeros_like
"""
_SPARSE = """
    sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor
"""
_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros"

_TYPES = "BFloat16 Bool Byte Char Double Float Half Int Long Short"


def translated(device: Any) -> Any:
    """The device that PyTorch is to use where a program says `device`; the first one that means the lease asks for it.

    Args:
        device: a device, its name, its index among CUDA devices, or None.

    Raises:
        UsageError: a CUDA device other than the first.
        WarpbusError: there is no lease, see `lease`.
    """
    if device is None:
        return None
    if isinstance(device, torch.device):
        named = device
    elif isinstance(device, str):
        if not device.startswith("cuda"):
            return device
        named = torch.device(device)
    elif isinstance(device, int) and not isinstance(device, bool):
        named = torch.device("cuda", device)
    else:
        return device
    if named.type != "cuda":
        return device
    check_index(named.index)
    lease()
    return REMOTE


def check_index(device: Any) -> None:
    """Raises UsageError if it is a CUDA device other than the first; None and -1 are the current one."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    if index not in (None, -1, 0):
        raise UsageError(f"cuda:{index}: a lease is one GPU, cuda:0: use that, or start a process for each lease")


def translate() -> None:
    """Replace the functions of PyTorch that take a device, and the properties of tensors that tell theirs."""
    _device_constructors()  # remembers the functions as they are
    for name in (_CONSTRUCTORS + _SPARSE).split():
        _replace(torch, name, _constructor)
    for name in ("fftfreq", "rfftfreq"):
        _replace(torch.fft, name, _constructor)
    for name in _METHODS.split():
        _replace(Tensor, name, _constructor)
    _replace(Tensor, "to", _to)
    _replace(Tensor, "type", _type)
    _replace(torch.UntypedStorage, "to", _to)
    _replace(DeviceContext, "__init__", _context)
    _replace(torch, "set_default_tensor_type", _default_type)
    for name in ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype"):
        _replace(torch, name, _of_type)
    _replace(torch.amp.autocast_mode, "is_autocast_available", _of_type)
    torch.amp.is_autocast_available = torch.amp.autocast_mode.is_autocast_available
    _replace(torch.amp.autocast_mode.autocast, "__init__", _autocast)
    _set(torch, "get_default_device", _default_device(torch.get_default_device))
    _set(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype(NAME))
    _set(torch, "set_autocast_gpu_dtype", lambda dtype: torch.set_autocast_dtype(NAME, dtype))
    _set(Tensor, "device", property(_device))
    _set(Tensor, "is_cuda", property(_is_cuda))
    _set(Tensor, "cuda", _cuda)
    _set(torch.UntypedStorage, "cuda", lambda storage, device=None, non_blocking=False: storage.to(device=CUDA))
    # Data goes to the lease through a socket: pinned memory would make nothing faster.
    _set(Tensor, "pin_memory", lambda tensor, device=None: tensor)
    _replace(Tensor, "record_stream", _record_stream)
    for name in _TYPES.split():
        _set(torch.cuda, f"{name}Tensor", _TensorType(f"{name}Tensor", (), {}))
    torch.serialization.register_package(5, _location, _restore)


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _replace(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
    original = getattr(owner, name)
    replacement = functools.wraps(original)(wrapper(original))
    setattr(owner, name, replacement)
    schema = torch.jit._builtins._get_builtin_table().get(id(original))
    if schema is not None:
        torch.jit._builtins._register_builtin(replacement, schema)


def _constructor(original: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = translated(device)
        for each in args:
            if each.__class__ is torch.device:
                args = tuple(translated(it) if it.__class__ is torch.device else it for it in args)
                break
        return original(*args, **kwargs)

    return call


def _to(original: Function) -> Function:
    """Of functions whose first positional argument, after `self`, may be a device or its name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(translated(each) if each.__class__ in (torch.device, str, int) else each for each in args)
        if kwargs.get("device") is not None:
            kwargs["device"] = translated(kwargs["device"])
        return original(*args, **kwargs)

    return call


def _of_type(original: Function) -> Function:
    """Of functions of a device type; PyTorch's older ones mean CUDA where none is given."""

    def call(*args: Any) -> Any:
        args = tuple(NAME if each == "cuda" else each for each in args)
        if not args or args[0].__class__ is bool:
            args = (NAME, *args)
        return original(*args)

    return call


def _autocast(original: Function) -> Function:
    def begin(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            lease()
            device_type = NAME
        original(self, device_type, *args, **kwargs)

    return begin


def _context(original: Function) -> Function:
    """Of `with torch.device(...)` and `torch.set_default_device`, which put the device into constructors' arguments."""

    def begin(self: Any, device: Any) -> None:
        original(self, translated(device))

    return begin


def _default_type(original: Function) -> Function:
    def set_type(kind: Any) -> None:
        found = _cuda_type(kind)
        if found is None:
            torch.set_default_device(None)
            original(kind)
        else:
            torch.set_default_dtype(found)
            torch.set_default_device("cuda")

    return set_type


def _default_device(original: Function) -> Function:
    def get() -> torch.device:
        found: torch.device = original()
        return CUDA if found.type == NAME else found

    return get


_get_device = torch._C.TensorBase.device.__get__


def _device(tensor: Tensor) -> torch.device:
    # Under a mode such as that of `torch.set_default_device`, PyTorch comes back here for it: it is translated then.
    found: torch.device = _get_device(tensor)
    return CUDA if found.type == NAME else found


def _is_cuda(tensor: Tensor) -> bool:
    return _device(tensor).type == "cuda"


def _cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Tensor:
    where = "cuda" if device is None else device
    return tensor.to(where) if memory_format is None else tensor.to(where, memory_format=memory_format)


def _record_stream(original: Function) -> Function:
    def record(tensor: Tensor, stream: Any) -> None:
        """There is one stream, which the pool's side executes in order."""
        if not _is_cuda(tensor):
            original(tensor, stream)

    return record


def _type(original: Function) -> Function:
    def change(tensor: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None and not kwargs:
            return str(original(tensor)).replace(f"torch.{NAME}.", "torch.cuda.")
        found = _cuda_type(dtype)
        if found is None:
            return original(tensor, dtype, non_blocking, **kwargs)
        return tensor.to(CUDA, found)

    return change


def _cuda_type(kind: Any) -> torch.dtype | None:
    """The dtype of a tensor type of CUDA, or of its name; None if it is something else."""
    if isinstance(kind, _TensorType):
        return kind.dtype
    if isinstance(kind, str) and kind.startswith("torch.cuda."):
        found = getattr(torch.cuda, kind.removeprefix("torch.cuda."), None)
        return found.dtype if isinstance(found, _TensorType) else None
    return None


class _TensorType(type):
    """The types `torch.cuda.FloatTensor` and so on, which older programs use."""

    @property
    def dtype(cls) -> torch.dtype:
        found: torch.dtype = getattr(torch, cls.__name__).dtype
        return found

    def __call__(cls, *args: Any) -> Tensor:
        made: Tensor = getattr(torch, cls.__name__)(*args)
        return made.to(CUDA)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and _is_cuda(instance) and instance.dtype is cls.dtype


def _location(storage: Any) -> str | None:
    """The location of a storage that `torch.save` writes: another program may have a GPU of its own."""
    return "cuda:0" if storage.device.type == NAME else None


def _restore(storage: Any, location: str) -> Any:
    """The storage that `torch.load` makes of one that was on a GPU, or is to come onto one."""
    if not location.startswith("cuda") and not location.startswith(NAME):
        return None
    return storage.to(device=translated(location.replace(NAME, "cuda")))
