"""The option `activation_dtype`: whether products of many tokens on a GPU round the tokens to 8 bits."""

from torch import nn

from warpbus.cuda.dtype_names import rounds_activations
from warpbus.cuda.jit import architecture
from warpbus.errors import UsageError
from warpbus.kernels.ops import wna8
from warpbus.kernels.ops.packed import PackedWeight
from warpbus.models.layers.linear import QuantizedLinear
from warpbus.models.layers.stacked_experts import StackedExperts
from warpbus.qtensor.scheme import ACTIVATIONS


def round_activations(model: nn.Module, activation_dtype: str) -> None:
    """From now on products of 512 tokens and more round them to 8 bits, one scale per token, on a GPU.

    So do the experts of a mixture of experts on Hopper in FP8, if they are arranged for the kernels and have more than
    90 rows each on average. Decoding, whose steps have fewer rows, is not affected. Weights keep their codes, and
    matrices that `wna8` does not support their activations of 16 bits.

    Args:
        activation_dtype: "fp8", which is e4m3 (Ada, Hopper and later GPUs); "int8" (Ampere and later); or "auto":
            nothing is rounded.

    Raises:
        UsageError: another word; a device that cannot do it; or no matrix of the model is quantized as `wna8` supports.
    """
    if not rounds_activations(activation_dtype):
        return
    codes = ACTIVATIONS[activation_dtype]
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    experts = [module for module in model.modules() if isinstance(module, StackedExperts)]
    packed = [linear.form for linear in linears if isinstance(linear.form, PackedWeight)]
    packed += [each.matrices("gate_up").weights for each in experts]
    supported = [form for form in packed if wna8.supports(form.scheme, codes)]
    if not supported:
        known = {str(linear.scheme) for linear in linears} | {str(form.scheme) for form in packed}
        schemes = ", ".join(sorted(known)) or "not quantized"
        raise UsageError(
            f"activation_dtype {activation_dtype} needs matrices of up to 4 bits (with int8 also w8a16) in groups of "
            f"64 or 128 on a GPU; the model is {schemes}: leave it out"
        )
    device = supported[0].device
    if not wna8.runs_on(architecture(device), codes):
        raise UsageError(
            f"activation_dtype {activation_dtype} needs an Ada, Hopper or later GPU (sm_89); {device} is "
            f"{architecture(device)}: give int8, which GPUs from Ampere on (sm_80) take"
        )
    for linear in linears:
        linear.activation_dtype = codes
    for each in experts:
        each.activation_dtype = codes
