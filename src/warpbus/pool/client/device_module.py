"""`torch.warpbus`: the functions that PyTorch calls on the module of a device type, as it does on `torch.cuda`."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import UsageError
from warpbus.pool.client.session import current, is_connected, is_forked


class DeviceModule:
    """The module of the device type `warpbus`. It has one device, index 0, while a remote GPU is connected."""

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
        return int(is_connected())

    def current_device(self) -> int:
        return 0

    def device(self, device: Any) -> AbstractContextManager[None]:
        """A context in which a device is the current one. There is one device, which always is."""
        return nullcontext()

    def synchronize(self, device: Any = None) -> None:
        current().ask(["sync"])

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        """Seed the remote GPU's generator; without a connection there is nothing to seed.

        Raises:
            UsageError: a program is being recorded.
        """
        if is_connected():
            current().seed(int(seed) % (1 << 64))

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        """The state of the remote GPU's generator: uint8 on the CPU, 16 bytes from a GPU and 5,056 from a CPU.

        One round trip.

        Raises:
            StateError: no remote GPU is connected.
            UsageError: a program is being recorded.
        """
        return torch.frombuffer(bytearray(current().random_state()), dtype=torch.uint8)

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
        current().set_random_state(state.contiguous().numpy().tobytes())

    def get_rng_state_all(self) -> list[Tensor]:
        """The states of all devices: of the one that is connected."""
        return [self.get_rng_state() for _ in range(self.device_count())]

    def set_rng_state_all(self, states: list[Tensor]) -> None:
        """Set the states that `get_rng_state_all` gave."""
        for state in states:
            self.set_rng_state(state)
