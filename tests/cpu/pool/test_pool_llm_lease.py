"""`LLM` on `warpbus:0`: what is uploaded and allocated, what a GPU behind gets, what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_direct import connected

import warpbus
from warpbus.engine import LLM, SamplingParams
from warpbus.engine.engine import request
from warpbus.engine.loading import build_engine, open_model
from warpbus.engine.options import ServiceOptions
from warpbus.engine.placement import devices_of
from warpbus.errors import DeviceError, StateError, UsageError
from warpbus.formats import Checkpoint
from warpbus.kernels.ops.packed import PackedWeight
from warpbus.models import read_config
from warpbus.models.adapters import Lora, LowRank, Prefix, save_lora, save_prefix

GREEDY = SamplingParams(temperature=0, max_tokens=20)
HOPPER = (9, 0)


@pytest.fixture(scope="module")
def quantized(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in 4 bits."""
    output = tmp_path_factory.mktemp("pool") / "w4"
    warpbus.quantize(tiny_model, output, scheme="w4a16-g32", algorithm="rtn", device="cpu")
    return output


def test_weights_are_uploaded_once(tiny_model: Path) -> None:
    with connected() as (session, executor):
        llm = LLM(tiny_model, device="warpbus")
        held = sum(each.nbytes for each in llm.model.parameters())
        sent = session.statistics.bytes_sent
        assert held <= sent < held + 200_000
        session.flush()  # what is not sent yet is not there yet
        assert session.used == executor.storages.used


@pytest.mark.parametrize("scheme", ["plain", "w4"])
def test_what_a_gpu_behind_gets(scheme: str, tiny_model: Path, quantized: Path) -> None:
    """Packed weights, fused operators, steps that are programs: with the references of a CPU in place of kernels."""
    model = tiny_model if scheme == "plain" else quantized
    with connected(capability=HOPPER) as (session, executor):
        opened = open_model(model, torch.device("warpbus", 0), ServiceOptions(dtype="float16", max_num_seqs=4))
        engine = build_engine(opened, ServiceOptions(dtype="float16", max_num_seqs=4))
        layer = engine.model.layers[0]
        assert isinstance(getattr(layer.mlp.down, "form", None), PackedWeight) == (scheme == "w4")
        prompts = [[5, 6, 7], list(range(30, 50))]
        found = engine.decode(prompts, 8)
        usage = executor.usage()
        assert usage["programs"] == 2  # with prompts, and without
        before, operators = session.statistics.round_trips, session.statistics.operators
        steps = engine.stats().steps
        assert engine.decode(prompts, 8) == found
        steps = engine.stats().steps - steps
        assert steps == 8
        assert session.statistics.round_trips - before == steps
        assert session.statistics.operators - operators < steps * 15
        assert executor.usage()["programs"] == 2
        used = session.used
        session.flush()
        assert executor.storages.used <= used
    here = LLM(model, device="cpu", dtype="float16", max_num_seqs=4)
    assert here.engine.decode(prompts, 8) == found


@pytest.mark.parametrize("capability", [None, HOPPER])
def test_adapters_of_requests(capability: tuple[int, int] | None, tiny_model: Path, tmp_path: Path) -> None:
    """A LoRA and a prefix, beside requests that name none."""
    config = read_config(Checkpoint(tiny_model))
    draw = torch.Generator().manual_seed(2)
    a, b = (
        torch.randn(4, config.hidden_size, generator=draw),
        torch.randn(sum(config.attention.qkv_rows), 4, generator=draw),
    )
    lora = Lora("one", {"layers.0.attention.qkv": LowRank(a, b)})
    save_lora(tmp_path / "one", lora, config, base="tiny", rank=4, alpha=4)
    shape = config.num_layers, 5, config.attention.num_kv_heads, config.attention.head_dim
    prefix = Prefix("two", *(torch.randn(shape, generator=draw) for _ in range(2)))
    save_prefix(tmp_path / "two", prefix, config, base="tiny")
    adapters = {name: tmp_path / name for name in ("one", "two")}
    prompts, names = [[5, 6, 7], [8, 9], list(range(40)), [5, 6, 7]], ["one", None, "two", "two"]

    def answers(device: str) -> list[list[int]]:
        llm = LLM(tiny_model, device=device, dtype="float16", adapters=adapters)
        return [each.token_ids for each in llm.generate(prompts, GREEDY, adapter=names)]

    with connected(capability=capability):
        assert answers("warpbus") == answers("cpu")


@pytest.mark.parametrize("options", [{"kv_dtype": "int8"}, {"speculation": 3}], ids=str)
def test_options_of_an_engine_on_a_gpu(options: dict[str, Any], tiny_model: Path) -> None:
    """The cache in 8 bits, and guesses; tokens are those of a cache in 16 bits on the CPU, one by one."""
    plain = ServiceOptions(dtype="float16", max_num_seqs=2)
    prompts = [[5, 6, 7], [8, 9, 10, 11] * 9]
    here = build_engine(open_model(tiny_model, torch.device("cpu"), plain), plain)
    asked = replace(plain, **options)
    with connected(capability=HOPPER):
        engine = build_engine(open_model(tiny_model, torch.device("warpbus", 0), asked), asked)
        assert engine.decode(prompts, 6) == here.decode(prompts, 6)


@pytest.mark.parametrize("capability", [None, HOPPER])
def test_weights_and_activations_of_8_bits(
    capability: tuple[int, int] | None, tiny_model: Path, tmp_path: Path
) -> None:
    warpbus.quantize(tiny_model, tmp_path / "w8", scheme="w8a8-int8", algorithm="rtn", device="cpu")
    dtype = "float32" if capability is None else "float16"
    expected = LLM(tmp_path / "w8", device="cpu", dtype=dtype, max_num_seqs=2).engine.decode([[5, 6, 7]], 8)
    with connected(capability=capability):
        options = ServiceOptions(dtype=dtype, max_num_seqs=2)
        engine = build_engine(open_model(tmp_path / "w8", torch.device("warpbus", 0), options), options)
        assert engine.decode([[5, 6, 7]], 8) == expected


def test_programs_are_few(tiny_model: Path) -> None:
    options = ServiceOptions(dtype="float16", max_num_seqs=32)
    with connected(capability=HOPPER) as (_, executor):
        engine = build_engine(open_model(tiny_model, torch.device("warpbus", 0), options), options)
        for count in range(1, 33):
            engine.decode([[5]] * count, 2)
        assert executor.usage()["programs"] <= 16


def test_the_cache_keeps_to_the_lease(tiny_model: Path) -> None:
    with connected(2_500_000) as (session, executor):
        llm = LLM(tiny_model, device="warpbus:0")
        stats = llm.engine.stats()
        assert 0 < stats.blocks < 16 * 512 // 32
        assert stats.cache_bytes < 0.75 * 2_500_000
        assert llm.generate("床前明月光", GREEDY)[0].token_ids
        llm.engine.shrink()  # what a remote device has been asked for stays
        assert llm.engine.stats().cache_bytes == stats.cache_bytes
        assert executor.storages.peak <= session.memory
        llm.engine.close()
        before = session.used
        del llm
        session.flush()
        assert session.used < before - stats.cache_bytes


@pytest.mark.parametrize("room", [100, 20_000])
@pytest.mark.parametrize("capability", [None, HOPPER])
def test_an_engine_survives_a_lease_that_is_full(
    capability: tuple[int, int] | None, room: int, tiny_model: Path
) -> None:
    with connected(capability=capability) as (session, executor):
        dtype = "float32" if capability is None else "float16"
        options = ServiceOptions(dtype=dtype, max_num_seqs=2)
        engine = build_engine(open_model(tiny_model, torch.device("warpbus", 0), options), options)
        asked, plenty = request(list(range(5, 45)), tokens=4), session.memory
        session.flush()
        session.memory = session.used + room
        engine.add(asked)
        with pytest.raises(DeviceError, match="out of memory with 1 sequences"):
            engine.step()
        session.memory = plenty
        while engine.has_work:
            engine.step()
        assert engine.decode([list(range(5, 45))], 4) == [asked.token_ids]
        assert executor.usage()["programs"] == (0 if capability is None else 3)


def test_refusals(tiny_model: Path) -> None:
    with connected() as (_, _):
        with pytest.raises(UsageError, match=r"memory is '6GB', but warpbus:0 is leased with a memory of its own"):
            LLM(tiny_model, device="warpbus:0", memory="6GB")
        with pytest.raises(UsageError, match="kv_dtype is 'int8'"):
            LLM(tiny_model, device="warpbus:0", kv_dtype="int8")
        with pytest.raises(DeviceError, match="give warpbus or warpbus:0"):
            LLM(tiny_model, device="warpbus:1")
        with pytest.raises(UsageError, match="tensor_parallel is 2, and a remote GPU is one"):
            devices_of(ServiceOptions(device="warpbus", tensor_parallel=2))
        llm = LLM(tiny_model, device="warpbus:0")
        with pytest.raises(UsageError, match="this engine cannot sleep"):
            llm.engine.sleep()
    with pytest.raises(StateError, match="no remote GPU is connected"):
        LLM(tiny_model, device="warpbus:0")
    with connected(500_000), pytest.raises((DeviceError, torch.OutOfMemoryError)):
        LLM(tiny_model, device="warpbus:0")
