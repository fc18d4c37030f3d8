"""Operators are called without PyTorch's dispatcher only where nothing of PyTorch has to see them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from warpbus.kernels.operators import _device_of
from warpbus.kernels.ops.norm import _rms_norm

NAME = "warpbus::rms_norm"
X, WEIGHT = torch.arange(1.0, 13.0).view(3, 4), torch.tensor([1.0, 2.0, 3.0, 4.0])


class Subclass(Tensor):
    """A tensor that PyTorch treats as one of its own."""


def dispatched(call: Callable[[], object]) -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return any(event.name == NAME for event in profile.events())


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_implementation_is_called(guard) -> None:
    with guard():
        assert not dispatched(lambda: _rms_norm(X, Parameter(WEIGHT), 1e-5))
        assert torch.equal(_rms_norm(X, WEIGHT, 1e-5), torch.ops.warpbus.rms_norm(X, WEIGHT, 1e-5))


def test_with_gradients_the_dispatcher_is_asked() -> None:
    assert dispatched(lambda: _rms_norm(X, WEIGHT, 1e-5))


@torch.no_grad()
def test_modes_see_the_operator() -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            seen.append(function.name())
            return function(*arguments, **(keywords or {}))

    with Mode():
        _rms_norm(X, WEIGHT, 1e-5)
    assert NAME in seen
    with FakeTensorMode() as mode:
        made = _rms_norm(mode.from_tensor(X), mode.from_tensor(WEIGHT), 1e-5)
    assert type(made).__name__ == "FakeTensor"


@torch.no_grad()
def test_subclasses_transforms_and_traces_see_the_operator() -> None:
    assert dispatched(lambda: _rms_norm(X.as_subclass(Subclass), WEIGHT, 1e-5))
    traced = torch.jit.trace(lambda x: _rms_norm(x, WEIGHT, 1e-5), X, check_trace=False)
    assert torch.equal(traced(X + 1), _rms_norm(X + 1, WEIGHT, 1e-5))
    mapped = torch.vmap(lambda row: _rms_norm(row[None], WEIGHT, 1e-5)[0])(X)
    assert torch.equal(mapped, _rms_norm(X, WEIGHT, 1e-5))


def test_the_device_of_arguments() -> None:
    meta = X.to("meta")
    assert _device_of((X, [X, WEIGHT], None, 3, 1e-5, "none", [1, 2])) == "cpu"
    assert _device_of((1, None)) is None
    assert _device_of((X, meta)) is None
    assert _device_of((X, [WEIGHT, meta])) is None
    assert _device_of((X, X.as_subclass(Subclass))) is None
