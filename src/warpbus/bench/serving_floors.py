"""The least time in which a machine could answer requests, from what has to be read and multiplied."""

from dataclasses import dataclass

import torch

from warpbus.bench.ceilings import copy_bandwidth, matrix_rate
from warpbus.bench.decode import step_bytes
from warpbus.bench.serving_load import Load
from warpbus.models import ModelConfig
from warpbus.qtensor import Scheme


@dataclass(frozen=True)
class ServingFloors:
    """Limits of a model on a machine.

    A step that decodes reads all codes, scales and the head once and every sequence's keys and values, and multiplies
    every matrix with a row for each sequence: it takes at least as long as the longer of the two. Prompts multiply the
    layers' matrices with a row for each token; their attention is left out, so is every overlap of the two.

    Attributes:
        bandwidth: bytes per second of a copy.
        rate: floating-point operations a second of a matrix product in 16 bits.
    """

    config: ModelConfig
    scheme: Scheme | None
    dtype: torch.dtype
    bandwidth: float
    rate: float

    @classmethod
    def measured(
        cls, config: ModelConfig, scheme: Scheme | None, dtype: torch.dtype, device: torch.device
    ) -> "ServingFloors":
        """With the rates of this device."""
        return cls(config, scheme, dtype, copy_bandwidth(device), matrix_rate(device, dtype))

    def step(self, batch: int, context: int) -> float:
        """Seconds of a step in which `batch` sequences of `context` tokens each get one."""
        read = step_bytes(self.config, self.scheme, self.dtype, context)
        cached = read.pop("attention")
        head = self.config.vocab_size * self.config.hidden_size
        operations = 2.0 * batch * (self._layers + head)
        return max((sum(read.values()) + batch * cached) / self.bandwidth, operations / self.rate)

    def prompt(self, tokens: int) -> float:
        """Seconds in which prompts of so many tokens together are read."""
        return 2.0 * self._layers * tokens / self.rate

    def closed(self, load: Load) -> float:
        """Seconds of a closed loop all of whose clients are always served at once."""
        count, prompt = len(load.prompts), len(load.prompts[0])
        batch = min(load.concurrency, count)
        steps = count / batch * (load.tokens - 1)
        return self.prompt(count * prompt) + steps * self.step(batch, prompt + load.tokens // 2)

    @property
    def _layers(self) -> int:
        config = self.config
        ends = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
        return config.num_parameters - ends
