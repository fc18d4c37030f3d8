"""`StackedExperts`: the experts of a layer arranged for the kernels, all on the GPU or some in the host's memory.

With expert parallelism a process has some of them, and the others no slot.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.errors import UsageError
from warpbus.kernels.ops.moe_mlp import moe_mlp
from warpbus.kernels.ops.packed import PackedWeight
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.models.layers.frozen import frozen_linear

_PARTS = ("codes", "scales", "zeros")


class StackedExperts(nn.Module):
    """The experts of a layer as one tensor of each kind, for the kernels: quantized, and of one scheme.

    With offloaded experts, an expert's slot tells where its matrices are: the first slots are on the GPU, those behind
    them in pinned memory of the host. The shared expert has the last slot on the GPU.

    Args:
        gate_up, down: slot by slot: the routed experts `numbers` in order, and if there is one more slot, the shared
            expert in the last slot that is not offloaded.
        routed: how many experts are routed.
        numbers: of those that are here; None: all. They are all here if any is offloaded.

    Attributes:
        slots: int32 `[experts]`, the slot of each expert, a shared one last, -1 of an expert that is not here; None if
            all are here and none is offloaded, where a slot is the expert's number.
        has_shared: whether the shared expert has a slot.
        counts: int32 `[routed]`, how many tokens chose each expert: `moe_route` adds to them; None if none is
            offloaded.
        activation_dtype: the dtype of 8 bits to which large products round x, or None; see
            `activation_dtype.round_activations`.
    """

    slots: Tensor | None
    counts: Tensor | None

    def __init__(self, gate_up: PackedExperts, down: PackedExperts, routed: int, numbers: range | None = None) -> None:
        super().__init__()
        self._stacked = {"gate_up": gate_up, "down": down}
        for name, stacked in self._stacked.items():
            for prefix, weights in (("", stacked.weights), ("host_", stacked.offloaded)):
                for part in _PARTS:
                    tensor = None if weights is None else getattr(weights, part)
                    self.register_buffer(f"{name}_{prefix}{part}", tensor)
        self.activation_dtype: torch.dtype | None = None
        self.resident = gate_up.resident
        device = gate_up.weights.device
        table = None
        here = range(routed) if numbers is None else numbers
        self._absent = routed - len(here)
        shared = gate_up.count - len(here)
        self.has_shared = shared > 0
        self.order: list[int] = []
        if self._absent:
            self.order = [here.index(number) if number in here else -1 for number in range(routed)]
            self.order += [len(here)] * shared
        elif gate_up.offloaded is not None:
            before = self.resident - shared
            self.order = [*range(before), *(slot + shared for slot in range(before, routed)), *[before] * shared]
        if self.order:
            table = torch.tensor(self.order, dtype=torch.int32, device=device)
        counts = None if gate_up.offloaded is None else torch.zeros(routed, dtype=torch.int32, device=device)
        self.register_buffer("slots", table)
        self.register_buffer("counts", counts)

    @property
    def offloaded(self) -> int:
        """How many experts are offloaded."""
        return self._stacked["gate_up"].count - self.resident

    def matrices(self, name: str) -> PackedExperts:
        """The matrices "gate_up" or "down" of all experts, slot by slot."""
        stacked = self._stacked[name]
        here = self._held(f"{name}_", stacked.weights)
        far = None if stacked.offloaded is None else self._held(f"{name}_host_", stacked.offloaded)
        return PackedExperts(here, stacked.count, far)

    def forward(self, x: Tensor, slots: Tensor, weights: Tensor, *, residual: Tensor | None, shared: bool) -> Tensor:
        """`residual` plus the sum of each token's experts that are here; see `moe_mlp`."""
        gate_up, down = self.matrices("gate_up"), self.matrices("down")
        return moe_mlp(
            x,
            slots,
            weights,
            gate_up,
            down,
            residual=residual,
            shared=shared,
            absent=self._absent,
            activation_dtype=self.activation_dtype,
        )

    def expert(self, number: int, x: Tensor) -> Tensor:
        """The output `[n, hidden]` of one expert for x `[n, hidden]`; it can be differentiated by x."""
        gate, up = frozen_linear(x, self._weight("gate_up", number, x.device), None).chunk(2, dim=-1)
        return frozen_linear(F.silu(gate) * up, self._weight("down", number, x.device), None)

    @torch.no_grad()
    def exchange(self, offloaded: int, resident: int) -> None:
        """Let an offloaded expert and one on the GPU change places, in the order of the current stream.

        Does not wait for the GPU. Results stay the same to the bit.

        Args:
            offloaded, resident: their numbers, both of routed experts.

        Raises:
            UsageError: the first one is not offloaded, or the second one is.
        """
        far, near = (self.order[number] if self.order else number for number in (offloaded, resident))
        if self.slots is None or not near < self.resident <= far:
            raise UsageError(
                f"experts {offloaded} and {resident} are in the slots {far} and {near}, of which the first "
                f"{self.resident} are on the GPU: expected an offloaded expert and one that is not"
            )
        for name in self._stacked:
            stacked = self.matrices(name)
            for there, here in zip(_tensors(stacked.expert(far)), _tensors(stacked.expert(near)), strict=True):
                kept = here.clone()
                here.copy_(there, non_blocking=True)
                there.copy_(kept, non_blocking=True)
        self.order[offloaded], self.order[resident] = near, far
        self.slots[offloaded].fill_(near)
        self.slots[resident].fill_(far)

    def _held(self, prefix: str, weights: PackedWeight) -> PackedWeight:
        """The weights as the buffers hold them now."""
        codes, scales, zeros = (getattr(self, prefix + part) for part in _PARTS)
        return replace(weights, codes=codes, scales=scales, zeros=zeros)

    def _weight(self, name: str, number: int, device: torch.device) -> PackedWeight:
        return self.matrices(name).expert(self.order[number] if self.order else number).to(device)


def _tensors(weight: PackedWeight) -> list[Tensor]:
    return [part for part in (weight.codes, weight.scales, weight.zeros) if part is not None]
