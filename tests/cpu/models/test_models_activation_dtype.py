"""The option `activation_dtype`: which words and matrices it takes, on which GPUs."""

import pytest
import torch
from torch import nn

from warpbus.cuda.dtype_names import ACTIVATION_DTYPES
from warpbus.errors import UsageError
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.models.layers import activation_dtype
from warpbus.models.layers.activation_dtype import round_activations
from warpbus.models.layers.linear import QuantizedLinear
from warpbus.models.layers.stacked_experts import StackedExperts
from warpbus.qtensor import QTensor, Scheme


def model_of(*schemes):
    """Packed as for a GPU."""
    layers = []
    for name in schemes:
        scheme = Scheme.parse(name)
        codes = torch.randint(0, scheme.max_code + 1, (16, 128), dtype=torch.uint8)
        weight = QTensor.from_codes(scheme, codes, torch.ones(16, scheme.groups(128)), None)
        layers.append(QuantizedLinear(pack(weight, torch.float16)))
    return nn.Sequential(*layers)


@pytest.fixture
def on(monkeypatch):
    return lambda arch: monkeypatch.setattr(activation_dtype, "architecture", lambda device: arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a"])
def test_every_gpu_since_ampere_takes_int8(on, arch):
    on(arch)
    model = model_of("w4a16-g128", "w8a16")
    round_activations(model, "int8")
    assert [each.activation_dtype for each in model] == [torch.int8, torch.int8]


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_100a"])
def test_gpus_since_ada_take_fp8(on, arch):
    on(arch)
    model = model_of("w4a16-g128")
    round_activations(model, "fp8")
    assert model[0].activation_dtype == torch.float8_e4m3fn


def test_experts_are_rounded_too(on):
    on("sm_90a")
    scheme = Scheme.parse("w4a16-g64")

    def stacked(*shape):
        codes = torch.zeros(shape, dtype=torch.uint8)
        weight = QTensor.from_codes(scheme, codes, torch.ones(shape[0], scheme.groups(shape[1])), None)
        return PackedExperts.stack([pack(weight, torch.float16)] * 2)

    experts = StackedExperts(stacked(256, 64), stacked(64, 128), 2)
    round_activations(nn.ModuleList([experts]), "fp8")
    assert experts.activation_dtype == torch.float8_e4m3fn


def test_older_ones_are_told_to_use_int8(on):
    on("sm_86")
    with pytest.raises(UsageError, match=r"fp8 needs an Ada, Hopper or later GPU \(sm_89\); cpu is sm_86: give int8"):
        round_activations(model_of("w4a16-g128"), "fp8")


def test_auto_rounds_nothing():
    model = model_of("w4a16-g128")
    round_activations(model, "auto")
    assert model[0].activation_dtype is None
    assert ACTIVATION_DTYPES[0] == "auto"


def test_what_is_refused():
    with pytest.raises(UsageError, match="activation_dtype is 'fp4': give auto, fp8, int8"):
        round_activations(model_of("w4a16-g128"), "fp4")
    with pytest.raises(UsageError, match=r"activation_dtype fp8 needs matrices .* the model is w8a16: leave it out"):
        round_activations(model_of("w8a16"), "fp8")
    with pytest.raises(UsageError, match=r"the model is not quantized: leave it out"):
        round_activations(nn.Linear(4, 4), "int8")
