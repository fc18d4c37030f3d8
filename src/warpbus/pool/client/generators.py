"""`torch.Generator(device=gpu.device)`: streams of random numbers besides that of the remote GPU's own generator.

PyTorch makes generators for devices that were compiled into it. `torch.Generator` is therefore replaced by a class that
makes a `RemoteGenerator` where this device is asked for, and for all other devices what PyTorch makes.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._ops import OpOverload

from warpbus.errors import DeviceError
from warpbus.pool.client.selection import session_for
from warpbus.pool.client.session import current, session_at
from warpbus.pool.client.tensors import NAME

Kernel = Callable[..., Any]

_DEFAULT_SEED = 67280421310721
"""PyTorch's, of every generator."""


class RemoteGenerator(torch._C.Generator):
    """A generator of the remote GPU: a state of its generator, kept in this process.

    An operator that gets it runs with this state in place of the device's: two round trips. PyTorch gives kernels
    another Python object for the same C++ generator, which is one of the CPU that nothing draws from: its seed is the
    number by which they find this object.
    """

    def __new__(cls, index: int | None = None) -> "RemoteGenerator":
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    def __init__(self, index: int | None = None) -> None:
        self._index = session_at(index).index
        number = secrets.randbits(63)
        super().manual_seed(number)
        _generators[number] = self
        self._state = session_at(self._index).random_state()
        self.manual_seed(_DEFAULT_SEED)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(NAME, self._index)

    def manual_seed(self, seed: int) -> "RemoteGenerator":
        """Begin again with a seed."""
        with self.in_use():
            session_at(self._index).seed(seed % (1 << 64))
        self._seed = seed
        return self

    def seed(self) -> int:
        """Begin again with a seed that nobody can foresee; returns it."""
        return self.manual_seed(secrets.randbits(63)).initial_seed()

    def initial_seed(self) -> int:
        """The seed that it began with."""
        return self._seed

    def get_state(self) -> Tensor:
        """Its state, as `torch.warpbus.get_rng_state` gives one: uint8 on the CPU."""
        return torch.frombuffer(bytearray(self._state), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> "RemoteGenerator":
        """Set what `get_state` gave."""
        self._state = state.cpu().numpy().tobytes()
        return self

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The remote GPU draws from this generator in the block."""
        session = session_at(self._index)
        with session.lock:
            of_device = session.random_state()
            session.set_random_state(self._state)
            try:
                yield
            finally:
                try:
                    self._state = session.random_state()
                finally:
                    session.set_random_state(of_device)


_generators: WeakValueDictionary[int, RemoteGenerator] = WeakValueDictionary()


class _AnyGenerator(type(torch._C.Generator)):  # type: ignore[misc]
    """All generators are instances of the class that replaces `torch.Generator`, also those made before."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_AnyGenerator):
    """Replaces `torch.Generator`, with the same argument."""

    def __new__(cls, device: Any = None) -> Any:
        if device is not None and torch.device(device).type == NAME:
            return RemoteGenerator(torch.device(device).index)
        return torch._C.Generator(device)


def knowing_generators(overload: OpOverload, kernel: Kernel) -> Kernel:
    """An operator's kernel that takes a `RemoteGenerator` where the operator takes a generator."""
    named = [(at, each.name) for at, each in enumerate(overload._schema.arguments) if "Generator" in str(each.type)]
    if not named:
        return kernel
    ((position, name),) = named

    def call(*args: Any, **kwargs: Any) -> Any:
        generator = args[position] if position < len(args) else kwargs.get(name)
        if generator is None:
            return kernel(*args, **kwargs)
        found = _generators.get(torch._C.Generator.initial_seed(generator))
        if found is None:
            raise DeviceError(
                f"{overload.name()}: a generator on {generator.device} cannot draw on a remote GPU: "
                "make it by torch.Generator(device=gpu.device)"
            )
        session = current()
        if session.beside and session_for(overload.name(), args, kwargs).index != found._index:
            raise DeviceError(f"{overload.name()}: a generator on {found.device} draws on this device only")
        with found.in_use():
            if position < len(args):
                return kernel(*args[:position], None, *args[position + 1 :], **kwargs)
            return kernel(*args, **{**kwargs, name: None})

    return call
