"""`decode` on the CPU with a tiny model: what is timed, and that the plain peer computes what our decoder does."""

import types
from dataclasses import replace

import pytest
import torch
from dense_configs import with_traits
from torch import nn

from warpbus.bench import decode, decoders, footprint
from warpbus.bench.breakdown import Launch, breakdown, described
from warpbus.bench.cases import Run, run
from warpbus.bench.decode import DECODE
from warpbus.bench.plain import PlainDecoder
from warpbus.engine.plan import CONTEXT_BYTES
from warpbus.errors import DeviceError, SchemeError, UsageError
from warpbus.models import SHAPES, random_model
from warpbus.qtensor import Scheme

CPU = torch.device("cpu")
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "head_dim": 16, "ffn_size": 96}


def tiny(name, kv_heads=2):
    config = SHAPES[name]
    rope = replace(config.rope, rotary_dim=config.rope.rotary_dim // 8)
    return with_traits(config, **SIZES, num_kv_heads=kv_heads, rope=rope, max_context=512)


def settings(**changes):
    return Run(**{"device": CPU, "command": "warpbus bench decode", "quick": True, **changes})


@pytest.fixture
def small(monkeypatch):
    """A tiny model in float32; on the CPU there is no int4 product of torch's that takes this layout."""
    monkeypatch.setitem(SHAPES, "chatglm2-6b", tiny("chatglm2-6b"))
    monkeypatch.setattr(decode, "_dtype", lambda run: torch.float32)
    monkeypatch.setattr(decode, "_PROMPT", 8)
    monkeypatch.setattr(decode, "_QUICK_TOKENS", 5)
    monkeypatch.setattr(decode, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(decoders, "Int4Linear", nn.Linear)
    return replace(DECODE, needs_gpu=False)


def test_tokens_a_second_of_ours_and_of_peers(small):
    asked = settings(variants=("w4a16-g32",))
    records = run(small, asked)
    assert [record.peer.name for record in records] == ["warpbus, float32", "torch.compile, int4"]
    assert asked.notes == []
    for record in records:
        assert (record.metric, record.unit, record.bench) == ("speed", "tokens/s", "decode")
        assert record.case["shape"] == "chatglm2-6b"
        assert (record.case["batch"], record.case["prompt"], record.case["generated"]) == (1, 8, 5)
        assert record.case["variant"] == "w4a16-g32"
        assert len(record.samples["ours"]) == len(record.samples["peer"]) == 2
        assert record.ratio == pytest.approx(record.ours / record.peer.value)


def test_a_peer_that_does_not_work_is_left_out_and_said_so(small, monkeypatch):
    def broken(*given):
        raise OSError("no compiler\nat all")

    monkeypatch.setattr(decoders, "Plain", broken)
    asked = settings(variants=("w4a16-g32",))
    assert [record.peer.name for record in run(small, asked)] == ["warpbus, float32"]
    assert asked.notes == ["torch.compile, int4 was left out: it does not work here (OSError: no compiler)."]


def test_a_peer_that_fails_later_is_left_out_and_the_others_go_on(small, monkeypatch):
    whole = decoders.Plain

    def failing(*given):
        generate, answers = whole(*given), iter((1.0, 1.0))

        def call(prompt, tokens):
            for seconds in answers:
                return seconds * generate(prompt, tokens)
            raise RuntimeError("lost")

        return call

    monkeypatch.setattr(decoders, "Plain", failing)
    asked = settings(variants=("w4a16-g32",))
    (record,) = run(small, asked)
    assert (record.peer.name, len(record.samples["peer"])) == ("warpbus, float32", 2)
    assert asked.notes == ["torch.compile, int4 was left out: it does not work here (RuntimeError: lost)."]


def test_memory_is_measured_first_and_held_against_what_is_published(monkeypatch):
    asked = settings(quick=False)
    limits = []

    def measured(*given, encode, generate, limit):
        limits.append(limit)
        return 4_200_000_000, 4_600_000_000

    monkeypatch.setattr(decode, "measure_memory", measured)
    tasks = DECODE.cases(asked)
    assert len(tasks) == 3
    reading, generating = tasks[0]()
    assert (reading.parameters["task"], reading.parameters["tokens"]) == ("encode", 2048)
    assert reading.parameters["memory"] == "no limit"
    assert (reading.ours, reading.peers[0][2], reading.unit) == ([4.2], [5.5], "GB")
    assert (generating.parameters["task"], generating.ours, generating.peers[0][2]) == ("generate", [4.6], [5.1])
    assert tasks[1]()[0].parameters["memory"] == "planned for 4.8GB"
    assert limits == [None, 4_800_000_000]
    assert asked.notes[0] == "w4a16-g128, no limit, memory by the driver's account: encode 2,048 tokens 4.20 GB"
    others = DECODE.cases(settings(quick=False, shape="llama-3-8b"))
    assert len(others) == 2
    assert others[0]() == []


def test_a_planned_model_is_laid_out_within_its_limit(monkeypatch):
    enforced = []
    monkeypatch.setattr(footprint, "enforce", lambda plan, device: enforced.append(plan))
    config, scheme = tiny("chatglm2-6b"), Scheme.parse("w4a16-g32")
    assert footprint._made(config, scheme, torch.float16, CPU, 0, 64)[1] is None
    assert enforced == []
    limit = CONTEXT_BYTES + 80_000_000
    model, plan = footprint._made(config, scheme, torch.float16, CPU, limit, 64)
    assert enforced == [plan]
    assert (plan.context, plan.pool_tokens) == (64, 64)
    assert plan.total <= limit
    assert model.config == config


def test_what_cannot_be_asked_for():
    with pytest.raises(UsageError, match="--shape gpt: there is no such shape: choose among chatglm-6b"):
        DECODE.cases(settings(shape="gpt"))
    with pytest.raises(UsageError, match="--size 1: give 2 or more tokens"):
        DECODE.cases(settings(sizes=(1,)))
    with pytest.raises(SchemeError, match="unknown scheme"):
        DECODE.cases(settings(variants=("int3",)))
    with pytest.raises(DeviceError, match="bench decode: needs an NVIDIA GPU"):
        run(DECODE, settings())


def test_a_process_that_fails_is_an_error_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    monkeypatch.setattr(footprint.sys, "executable", "/bin/false")
    with pytest.raises(DeviceError, match="the memory could not be measured: it said nothing"):
        footprint.measure_memory("chatglm2-6b", Scheme.parse("w4a16"), torch.float16, CPU, encode=1, generate=1)


@pytest.mark.parametrize(("name", "kv_heads"), [("chatglm2-6b", 2), ("llama-3-8b", 4)])
def test_the_plain_decoder_computes_what_ours_does(name, kv_heads):
    config = tiny(name, kv_heads)
    model = random_model(config, None, "cpu", torch.float32)
    plain = PlainDecoder(config, 16, nn.Linear)
    plain.embedding, plain.head = model.embedding, model.head
    for ours, theirs in zip(model.layers, plain.layers, strict=True):
        theirs.qkv, theirs.o = ours.attention.qkv, ours.attention.o
        theirs.gate_up, theirs.down = ours.mlp.gate_up, ours.mlp.down
    tokens = torch.randint(96, (1, 10))
    with torch.no_grad():
        expected = model(tokens)[0]
        found = [plain(tokens[:, at], torch.tensor([at]))[0] for at in range(10)]
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-4, atol=1e-4)


def test_transformers_generates_as_many_tokens_as_it_is_asked_for(monkeypatch):
    library = pytest.importorskip("transformers")
    made = []
    whole = library.AutoModelForCausalLM.from_config

    def build(settings, dtype):
        made.append(settings)
        return whole(settings, dtype=torch.float32)

    monkeypatch.setattr(library.AutoModelForCausalLM, "from_config", build)
    put = []
    monkeypatch.setattr(decoders._TokenTimes, "put", lambda self, tokens: put.append(tokens.numel()))
    monkeypatch.setattr(decoders._TokenTimes, "seconds", 1.0)
    for name, kind in (("chatglm2-6b", "glm"), ("llama-3-8b", "llama")):
        put.clear()
        assert decoders.transformers(tiny(name), CPU)(8, 5) == 1.0
        assert put == [8, 1, 1, 1, 1, 1]
        assert made[-1].model_type == kind


def test_the_bytes_of_a_step():
    read = decode.step_bytes(SHAPES["chatglm2-6b"], Scheme.parse("w4a16-g128"), torch.float16, 128)
    assert read["head"] == 65024 * 4096 * 2
    # 4 bits for each weight of the layers, 16 for the scale of 128 of them.
    assert sum(read.values()) - read["attention"] == pytest.approx(3.39e9 + 0.09e9, rel=0.01)
    first = decode.step_bytes(SHAPES["chatglm-6b"], None, torch.float16, 128)
    assert first["up"] == 28 * 16384 * 4096 * 2
    assert sum(first.values()) - first["attention"] == pytest.approx(2 * SHAPES["chatglm-6b"].num_parameters, rel=1e-3)


def test_the_bytes_of_a_step_with_experts():
    """Four of 64 experts and the shared one, latents instead of keys and values, and a projection in 16 bits."""
    shape = SHAPES["glm-4.7-flash"]
    read = decode.step_bytes(shape, Scheme.parse("w4a16-g128"), torch.bfloat16, 1000)
    assert read["attention"] == 1000 * 47 * 576 * 2
    assert read["kv_b"] == 47 * 20 * 448 * 512 * 2
    of_experts = 46 * (4 + 1) * 1536 * 2048
    dense = 10240 * 2048
    assert read["down"] == pytest.approx((of_experts + dense) * 4.125 / 8, rel=1e-6)
    assert read["gate_up"] == pytest.approx(2 * read["down"])


def test_what_has_no_peer():
    config = SHAPES["chatglm-6b"]
    with pytest.raises(UsageError, match="transformers has no ChatGLM-6B"):
        decoders.transformers(config, CPU)
    with pytest.raises(UsageError, match="the plain decoder has no ChatGLM-6B"):
        decoders.Plain(config, 16, CPU)


def test_a_stopwatch_begins_with_the_first_token(monkeypatch):
    times = iter([0.0, 5.0, 6.0, 8.0])
    monkeypatch.setattr(decoders, "time", types.SimpleNamespace(perf_counter=lambda: next(times)))
    watch = decoders._TokenTimes()
    for _ in range(4):
        watch.put(torch.zeros(1))
    watch.end()
    assert watch.seconds == 3.0


def test_where_a_step_goes():
    found = [
        Launch("wna16_decode", 0, 10),
        Launch("decode_attention(float)", 2, 14),  # waits for the one before
        Launch("wna16_decode", 15, 20),
        Launch("wna16_decode", 20, 30),
        Launch("argmax", 21, 29),  # ends before the one before: costs nothing
        Launch("wna16_decode", 30, 36),
    ]
    rows = breakdown(found, {"wna16": [("qkv", 4.0), ("o", 3.0)], "attention": [("", 1.0)]})
    assert [(row.name, row.count, row.own, row.least) for row in rows] == [
        ("wna16 qkv", 2, 20.0, 8.0),
        ("wna16 o", 2, 12.0, 6.0),
        ("attention", 1, 4.0, 1.0),
        ("argmax", 1, 0.0, None),
    ]
    lines = described(rows).splitlines()
    assert lines[1].split() == ["wna16", "qkv", "2", "20.0", "55.6%", "8.0"]
    assert lines[-1].split() == ["the", "whole", "step", "6", "36.0", "100.0%", "15.0"]
    assert max(map(len, lines)) < 80
