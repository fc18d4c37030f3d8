"""A linear layer over a quantized weight. Knows nothing of files: see `warpbus.models.loading`."""

from torch import Tensor, nn

from warpbus.kernels import ops
from warpbus.qtensor import QTensor


class QuantizedLinear(nn.Module):
    """`x @ weight.T + bias` with `weight` a `QTensor`; takes the place of `torch.nn.Linear`."""

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: QTensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.scheme = weight.scheme
        self.out_features, self.in_features = weight.shape
        self.register_buffer("qweight", weight.qweight)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)
        self.register_buffer("bias", bias)

    @property
    def weight(self) -> QTensor:
        """The quantized matrix `[out, in]`."""
        return QTensor(self.scheme, self.qweight, self.scales, self.zeros, (self.out_features, self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        return ops.wna16_linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.scheme}"
