"""SmoothQuant (Xiao et al., 2022): part of what makes inputs hard to round is moved into the weights.

One scale a token has to cover the largest of its channels; one a row, the largest of its weights. Dividing the inputs
by s = max|x|^alpha / max|w|^(1 - alpha) and multiplying the columns of the matrix by it evens both out. Folding s into
what precedes the matrix is `warpbus.quantization.folding`'s business.
"""

from torch import Tensor

# Channels below this share of the largest are treated as if they had it, so that no scale is extreme.
LEAST = 1e-5


def smoothing(input_absmax: Tensor, weight_absmax: Tensor, alpha: float = 0.5) -> Tensor:
    """The scales of a matrix' input channels: its columns are to be multiplied by them, its inputs divided.

    Args:
        input_absmax: `[in]`, the greatest |x| of each channel of the inputs.
        weight_absmax: `[in]`, the greatest |w| of each column.
        alpha: how much of the difficulty goes into the weights, from 0 to 1. With 0.5 both meet halfway.

    Returns:
        float32 `[in]`, positive.
    """
    inputs, weights = (_lifted(part.float()) for part in (input_absmax, weight_absmax))
    return inputs.pow(alpha) / weights.pow(1 - alpha)


def _lifted(absmax: Tensor) -> Tensor:
    greatest = absmax.max()
    return absmax.clamp(min=LEAST * float(greatest) if greatest > 0 else 1.0)
