"""PyTorch's own database of operators, on the device `warpbus:0` and without a pool: the same results, or a refusal.

`torch.testing` has for each operator samples of its arguments. Each sample is computed on both devices: forward,
backward with the same gradients of the results, and in place where the operator has that form.
"""

import functools
import importlib.util
import inspect
import random
import re
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map

if importlib.util.find_spec("expecttest") is None:
    # The database's module imports it for a base class of PyTorch's own tests, which are not run here.
    _stand_in = types.ModuleType("expecttest")
    _stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = _stand_in

from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core

# Per sample, they look for a test of PyTorch's own among the callers. With the callers of pytest, that takes ten times
# as long as the operator.
for _module in (common_utils, core):
    _module.extract_test_fn = lambda: None

REMOTE = "warpbus"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64)
DIRECTIONS = ("forward", "backward", "in place")

# Their values are whatever the memory contained.
_UNWRITTEN = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_")

# Sums in another order: of 16 bits, and of the 32 bits that others are computed from.
_TOLERANCES = {
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (2e-2, 1e-2),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
}

# Derivatives that divide by differences of singular values, and products of reflections of large vectors (PyTorch's own
# tests allow as much there): rounding is all the more.
_SENSITIVE = {
    "pca_lowrank": (1e-2, 1e-2),
    "svd_lowrank": (1e-2, 1e-2),
    "linalg.householder_product": (1e-3, 1e-3),
}

# Singular vectors are determined up to a phase: compared is the combination of them that is unique.
_UP_TO_A_PHASE = ("pca_lowrank", "svd_lowrank")

# A GPU sums their derivatives by atomic additions, which round in another order each time. In 16 bits the roundings of
# partial sums of up to 8 remain where the sum is close to zero.
_ADDED_IN_ANY_ORDER = ("grid_sampler_2d", "grid_sampler_3d", "nn.functional.grid_sample", "nn.functional.interpolate")
_LARGEST_PARTIAL_SUM = 8

# With dropout PyTorch computes them on its own GPU by kernels that keep their seed on the host. The pool takes others,
# which draw other masks.
_WITH_DROPOUT = ("nn.functional.multi_head_attention_forward", "nn.functional.scaled_dot_product_attention")

# Results that are the state of a random generator, and memory as it was if nothing is drawn.
_RANDOM_STATES = {
    "torch.ops.aten._efficient_attention_forward": (2, 3),
    "torch.ops.aten._flash_attention_forward": (2, 3),
}


@dataclass
class Outcome:
    """What became of the samples of one operator, dtype and direction.

    Attributes:
        counts: "equal" to the bit, "close", "refused", "wrong" (other numbers), "failed" (an error that the CPU does
            not raise) and "skipped" (the CPU raises an error, or there are no numbers to compare).
        messages: the first message of each kind that has one: why the numbers were not right, or not compared.
    """

    counts: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, message: str = "") -> None:
        self.counts[kind] += 1
        if message:
            self.messages.setdefault(kind, message)

    @property
    def verdict(self) -> str:
        """The worst of its samples."""
        for kind in ("wrong", "failed", "refused"):
            if self.counts[kind]:
                return kind
        return "right" if self.counts["equal"] + self.counts["close"] else "skipped"


def documented_refusals() -> list[str]:
    """What the errors of the table in docs/remote_gpu.md contain."""
    text = (Path(__file__).parents[3] / "docs" / "remote_gpu.md").read_text(encoding="utf-8")
    table = text.partition("## What does not run")[2].partition("\n## ")[0]
    return re.findall(r"^\| [^|]+ \| `([^`|]+)` \| [^|]+ \|$", table, re.MULTILINE)


def entries(dtype: torch.dtype, device: str = "cpu") -> list[Any]:
    """The operators of the database that a device ("cpu" or "cuda") computes in a dtype."""
    return [each for each in op_db if dtype in each.supported_dtypes(device)]


def title(entry: Any) -> str:
    """The name of an operator with that of its variant."""
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


Results = dict[str, list["list[Any] | None"]]
"""By direction, those of each sample, on the CPU; None if the device computes none."""


def expected(entry: Any, dtype: torch.dtype, indices: Iterable[int], device: str = "cpu") -> Results:
    """Compute samples of an operator on a device of this machine.

    Args:
        entry: of `entries`.
        dtype: of its floating-point arguments.
        indices: of the samples; where there are fewer samples, they are counted from the first again.
    """
    found: Results = {direction: [] for direction in DIRECTIONS}
    for direction, compute, sample in _work(entry, dtype, indices, device):
        try:
            torch.manual_seed(1)
            found[direction].append(_on_cpu(compute(_moved(entry, sample, device))))
        except Exception:  # what the device refuses is not compared
            found[direction].append(None)
    return found


def check(
    entry: Any,
    dtype: torch.dtype,
    is_refusal: Callable[[str], bool],
    indices: Iterable[int],
    right: Results | None = None,
    device: str = "cpu",
) -> dict[str, Outcome]:
    """Compute samples of an operator over the pool, and compare them with what a device of this machine gives.

    Args:
        entry, dtype, indices: as for `expected`.
        is_refusal: whether a message of an error is a documented refusal.
        right: what `expected` gave for the same samples and `device`; None computes it here.
    """
    indices = list(indices)
    rights = {key: iter(each) for key, each in (right or expected(entry, dtype, indices, device)).items()}
    outcomes = {direction: Outcome() for direction in DIRECTIONS}
    for direction, compute, sample in _work(entry, dtype, indices, device):
        drawn = device != "cpu" and _has_dropout(entry, sample)
        difference = functools.partial(_difference, entry, direction, drawn)
        _compare(outcomes[direction], is_refusal, entry, compute, sample, next(rights[direction]), difference)
    return outcomes


Compute = Callable[[Any], list[Any]]


def _work(entry: Any, dtype: torch.dtype, indices: Iterable[int], device: str) -> Iterator[tuple[str, Compute, Any]]:
    """A direction, how its results are computed from moved arguments, and the sample: in the same order each time."""
    kind = torch.device(device).type
    differentiable = dtype in entry.supported_backward_dtypes(kind) and entry.supports_autograd
    in_place = entry.get_inplace()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in _samples(entry, dtype, differentiable, set(indices)):
            yield "forward", lambda moved, of=sample: _forward(entry, moved, of), sample
            if differentiable:
                yield "backward", lambda moved, of=sample: _backward(entry, moved, of), sample
            if in_place is not None and not sample.broadcasts_input:
                yield "in place", lambda moved: _in_place(in_place, moved), sample


def _samples(entry: Any, dtype: torch.dtype, differentiable: bool, indices: set[int]) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    found = list(islice(entry.sample_inputs("cpu", dtype, requires_grad=differentiable), max(indices) + 1))
    return [found[index] for index in sorted({index % len(found) for index in indices})] if found else []


def _moved(entry: Any, sample: Any, device: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The arguments of a sample, the tensors copied to a device."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().to(device).requires_grad_(value.requires_grad)
        if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
            return torch.device(device)
        return value

    if entry.name == "tensor_split":  # its sections are on the CPU, whatever the device
        return move(sample.input), sample.args, sample.kwargs
    return tree_map(move, (sample.input, sample.args, sample.kwargs))


def _has_dropout(entry: Any, sample: Any) -> bool:
    """Whether a sample's results depend on random numbers that the pool draws by another kernel."""
    if entry.name not in _WITH_DROPOUT:
        return False
    if "dropout_p" in sample.kwargs:
        return bool(sample.kwargs["dropout_p"])
    given = inspect.signature(F.multi_head_attention_forward).bind(sample.input, *sample.args, **sample.kwargs)
    return bool(given.arguments["training"] and given.arguments["dropout_p"])


def _forward(entry: Any, moved: Any, sample: Any) -> list[Any]:
    value, args, kwargs = moved
    with torch.no_grad():
        results = entry.op(value, *args, **kwargs)
        if entry.name in _UP_TO_A_PHASE:
            results = sample.output_process_fn_grad(results)
        return tree_flatten(results)[0]


def _backward(entry: Any, moved: Any, sample: Any) -> list[Any]:
    value, args, kwargs = moved
    inputs = [each for each in tree_flatten(moved)[0] if isinstance(each, Tensor) and each.requires_grad]
    results = entry.op(value, *args, **kwargs)
    if sample.output_process_fn_grad is not None:
        results = sample.output_process_fn_grad(results)
    outputs = [each for each in tree_flatten(results)[0] if isinstance(each, Tensor) and each.requires_grad]
    if not outputs or not inputs:
        raise _NothingToCompareError
    generator = torch.Generator().manual_seed(2)
    gradients = [
        torch.randn(each.shape, dtype=each.dtype, generator=generator, device="cpu").to(each.device) for each in outputs
    ]
    return list(torch.autograd.grad(outputs, inputs, gradients, allow_unused=True))


def _in_place(operator: Any, moved: Any) -> list[Any]:
    value, args, kwargs = moved
    with torch.no_grad():
        result = operator(value, *args, **kwargs)
    return [result, value]


class _NothingToCompareError(Exception):
    pass


def _on_cpu(results: list[Any]) -> list[Any]:
    return [each.detach().cpu() if isinstance(each, Tensor) else each for each in results]


def _compare(
    outcome: Outcome,
    is_refusal: Callable[[str], bool],
    entry: Any,
    compute: Compute,
    sample: Any,
    right: list[Any] | None,
    difference: Callable[[list[Any], list[Any]], tuple[str, str]],
) -> None:
    if right is None:
        outcome.add("skipped")
        return
    try:
        torch.manual_seed(1)
        found = _on_cpu(compute(_moved(entry, sample, REMOTE)))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        outcome.add("refused" if is_refusal(message) else "failed", message[:600])
        return
    outcome.add(*difference(right, found))


def _difference(entry: Any, direction: str, drawn: bool, expected: list[Any], found: list[Any]) -> tuple[str, str]:
    """What became of a sample, and why. The numbers are not compared if they were `drawn` by another kernel."""
    if len(expected) != len(found):
        return "wrong", f"{len(found)} results, expected {len(expected)}"
    kind = "equal"
    for position, (one, other) in enumerate(zip(expected, found, strict=True)):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if one is not other and not (one == other or one != one):
                return "wrong", f"{other!r}, expected {one!r}"
            continue
        if one.dtype is not other.dtype or one.shape != other.shape or one.layout is not other.layout:
            return "wrong", f"{other.dtype} {tuple(other.shape)}, expected {one.dtype} {tuple(one.shape)}"
        if entry.name in _UNWRITTEN:
            return "skipped", ""
        if drawn or position in _RANDOM_STATES.get(entry.name, ()):
            continue
        try:
            torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True, check_stride=False)
            continue
        except AssertionError:
            kind = "close"
        rtol, atol = _tolerances(entry.name, direction, one.dtype)
        try:
            torch.testing.assert_close(other, one, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
        except AssertionError as error:
            return "wrong", str(error)
    return ("skipped", "dropout is drawn by another kernel") if drawn else (kind, "")


def _tolerances(name: str, direction: str, dtype: torch.dtype) -> tuple[float, float]:
    """The relative and the absolute one."""
    rtol, atol = _SENSITIVE.get(name) or _TOLERANCES.get(dtype, (1e-5, 1e-8))
    if direction == "backward" and name in _ADDED_IN_ANY_ORDER and dtype in (torch.float16, torch.bfloat16):
        atol = _LARGEST_PARTIAL_SUM * torch.finfo(dtype).eps
    return rtol, atol
