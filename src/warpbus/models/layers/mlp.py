"""The MLPs: gated (SwiGLU; Shazeer, 2020), and with GELU in its tanh form (Hendrycks and Gimpel, 2016)."""

from torch import Tensor, nn

from warpbus.models.config import ModelConfig
from warpbus.models.layers.linear import project
from warpbus.models.layers.norm import Norm


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`; gate and up are one fused projection, gate first."""

    def __init__(self, hidden_size: int, ffn_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_size, bias=bias)
        self.down = nn.Linear(ffn_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """The MLP of `norm(x)`, plus `residual`."""
        return project(self.down, project(self.gate_up, x, norm=norm, activation="swiglu"), residual=residual)


class PlainMLP(nn.Module):
    """`down(gelu(up(x)))`."""

    def __init__(self, hidden_size: int, ffn_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, ffn_size, bias=bias)
        self.down = nn.Linear(ffn_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """The MLP of `norm(x)`, plus `residual`."""
        return project(self.down, project(self.up, x, norm=norm, activation="gelu"), residual=residual)


def make_mlp(config: ModelConfig) -> GatedMLP | PlainMLP:
    """The MLP of the kind that a model has."""
    return (GatedMLP if config.gated else PlainMLP)(config.hidden_size, config.ffn_size, bias=config.mlp_bias)
