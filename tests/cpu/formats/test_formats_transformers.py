"""A quantized model as transformers reads it: the same weights, to the bit, as `QTensor.dequantize` gives.

With 8-bit activations the logits are compared with those of our own loader, too. In int8 transformers puts the largest
magnitude of a token on 127.5, where our kernels put it on 127: activations are rounded on other grids. In fp8 both put
it on 448; but in bfloat16 transformers rounds the scales and what it divides by them to bfloat16.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from warpbus.formats import Checkpoint, CheckpointWriter, quantization_config, to_tensors
from warpbus.kernels.reference.w8a8 import quantize
from warpbus.models import load_model
from warpbus.qtensor import QTensor, Scheme, Schemes

pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")


def round_to_nearest(weight: Tensor, scheme: Scheme) -> QTensor:
    """The simplest quantizer there is: this test is about what is stored, not how well."""
    if scheme.activations is not None:
        return QTensor.from_values(scheme, *quantize(weight, scheme.dtype))
    grouped = weight.float().unflatten(1, (scheme.groups(weight.shape[1]), -1))
    low, high = grouped.amin(-1), grouped.amax(-1)
    if scheme.symmetric:
        scales = (2 * torch.maximum(high, -low) / scheme.max_code).to(weight.dtype)
        zeros = torch.full_like(low, scheme.middle_code)
    else:
        scales = ((high - low) / scheme.max_code).to(weight.dtype)
        zeros = (-low / scales.float()).round().clamp(0, scheme.max_code)
    codes = (grouped / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, scheme.max_code)
    return QTensor.from_codes(scheme, codes.flatten(1).to(torch.uint8), scales, None if scheme.symmetric else zeros)


def write_model(
    directory: Path, scheme: Scheme, exceptions: dict[str, Scheme | None] | None = None, dtype: Any = torch.bfloat16
) -> dict[str, QTensor]:
    """A tiny random GLM with all linear layers but the head quantized; some otherwise, or not."""
    torch.manual_seed(0)
    config = transformers.GlmConfig(
        vocab_size=300,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        pad_token_id=0,
        attention_bias=True,
        dtype=dtype,
    )
    model = transformers.GlmForCausalLM(config).to(dtype)
    schemes = Schemes(scheme, {"lm_head": None, **(exceptions or {})})
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    chosen = {name: schemes.of(name) for name in linears}
    quantized = {
        name: round_to_nearest(linears[name].weight.detach(), each) for name, each in chosen.items() if each is not None
    }
    with CheckpointWriter(directory, shard_bytes=500_000) as writer:
        for name, tensor in model.state_dict().items():
            if name.removesuffix(".weight") not in quantized:
                writer.add(name, tensor)
        for prefix, weight in quantized.items():
            for name, tensor in to_tensors(prefix, weight).items():
                writer.add(name, tensor)
        described = config.to_dict() | {"architectures": ["GlmForCausalLM"], "dtype": str(dtype).removeprefix("torch.")}
        ignore = [name for name, each in chosen.items() if each is None]
        of_layers = {name: weight.scheme for name, weight in quantized.items()}
        writer.write_json("config.json", described | {"quantization_config": quantization_config(of_layers, ignore)})
        writer.finish()
    return quantized


def load(directory: Path, **options: Any) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


def weights_are(model: Any, quantized: dict[str, QTensor], dtype: Any = torch.bfloat16) -> bool:
    modules = dict(model.named_modules())
    return all(
        modules[name].weight.dtype == dtype and torch.equal(modules[name].weight, weight.dequantize(dtype))
        for name, weight in quantized.items()
    )


@pytest.mark.parametrize("text", ["w4a16-g128", "w8a16", "w3a16-g32", "w5a16-g128", "w6a16"])
def test_layers_that_stay_packed_until_the_first_forward(text: str, tmp_path: Path) -> None:
    quantized = write_model(tmp_path / "model", Scheme.parse(text))
    model = load(tmp_path / "model")
    assert torch.equal(
        model.model.layers[1].mlp.down_proj.weight_packed, quantized["model.layers.1.mlp.down_proj"].qweight
    )
    with torch.no_grad():
        assert model(torch.arange(10)[None]).logits.isfinite().all()
    assert weights_are(model, quantized)


# transformers dequantizes asymmetric layers while loading only: left packed, it expects their zero points unpacked.
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    "text", ["w4a16-g128", "w4a16-g32-asym", "w3a16-g32-asym", "w2a16-asym", "w6a16-g64-asym", "w8a16-g64-asym"]
)
def test_layers_that_are_dequantized_while_loading(text: str, tmp_path: Path) -> None:
    quantized = write_model(tmp_path / "model", Scheme.parse(text))
    options = transformers.CompressedTensorsConfig(dequantize=True)
    assert weights_are(load(tmp_path / "model", quantization_config=options), quantized)


INT8, FP8 = Scheme.parse("w8a8-int8"), Scheme.parse("w8a8-fp8")
MIXTURE = {
    "model.layers.0.self_attn.o_proj": None,
    "model.layers.0.mlp.down_proj": Scheme(8, None),
    "re:model.layers.1.mlp.": INT8,
    "re:model.layers.1.self_attn.": FP8,
}


@pytest.mark.parametrize(
    ("scheme", "exceptions", "tolerances"),
    [
        (INT8, {}, (0.04, 0.04)),
        (FP8, {}, (1e-3, 0.1)),
        (FP8, {"re:.*down_proj$": None}, (1e-3, 0.1)),
        (Scheme(4, 128), MIXTURE, (0.02, 0.06)),
    ],
    ids=["int8", "fp8", "fp8-ignored", "mixture"],
)
@torch.no_grad()
def test_activations_of_8_bits(
    scheme: Scheme, exceptions: dict[str, Scheme | None], tolerances: tuple[float, float], tmp_path: Path
) -> None:
    tokens = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(0))
    for dtype, tolerance in zip((torch.float32, torch.bfloat16), tolerances, strict=True):
        directory = tmp_path / str(dtype)
        quantized = write_model(directory, scheme, exceptions, dtype)
        theirs = load(directory, dtype=dtype)
        expected = theirs(tokens).logits.float()
        assert weights_are(theirs, quantized, dtype)
        found = load_model(Checkpoint(directory), device="cpu", dtype=dtype)(tokens).float()
        assert (found - expected).norm() < tolerance * expected.norm()
