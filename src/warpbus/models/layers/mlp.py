"""The dense MLP: gated (SwiGLU; Shazeer, 2020), or with GELU in its tanh form (Hendrycks and Gimpel, 2016)."""

from torch import Tensor, nn

from warpbus.models.layer_spec import MatrixSpec
from warpbus.models.layers.linear import project
from warpbus.models.layers.norm import Norm


class MLP(nn.Module):
    """`down(inner(x))`, where inner is `silu(gate(x)) * up(x)` or `gelu(up(x))`.

    Gate and up are one fused projection, gate first. Its name is that in the layer's table: `gate_up` or `up`.

    Args:
        widening: the matrix that produces the inner features.
        down: the matrix back to the residual stream.
        gated: whether `widening` is gate and up.
    """

    def __init__(self, widening: MatrixSpec, down: MatrixSpec, *, gated: bool) -> None:
        super().__init__()
        self._widening = widening.name.rpartition(".")[2]
        self._activation = "swiglu" if gated else "gelu"
        self.add_module(self._widening, nn.Linear(widening.shape[1], widening.shape[0], bias=widening.bias))
        self.down = nn.Linear(down.shape[1], down.shape[0], bias=down.bias)

    @property
    def output(self) -> nn.Module:
        """The projection back to the residual stream."""
        return self.down

    def inner(self, x: Tensor, *, norm: Norm | None = None) -> Tensor:
        """The input of `down`, `[..., ffn]`, from x `[..., hidden]`."""
        return project(getattr(self, self._widening), x, norm=norm, activation=self._activation)

    def forward(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """The output `[..., hidden]`, plus `residual` if there is one."""
        return project(self.down, self.inner(x, norm=norm), residual=residual)
