"""ChatGLM-6B quantized on a GPU: as good as on the CPU, its rows where the file has them."""

from pathlib import Path

import pytest
import torch
from dense_configs import with_traits

from warpbus.formats import Checkpoint
from warpbus.models import SHAPES, Decoder, load_model
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.quantization import Calibration, quantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SOP = 290
SHAPE = with_traits(
    SHAPES["chatglm-6b"],
    vocab_size=300,
    hidden_size=256,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    ffn_size=384,
    max_context=256,
    stop_ids=(291,),
    normed_residual=56**0.5,
    prompt_end=SOP,
)
SEQUENCES = Calibration(
    tuple(tuple(SOP if j == 9 + i else (7 * i + 3 * j + i * j) % SOP for j in range(60 + i)) for i in range(40))
)
TOKENS = torch.tensor([[*range(2, 40), SOP, *range(60, 80)]])


def load(directory: Path) -> Decoder:
    return load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)


@torch.no_grad()
def test_as_good_as_on_the_cpu(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", SHAPE, torch.float16, device="cpu")
    plain, lost = load(tmp_path / "model"), {}
    expected = plain.hidden(TOKENS)
    for device in ("cuda:0", "cpu"):
        output = tmp_path / device
        quantize(
            tmp_path / "model", output, algorithm="gptq", scheme="w4a16-g128", calibration=SEQUENCES, device=device
        )
        model = load(output)
        for layer, before in zip(model.layers, plain.layers, strict=True):
            weight, exact = layer.attention.qkv.weight.dequantize(torch.float32), before.attention.qkv.weight
            assert (weight - exact).norm() < 0.3 * exact.norm()
        lost[device] = float((model.hidden(TOKENS) - expected).norm() / expected.norm())
    assert lost["cuda:0"] < 0.1
    assert lost["cuda:0"] == pytest.approx(lost["cpu"], rel=0.3)
