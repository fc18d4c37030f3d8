"""The gated MLP (SwiGLU; Shazeer, 2020)."""

from torch import Tensor, nn
from torch.nn import functional as F


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`; gate and up are one fused projection, gate first."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
