"""The measured move of an engine, on the CPU: that it comes about, and what it says of it."""

from dataclasses import replace

import torch
from dense_configs import with_traits

from warpbus.bench.engine_moving import move_engine
from warpbus.models import SHAPES

CPU = torch.device("cpu")
SMALL = with_traits(SHAPES["chatglm2-6b"], vocab_size=300, hidden_size=64, num_layers=2, num_heads=4, head_dim=16)
SMALL = with_traits(SMALL, num_kv_heads=2, ffn_size=128, max_context=20_000, rope=replace(SMALL.rope, rotary_dim=8))


def test_an_engine_moves_and_its_pause_is_told():
    found = move_engine(SMALL, None, source=CPU, target=CPU, context=100, sequences=2, dtype=torch.float32)
    assert found.context > 100
    assert found.sequences == 2
    assert 0 < found.pause < found.gap
    assert found.ahead > 0
    assert found.paused > 0
    assert found.weights > 0
    assert found.step > 0
    assert found.step_after > 0
