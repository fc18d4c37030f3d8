"""ChatGLM-6B's layers on a GPU: against the CPU in float32, plain and quantized, and as they are loaded."""

import pytest
import torch
from dense_configs import with_traits
from torch import nn
from torch.nn import functional as F

from warpbus.formats import Checkpoint
from warpbus.models import SHAPES, load_model, random_model
from warpbus.models.layers import LayerNorm, QuantizedLinear, project
from warpbus.models.placement import place, round_onto
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GPU = torch.device("cuda", 0)
SOP = 990
SMALL = with_traits(
    SHAPES["chatglm-6b"],
    vocab_size=1000,
    hidden_size=256,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    ffn_size=384,
    max_context=512,
    stop_ids=(991,),
    normed_residual=56**0.5,
    prompt_end=SOP,
)
HALVES = [torch.float16, torch.bfloat16]


def prompts():
    """Two rows whose prompts have different lengths."""
    tokens = torch.randint(0, SOP, (2, 60), generator=torch.Generator().manual_seed(0))
    tokens[0, 40] = tokens[1, 7] = SOP
    return tokens


def difference(found, expected):
    assert found.isfinite().all()
    return ((found.cpu().double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("scheme", [None, "w4a16-g128", "w8a16", "w3a16-g64-asym"])
@pytest.mark.parametrize("dtype", HALVES)
@torch.no_grad()
def test_a_model_is_the_one_of_the_cpu(scheme, dtype):
    model = random_model(SMALL, None if scheme is None else Scheme.parse(scheme), GPU, dtype)
    generator = torch.Generator(GPU).manual_seed(1)
    for module in model.modules():
        if isinstance(module, LayerNorm):
            module.weight.uniform_(0.5, 1.5, generator=generator)
            module.bias.normal_(0.0, 0.2, generator=generator)
    tokens = prompts()
    found = model(tokens.to(GPU)).float().cpu()
    expected = model.to("cpu").float()(tokens)
    assert expected.std() > 0.05
    assert difference(found, expected) < (0.02 if dtype == torch.float16 else 0.12)


@pytest.mark.parametrize("scheme", [None, "w4a16-g128"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [1, 5, 70])
@torch.no_grad()
def test_a_projection_with_what_surrounds_it(scheme, dtype, tokens):
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(384, 256, generator=generator) / 16
    bias, x = torch.randn(384, generator=generator).to(dtype), torch.randn(1, tokens, 256, generator=generator)
    norm = LayerNorm(256, 1e-5)
    norm.weight.copy_(torch.rand(256, generator=generator) + 0.5)
    norm.bias.copy_(torch.randn(256, generator=generator))
    norm, x, residual = norm.to(dtype), x.to(dtype), torch.randn(1, tokens, 384, generator=generator).to(dtype)
    if scheme is None:
        linear = nn.Linear(256, 384).to(dtype)
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
        exact, linear = linear.weight.double(), linear.to(GPU)
    else:
        rounded = round_onto(weight, Scheme.parse(scheme), "cpu", dtype)
        exact = rounded.dequantize(torch.float32).double()
        linear = QuantizedLinear(place(rounded, GPU, dtype), bias.to(GPU), dtype=dtype)
    normed = F.layer_norm(x.double(), (256,), norm.weight.double(), norm.bias.double(), 1e-5)
    inner = normed @ exact.T + bias.double()
    expected = F.gelu(inner, approximate="tanh") + residual.double()
    found = project(linear, x.to(GPU), norm=norm.to(GPU), residual=residual.to(GPU), activation="gelu")
    assert found.dtype == dtype
    assert difference(found, expected) < 8 * torch.finfo(dtype).eps


@torch.no_grad()
def test_a_file_is_loaded_as_on_the_cpu(tmp_path):
    write_random_checkpoint(tmp_path / "model", SMALL, torch.float16, device="cpu")
    here, there = (
        load_model(Checkpoint(tmp_path / "model"), device=device, dtype=torch.float16) for device in ("cpu", GPU)
    )
    parameters = dict(there.named_parameters())
    assert all(torch.equal(parameters[name].cpu(), parameter) for name, parameter in here.named_parameters())
    assert difference(there(prompts().to(GPU)), here.float()(prompts())) < 0.02
