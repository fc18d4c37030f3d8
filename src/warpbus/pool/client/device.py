"""The device `warpbus:0`: PyTorch's hook for backends that are not compiled into it, filled with Python kernels.

There is one such device in a process, with the index 0, whatever GPU stands behind it: a program does not learn which
one that is, and so does not notice when it becomes another.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch._C import _acc
from torch._ops import OpOverload
from torch.utils import backend_registration

from warpbus.cuda.lent import lend
from warpbus.errors import DeviceError
from warpbus.pool.client import attention, autocast, transfers
from warpbus.pool.client.dispatch import Operator
from warpbus.pool.client.lending import Lease
from warpbus.pool.client.marks import knowing_marks
from warpbus.pool.client.session import current
from warpbus.pool.client.tensors import META, NAME
from warpbus.pool.protocol.inference import gives_tensors
from warpbus.pool.protocol.operators import ATEN, overloads, warpbus_operators

_KEY = "PrivateUse1"
_VIEWS = ("_reshape_alias", "as_strided", "unfold", "view", "view_as_complex", "view_as_real")
"""All others are made of these, in PyTorch itself."""

_SPECIAL = frozenset({"aten::copy_", "aten::_to_copy", "aten::empty.memory_format", "aten::empty_strided"})


class _Module:
    """`torch.warpbus`: what PyTorch asks a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed(self, seed: int) -> None:
        """Of the tenant's generator; without a connection there is nothing to seed."""
        try:
            session = current()
        except DeviceError:
            return
        with session.lock:
            session.writer.seed(seed % (1 << 64))
            session.advance()

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def synchronize(self, device: Any = None) -> None:
        current().ask(["sync"])

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        raise DeviceError(
            "the random state of a remote GPU stays there: seed it by torch.manual_seed, "
            "and give torch.utils.checkpoint preserve_rng_state=False"
        )

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.get_rng_state()


class _Guard(_acc.DeviceGuard):
    """What autograd asks of each operator and gradient: several calls an operator, which have to be short."""

    def type_(self, _type: Any = torch._C._autograd.DeviceType.PrivateUse1) -> Any:
        return _type


@functools.cache
def register() -> torch.device:
    """Make the device known to PyTorch, once in a process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module(), device_guard=_Guard())
    libraries = {namespace: torch.library.Library(namespace, "IMPL") for namespace in ("aten", "warpbus")}
    _register_views(libraries["aten"])
    _register_transfers(libraries["aten"])
    for overload in (*(each for packet in sorted(ATEN) for each in overloads(packet)), *warpbus_operators()):
        if _runs_remotely(overload):
            namespace, _, name = overload.name().partition("::")
            libraries[namespace].impl(name, knowing_marks(Operator(overload, transfers.upload)), _KEY)
    for key in (_KEY, "AutogradPrivateUse1"):
        libraries["aten"].impl("scaled_dot_product_attention", attention.scaled_dot_product_attention, key)
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(_refuse, _KEY)
    autocast.register(libraries["aten"], rest)
    _keep(rest, *libraries.values())
    _teach_storages()
    lend(NAME, Lease())
    return torch.device(NAME, 0)


def let_gradients_flow() -> None:
    """See to it that backward passes reach the device, once it is connected.

    PyTorch has a thread for each device that there was at the first backward pass of a process. If that is over, this
    thread computes its gradients itself.
    """
    probe = torch.ones(1, device=NAME, requires_grad=True)
    try:
        (probe * 1).backward()
    except RuntimeError:
        torch.autograd.set_multithreading_enabled(False)


def _runs_remotely(overload: OpOverload) -> bool:
    name = overload.name()
    if name in _SPECIAL or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return False
    # Several lists in a result would need their lengths sent along; no operator on the list has that.
    return len(overload._schema.returns) <= 1 or gives_tensors(overload)


def _register_views(library: torch.library.Library) -> None:
    """Views need no bytes and no message: the kernels of meta tensors make them, on this side alone."""
    for name in _VIEWS:
        operator = getattr(torch.ops.aten, name).default
        library.impl(name, functools.partial(operator._handle.redispatch_boxed, META), _KEY)


def _register_transfers(library: torch.library.Library) -> None:
    copies = transfers.Copies()
    for name, kernel in {
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
        library.impl(name, kernel, _KEY)


def _refuse(operator: OpOverload, *_: Any, **__: Any) -> None:
    raise NotImplementedError(
        f"{operator.name()} is not among the operators that a pool runs: compute it on the CPU (.cpu()) and move on"
    )


_kept: list[Any] = []


def _keep(*libraries: torch.library.Library) -> None:
    """A library's kernels are taken back when it is collected."""
    _kept.extend(libraries)


def _teach_storages() -> None:
    """`torch.save` and `copy.deepcopy` take storages apart: let them see this device's bytes behind the empty ones."""
    plain = torch.UntypedStorage
    to_cpu, clone, data_ptr, nbytes = plain.cpu, plain.clone, plain.data_ptr, plain.nbytes

    def cpu(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return transfers.storage_bytes(current(), self) if hasattr(self, "remote") else to_cpu(self)

    def cloned(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if not hasattr(self, "remote"):
            return clone(self)
        return torch.empty(0, dtype=torch.uint8, device=NAME).set_(self).clone().untyped_storage()

    def address(self: torch.UntypedStorage) -> int:
        return self.remote.handle if hasattr(self, "remote") else data_ptr(self)

    def size(self: torch.UntypedStorage) -> int:
        return self.remote.nbytes if hasattr(self, "remote") else nbytes(self)

    for name, method in {"cpu": cpu, "clone": cloned, "data_ptr": address, "nbytes": size}.items():
        setattr(torch.UntypedStorage, name, method)
