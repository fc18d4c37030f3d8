"""`bench decode` with a small model: every contender runs in a CUDA graph, and the profile names our kernels."""

import gc

import pytest
import torch
from dense_configs import with_traits

from warpbus.bench import Run, run
from warpbus.bench.decode import DECODE
from warpbus.bench.decoders import Plain
from warpbus.bench.footprint import measure_memory
from warpbus.bench.peers import Tinygemm
from warpbus.bench.plain import Int4Linear
from warpbus.models import SHAPES
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda", 0)
SIZES = {"vocab_size": 1024, "hidden_size": 512, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 1024}


def test_a_small_model(monkeypatch):
    monkeypatch.setitem(SHAPES, "chatglm2-6b", with_traits(SHAPES["chatglm2-6b"], **SIZES))
    asked = Run(DEVICE, "warpbus bench decode", sizes=(16,), quick=True, profile=True)
    records = run(DECODE, asked)
    assert records[0].peer.name == "warpbus, float16"
    left_out = any("torch.compile, int4 was left out" in note for note in asked.notes)
    assert len(records) == 2 - left_out
    assert all(record.ours > 0 and record.floor > 0 for record in records)
    text = asked.notes[-1]
    assert text.startswith("One token, w4a16-g128, by the profiler:")
    for part in ("qkv", "o", "gate_up", "down"):
        assert f"wna16 {part} " in text
    assert "decode_attention" in text
    assert "the whole step" in text


def test_int4_layers_of_the_plain_model():
    with torch.device(DEVICE):
        layer = Int4Linear(1024, 512, True)
    layer = layer.to(torch.bfloat16)
    x = torch.randn(1, 1024, device=DEVICE, dtype=torch.bfloat16)
    product = layer(x)
    assert torch.equal(product, Tinygemm(layer.codes, layer.scales, 128)(x) + layer.bias)
    assert 0.3 < (product - layer.bias).float().std() < 3


def test_a_graph_outlives_what_made_it():
    """The plain model's kernels and weights stay, whatever is collected or compiled beside it."""
    config = with_traits(SHAPES["chatglm2-6b"], **SIZES)
    plain = Plain(config, 40, DEVICE)
    plain(8, 16)
    last = plain._token.item()
    gc.collect()
    torch.cuda.empty_cache()
    torch.compile(lambda x: x.sin() + 1)(torch.ones(64, device=DEVICE))
    for _ in range(3):
        assert plain(8, 16) > 0
        assert plain._token.item() == last


def test_memory_by_the_driver():
    scheme = Scheme.parse("w4a16-g128")
    encoding, generating = measure_memory("chatglm2-6b", scheme, torch.float16, DEVICE, encode=64, generate=4)
    # The weights at least, and no more than a card of 8 GB has.
    assert 3.9e9 < encoding < 8e9
    assert 3.9e9 < generating < 8e9
    limit = 4_800_000_000
    planned = measure_memory("chatglm2-6b", scheme, torch.float16, DEVICE, encode=64, generate=4, limit=limit)
    assert 3e9 < max(planned) <= limit
