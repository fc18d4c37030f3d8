"""A lease of random work, to move."""

import random
from types import SimpleNamespace

import torch

from warpbus.pool.protocol.wire import Value
from warpbus.pool.tenant.storages import Storages

CPU = torch.device("cpu")
QUOTA = 64 * 2**20
TOKEN = b"t" * 32


class Lease:
    """An executor of random work: batch `n` does the same wherever it is executed."""

    def __init__(self, memory: int = QUOTA, *, largest: int = 3000) -> None:
        self.storages = Storages(CPU, memory)
        self.executed = 0
        self.definitions: dict[int, SimpleNamespace] = {}
        self.foreseen: dict[int, bytes] = {}
        self._largest = largest

    def foresee(self, number: int, encoded: memoryview) -> None:
        self.foreseen[number] = bytes(encoded)

    def execute(self, number: int) -> None:
        assert number == self.executed + 1
        self.executed = number
        self.definitions[number % 20] = SimpleNamespace(encoded=b"%d" % number)
        rng, storages = random.Random(number), self.storages
        for part in range(4):
            live = sorted(storages.sizes())
            if not live or rng.random() < 0.4:
                storages.create(number * 8 + part, rng.choice([0, 1, rng.randrange(self._largest)]))
            elif rng.random() < 0.3:
                storages.free(rng.choice(live))
            else:
                handle = rng.choice(live)
                size = storages.sizes()[handle]
                start = rng.randrange(size + 1)
                storages.write(handle, start, rng.randbytes(min(size - start, 400)))

    def state(self) -> dict[str, Value]:
        return {"executed": self.executed, "filling": bytes(5000)}

    def restore(self, state: dict[str, Value]) -> None:
        executed = state["executed"]
        assert isinstance(executed, int)
        self.executed = executed

    def contents(self) -> dict[int, bytes]:
        return {handle: bytes(self.storages.read(handle, 0, size)) for handle, size in self.storages.sizes().items()}
