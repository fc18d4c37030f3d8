"""`torch.warpbus`: the functions that PyTorch calls on the module of a device type, as it does on `torch.cuda`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import UsageError
from warpbus.pool.client.session import (
    Session,
    current_index,
    is_connected,
    is_forked,
    session_at,
    sessions,
    set_current,
)
from warpbus.pool.client.tensors import NAME


class LeaseEvent:
    """`torch.warpbus.Event`: a lease executes everything in the order in which it was called, so that nothing waits for
    an event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._device: Any = None

    def record(self, stream: Any = None) -> "LeaseEvent":
        self._device = getattr(stream, "device", None)
        return self

    def wait(self, stream: Any = None) -> None:
        """Does nothing: later calls are executed later in any case."""

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Wait until the device has executed everything."""
        _session(self._device).ask(["sync"])


class LeaseStream:
    """`torch.warpbus.Stream`: all streams of a device are one and the same order."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = _session(device).device
        self.priority = priority

    def wait_event(self, event: Any) -> None:
        """Does nothing: later calls are executed later in any case."""

    def wait_stream(self, stream: Any) -> None:
        """Does nothing: later calls are executed later in any case."""

    def record_event(self, event: LeaseEvent | None = None) -> LeaseEvent:
        return (LeaseEvent() if event is None else event).record(self)

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Wait until the device has executed everything."""
        _session(self.device).ask(["sync"])

    def __enter__(self) -> "LeaseStream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeaseStream) and other.device == self.device

    def __hash__(self) -> int:
        return hash(self.device)


class DeviceModule:
    """The module of the device type `warpbus`. Each connected GPU is a device: `warpbus:0`, `warpbus:1` and so on.

    Where a method takes a device, None is the current one, which each thread has for itself. Methods raise StateError
    if the device is not connected.
    """

    Stream = LeaseStream
    Event = LeaseEvent

    @property
    def _initialized(self) -> bool:
        """Whether there is a random state to save: `torch.utils.checkpoint` asks."""
        return is_connected()

    def is_available(self) -> bool:
        return is_connected()

    def is_initialized(self) -> bool:
        return is_connected()

    def _is_in_bad_fork(self) -> bool:
        """Whether this process is a forked child of one with a remote GPU and has not connected itself."""
        return is_forked()

    def device_count(self) -> int:
        """The highest index of a device plus one."""
        return max((each.index + 1 for each in sessions()), default=0)

    def current_device(self) -> int:
        """The index of the device on which `device="warpbus"` makes tensors."""
        return current_index()

    def set_device(self, device: Any) -> None:
        """Make a device the current one of this thread, for factories with `device="warpbus"`. For `.to("warpbus")`
        PyTorch always takes `warpbus:0`: name the index there.

        Raises:
            StateError: it is not connected.
        """
        index = _index(device)
        if index is not None:
            set_current(index)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """A context in which a device is the current one of this thread."""
        before = current_index()
        self.set_device(device)
        try:
            yield
        finally:
            if before in {each.index for each in sessions()}:
                set_current(before)

    def current_stream(self, device: Any = None) -> "LeaseStream":
        """The one stream of a device."""
        return LeaseStream(device)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which a stream is the current one. There is one, which always is."""
        return nullcontext(stream)

    def set_stream(self, stream: Any) -> None:
        """There is one stream, which always is the current one."""

    def synchronize(self, device: Any = None) -> None:
        """Wait until a device has executed everything."""
        _session(device).ask(["sync"])

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator; without a connection there is nothing to seed.

        Raises:
            UsageError: a program is being recorded.
        """
        if is_connected():
            _session(None).seed(int(seed) % (1 << 64))

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        for session in sessions():
            session.seed(int(seed) % (1 << 64))

    def get_rng_state(self, device: Any = None) -> Tensor:
        """The state of a device's generator: uint8 on the CPU, 16 bytes from a GPU and 5,056 from a CPU.

        One round trip.

        Raises:
            StateError: no remote GPU is connected.
            UsageError: a program is being recorded.
        """
        return torch.frombuffer(bytearray(_session(device).random_state()), dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        """Set the state that `get_rng_state` gave. Does not wait: a state that the generator does not take is an error
        at the next read.

        Raises:
            StateError: no remote GPU is connected.
            UsageError: `state` is not a uint8 tensor on the CPU, or a program is being recorded.
        """
        if state.device.type != "cpu" or state.dtype is not torch.uint8:
            raise UsageError(
                f"set_rng_state: {state.dtype} on {state.device}: give what get_rng_state gave, uint8 on the CPU"
            )
        _session(device).set_random_state(state.contiguous().numpy().tobytes())

    def get_rng_state_all(self) -> list[Tensor]:
        """The states of all devices that are connected, in their order."""
        return [self.get_rng_state(each.device) for each in sessions()]

    def set_rng_state_all(self, states: list[Tensor]) -> None:
        """Set the states that `get_rng_state_all` gave."""
        for session, state in zip(sessions(), states, strict=False):
            self.set_rng_state(state, session.device)


def _index(device: Any) -> int | None:
    """The index of a device, its name or number; None for the current device."""
    if device is None or isinstance(device, int):
        return None if device is None or device < 0 else device
    found = torch.device(device)
    if found.type not in (NAME, "cuda"):  # `pool run --remote` calls it so
        raise UsageError(f"device {device}: give a device of the type {NAME}, or its index")
    return found.index


def _session(device: Any) -> Session:
    return session_at(_index(device))
