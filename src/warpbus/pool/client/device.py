"""The devices `warpbus:0`, `warpbus:1` and so on: PyTorch's hook for backends that are not compiled into it, filled
with Python kernels.

Each leased GPU is one such device, whatever GPU stands behind it: a program does not learn which one that is, and so
does not notice when it becomes another.
"""

import functools
import importlib
from typing import Any

import torch
from torch._C import _acc
from torch._ops import OpOverload
from torch.utils import backend_registration

from warpbus.cuda.remote import register_remote_backend
from warpbus.pool.client import attention, autocast, half_fft, refusals, sparse, transfers
from warpbus.pool.client.composites import ADAPTED, COMPOSITES
from warpbus.pool.client.device_module import DeviceModule
from warpbus.pool.client.dispatch import Operator
from warpbus.pool.client.fast_path import FastPath, load_fast_path
from warpbus.pool.client.generators import Generator, knowing_generators
from warpbus.pool.client.marks import knowing_marks
from warpbus.pool.client.remote_device import RemoteDevice
from warpbus.pool.client.selection import choosing
from warpbus.pool.client.session import watch_current
from warpbus.pool.client.storage_methods import replace_storage_methods
from warpbus.pool.client.tensors import META, NAME
from warpbus.pool.protocol.inference import gives_tensors
from warpbus.pool.protocol.operators import ATEN, overloads, warpbus_operators

_KEY = "PrivateUse1"
_VIEWS = ("_reshape_alias", "as_strided", "unfold", "view", "view_as_complex", "view_as_real")
"""All others are made of these, in PyTorch itself."""

_CHOOSING = frozenset({"copy_", "_to_copy", "_has_compatible_shallow_copy_type"})
"""Their tensors may be on several devices."""

_SPECIAL = frozenset({"aten::copy_", "aten::_to_copy", "aten::empty.memory_format", "aten::empty_strided"})


class _WarpbusDeviceGuard(_acc.DeviceGuard):
    """Autograd calls its methods several times per operator and gradient, so they have to be short."""

    def type_(self, _type: Any = torch._C._autograd.DeviceType.PrivateUse1) -> Any:
        return _type


@functools.cache
def register() -> None:
    """Make the device type known to PyTorch, once in a process."""
    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=DeviceModule(), device_guard=_WarpbusDeviceGuard()
    )
    libraries = {namespace: torch.library.Library(namespace, "IMPL") for namespace in ("aten", "warpbus")}
    fast_path = load_fast_path()
    _register_views(libraries["aten"], fast_path)
    _register_transfers(libraries["aten"], fast_path)
    sparse.register(libraries["aten"])
    for overload in (*(each for packet in sorted(ATEN) for each in overloads(packet)), *warpbus_operators()):
        if _runs_remotely(overload):
            namespace, _, name = overload.name().partition("::")
            operator = Operator(overload, transfers.upload)
            kernel = knowing_marks(operator)
            if overload.name() in ADAPTED:
                kernel = choosing(overload.name(), ADAPTED[overload.name()](kernel))
            kernel = knowing_generators(overload, kernel)
            if fast_path is None or overload.name() in ADAPTED:
                libraries[namespace].impl(name, kernel, _KEY)
            else:
                fast_path.register(libraries[namespace], overload, operator, kernel)
    libraries["aten"].impl("pin_memory", transfers.pin_memory, "CPU")
    attend = {"scaled_dot_product_attention": attention.scaled_dot_product_attention}
    composites = {**attend, **COMPOSITES, **half_fft.composites()}
    for name, composite in composites.items():
        for key in (_KEY, "AutogradPrivateUse1"):
            libraries["aten"].impl(name, choosing(f"aten::{name}", composite), key)
    rest = torch.library.Library("_", "IMPL")
    refusals.register(rest)
    autocast.register(libraries["aten"], rest)
    _keep(rest, *libraries.values())
    if fast_path is not None:
        watch_current(fast_path.use)
    replace_storage_methods()
    torch.Generator = Generator  # type: ignore[misc]
    register_remote_backend(NAME, RemoteDevice())
    if torch.distributed.is_available():
        importlib.import_module("warpbus.pool.client.process_group").register_backend()


def let_gradients_flow(device: torch.device) -> None:
    """See to it that backward passes reach the device, once it is connected.

    PyTorch has a thread for each device that there was at the first backward pass of a process, and for Python backends
    one for the first of their devices. If that is over, or for the others, the thread that calls `backward` computes
    the gradients itself.
    """
    if device.index:
        _compute_gradients_in_callers()
        return
    probe = torch.ones(1, device=device, requires_grad=True)
    try:
        (probe * 1).backward()
    except RuntimeError:
        torch.autograd.set_multithreading_enabled(False)


@functools.cache
def _compute_gradients_in_callers() -> None:
    run = torch.autograd.graph._engine_run_backward

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return run(*args, **kwargs)

    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = call  # type: ignore[attr-defined]


def _runs_remotely(overload: OpOverload) -> bool:
    name = overload.name()
    if name in _SPECIAL or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return False
    # Several lists in a result would need their lengths sent along; no operator on the list has that.
    return len(overload._schema.returns) <= 1 or gives_tensors(overload)


def _register_views(library: torch.library.Library, fast_path: FastPath | None) -> None:
    """Views need no bytes and no message: the kernels of meta tensors make them, on this side alone."""
    for name in _VIEWS:
        operator = getattr(torch.ops.aten, name).default
        if fast_path is not None:
            fast_path.register_view(operator)
            continue
        library.impl(name, functools.partial(operator._handle.redispatch_boxed, META), _KEY)


def _register_transfers(library: torch.library.Library, fast_path: FastPath | None) -> None:
    copies = transfers.Copies()
    within = {"copy_": copies.within, "_to_copy": copies.converting}
    for name, kernel in {
        "_efficientzerotensor": transfers.zeros,
        "_has_compatible_shallow_copy_type": transfers.can_replace_data,
        "as_strided_": transfers.as_strided_,
        "empty.memory_format": transfers.empty,
        "empty_strided": transfers.empty_strided,
        "copy_": copies.copy_,
        "_to_copy": copies.to_copy,
        "_local_scalar_dense": transfers.item,
        "equal": transfers.equal,
        "resize_": transfers.resize_,
        "set_": transfers.set_,
        "set_.source_Tensor": transfers.set_,
        "set_.source_Storage": transfers.set_,
        "set_.source_Storage_storage_offset": transfers.set_,
    }.items():
        if fast_path is None or name not in within:
            library.impl(name, kernel if name in _CHOOSING else choosing(f"aten::{name}", kernel), _KEY)
        else:
            fast_path.register(library, within[name].overload, within[name], kernel)


_kept: list[Any] = []


def _keep(*libraries: torch.library.Library) -> None:
    """A library's kernels are taken back when it is collected."""
    _kept.extend(libraries)
