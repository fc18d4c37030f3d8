"""The gated MLP (SwiGLU; Shazeer, 2020)."""

from torch import Tensor, nn

from warpbus.models.layers.linear import project
from warpbus.models.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`; gate and up are one fused projection, gate first."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        """The MLP of `norm(x)`, plus `residual`."""
        return project(self.down, project(self.gate_up, x, norm=norm, activation="swiglu"), residual=residual)
