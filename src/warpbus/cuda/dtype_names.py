"""The names of the dtypes that models compute in. Imports no torch: options are checked before torch is loaded."""

from warpbus.errors import UsageError

DTYPE_NAMES = ("float32", "float16", "bfloat16")


def dtype_name(dtype: object) -> str:
    """The name of the dtype that a flag or a torch dtype means.

    Raises:
        UsageError: not one of `DTYPE_NAMES`.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise UsageError(f"dtype is {str(dtype)!r}: give auto, {', '.join(DTYPE_NAMES)}")
    return name
