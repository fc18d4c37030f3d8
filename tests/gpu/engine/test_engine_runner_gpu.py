"""Prompts in pieces and ragged steps on a GPU give what the model gives without a cache."""

import pytest
import torch

from warpbus.engine import runner as module
from warpbus.engine.runner import Runner
from warpbus.models import Decoder, ModelConfig, RopeConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PROMPTS = [list(range(5, 75)), [20, 21], list(range(100, 133))]
STEPS = [[40, 50, 60], [41, 51, 61], [42, 52, 62]]


def decoder(num_kv_heads, dtype):
    config = ModelConfig(
        family="glm",
        vocab_size=200,
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        ffn_size=256,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e4, rotary_dim=32, interleaved=True),
        max_context=512,
    )
    model = Decoder(config)
    model.initialize(torch.Generator().manual_seed(0), std=0.05)
    return model.to("cuda", dtype).eval()


@pytest.mark.parametrize("piece", [4096, 48])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
def test_prompts_and_steps(monkeypatch, piece, num_kv_heads, dtype, tolerance):
    monkeypatch.setattr(module, "PREFILL_TOKENS", piece)
    model = decoder(num_kv_heads, dtype)
    runner = Runner(model, PROMPTS, 100, device=torch.device("cuda", 0), dtype=dtype)
    logits = runner.prefill()
    rows = [list(prompt) for prompt in PROMPTS]
    for step in [*STEPS, None]:
        for row, ids in enumerate(rows):
            with torch.no_grad():
                expected = model(torch.tensor([ids], device="cuda"))[0, -1]
            torch.testing.assert_close(logits[row], expected, atol=tolerance, rtol=tolerance)
        if step is not None:
            logits = runner.decode(step)
            for ids, token in zip(rows, step, strict=True):
                ids.append(token)
