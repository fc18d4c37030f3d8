"""SmoothQuant (Xiao et al., 2022): moves a part of the outliers of the inputs into the weights.

The scale of a token has to cover its largest channel, the scale of a row its largest weight. Dividing the inputs by
s = max|x|^alpha / max|w|^(1 - alpha) and multiplying the columns of the matrix by s balances both.
`warpbus.quantization.folding` folds s into the preceding parameters.
"""

from torch import Tensor

# Channels below this share of the largest are treated as if they had it, so that no scale is extreme.
LEAST = 1e-5


def smoothing(input_absmax: Tensor, weight_absmax: Tensor, alpha: float = 0.5) -> Tensor:
    """The scales of a matrix's input channels, by which its columns are multiplied and its inputs divided.

    Args:
        input_absmax: `[in]`, the greatest |x| of each channel of the inputs.
        weight_absmax: `[in]`, the greatest |w| of each column.
        alpha: the part of the outliers that is moved into the weights, from 0 to 1.

    Returns:
        float32 `[in]`, positive.
    """
    inputs, weights = (_lifted(part.float()) for part in (input_absmax, weight_absmax))
    return inputs.pow(alpha) / weights.pow(1 - alpha)


def _lifted(absmax: Tensor) -> Tensor:
    greatest = absmax.max()
    return absmax.clamp(min=LEAST * float(greatest) if greatest > 0 else 1.0)
