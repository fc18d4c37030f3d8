"""The state of a lease's random number generator: given to the client, taken back from it, moved with the lease.

A state is the bytes of PyTorch's `Generator.get_state`: on CUDA the seed and the offset, on a CPU a Mersenne Twister.
"""

from struct import Struct

import torch

from warpbus.errors import ProtocolError

_TWISTER = Struct("<QiiQ")
"""How a CPU's state begins: the seed, `left`, whether it is seeded, `next`. The words follow."""

_WORDS = 624


def generator_of(device: torch.device) -> torch.Generator:
    """The process's own, so that a CPU gives the numbers that it gives a program without a pool."""
    if device.type == "cuda":
        torch.cuda.init()
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


def random_state(device: torch.device) -> bytes:
    """The state of a device's generator."""
    return generator_of(device).get_state().numpy().tobytes()


def set_random_state(device: torch.device, state: bytes | memoryview) -> None:
    """Set what `random_state` gave, here or in another process.

    Raises:
        ProtocolError: no generator of this kind of device has had that state.
    """
    generator = generator_of(device)
    if device.type == "cpu":
        _check_twister(state, len(generator.get_state()))
    try:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (RuntimeError, ValueError) as error:  # frombuffer takes no empty buffer
        raise ProtocolError(
            f"{len(state)} bytes are no state of the generator of a {device.type} device: "
            f"{str(error).partition(chr(10))[0]}"
        ) from None


def _check_twister(state: bytes | memoryview, nbytes: int) -> None:
    """PyTorch reads words from `next` on until `left` is used up and does not look where the words end: a client could
    read this process's memory as random numbers."""
    if len(state) != nbytes:
        raise ProtocolError(f"{len(state)} bytes are no state of a CPU's generator, which has {nbytes}")
    _, left, seeded, following = _TWISTER.unpack_from(state)
    if seeded != 1 or not 1 <= left <= _WORDS or (left > 1 and following + left > _WORDS + 1) or following > _WORDS:
        raise ProtocolError(
            f"a state of a CPU's generator has left={left} and next={following}: no generator has had it"
        )
