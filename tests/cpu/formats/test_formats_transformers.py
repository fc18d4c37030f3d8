"""A quantized model as transformers reads it: the same weights, to the bit, as `QTensor.dequantize` gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from warpbus.formats import CheckpointWriter, quantization_config, to_tensors
from warpbus.qtensor import QTensor, Scheme

pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")


def round_to_nearest(weight: Tensor, scheme: Scheme) -> QTensor:
    """The simplest quantizer there is: this test is about what is stored, not how well."""
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


def write_model(directory: Path, scheme: Scheme) -> dict[str, QTensor]:
    """A tiny random GLM with all linear layers but the head quantized."""
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
        dtype=torch.bfloat16,
    )
    model = transformers.GlmForCausalLM(config).to(torch.bfloat16)
    quantized = {
        name: round_to_nearest(module.weight.detach(), scheme)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    with CheckpointWriter(directory, shard_bytes=500_000) as writer:
        for name, tensor in model.state_dict().items():
            if name.removesuffix(".weight") not in quantized:
                writer.add(name, tensor)
        for prefix, weight in quantized.items():
            for name, tensor in to_tensors(prefix, weight).items():
                writer.add(name, tensor)
        described = config.to_dict() | {"architectures": ["GlmForCausalLM"], "dtype": "bfloat16"}
        writer.write_json("config.json", described | {"quantization_config": quantization_config(scheme, ["lm_head"])})
        writer.finish()
    return quantized


def load(directory: Path, **options: Any) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


def weights_are(model: Any, quantized: dict[str, QTensor]) -> bool:
    modules = dict(model.named_modules())
    assert len(quantized) == 2 * 6
    return all(
        modules[name].weight.dtype == torch.bfloat16 and torch.equal(modules[name].weight, weight.dequantize())
        for name, weight in quantized.items()
    )


@pytest.mark.parametrize("text", ["w4a16-g128", "w8a16", "w3a16-g32"])
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
@pytest.mark.parametrize("text", ["w4a16-g128", "w4a16-g32-asym", "w3a16-g32-asym", "w2a16-asym", "w8a16-g64-asym"])
def test_layers_that_are_dequantized_while_loading(text: str, tmp_path: Path) -> None:
    quantized = write_model(tmp_path / "model", Scheme.parse(text))
    options = transformers.CompressedTensorsConfig(dequantize=True)
    assert weights_are(load(tmp_path / "model", quantization_config=options), quantized)
