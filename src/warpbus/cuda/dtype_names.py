"""The names of the dtypes that models compute in, and of rounded activations.

Imports no torch: options are checked before torch is loaded.
"""

from warpbus.errors import UsageError

DTYPE_NAMES = ("float32", "float16", "bfloat16")
ACTIVATION_DTYPES = ("auto", "fp8", "int8")
"""The words of the option `activation_dtype`: "auto" does not round activations."""


def short_name(dtype: object) -> str:
    """The name of a torch dtype without "torch."; names stay as they are."""
    return str(dtype).removeprefix("torch.")


def dtype_name(dtype: object) -> str:
    """The name of the dtype that a flag or a torch dtype means.

    Raises:
        UsageError: not one of `DTYPE_NAMES`.
    """
    name = short_name(dtype)
    if name not in DTYPE_NAMES:
        raise UsageError(f"dtype is {str(dtype)!r}: give auto, {', '.join(DTYPE_NAMES)}")
    return name


def rounds_activations(activation_dtype: str) -> bool:
    """Whether the option rounds activations to 8 bits.

    Raises:
        UsageError: not one of `ACTIVATION_DTYPES`.
    """
    if activation_dtype not in ACTIVATION_DTYPES:
        raise UsageError(f"activation_dtype is {activation_dtype!r}: give {', '.join(ACTIVATION_DTYPES)}")
    return activation_dtype != "auto"
