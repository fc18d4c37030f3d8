"""Scales of an 8-bit KV cache: what is written, what reads it, and what the cache then holds."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from quantization_models import write_model

from warpbus.engine import Engine
from warpbus.engine.plan import Stored, plan_memory
from warpbus.errors import CheckpointError, TensorError, UsageError
from warpbus.evaluation import score
from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.models import Decoder, load_model, read_config
from warpbus.models.convert import convert
from warpbus.models.documents import Document
from warpbus.models.kv_scales import load_kv_scales
from warpbus.models.layers import CausalAttention
from warpbus.models.parallel import Part
from warpbus.quantization import Calibration, Report, quantize

KV_HEADS, LARGEST = 2, {"fp8": 448, "int8": 127}
SEQUENCES = Calibration(
    tuple(tuple((7 * at * at + 13 * index) % 380 for at in range(10 + index)) for index in range(20))
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("kv") / "model")


def run(model: Path, output: Path, kv_cache: str | None, **options: object) -> Report:
    arguments = {"scheme": "w8a16", "calibration": SEQUENCES, "device": "cpu"} | options
    return quantize(model, output, kv_cache=kv_cache, **arguments)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def quantized(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("quantized")
    names = ("fp8", "int8", "fp8-head", "int8-head")
    for name in names:
        run(model, directory / name, name)
    run(model, directory / "plain", None)
    return {name: directory / name for name in (*names, "plain")}


def loaded(path: Path) -> Decoder:
    return load_model(Checkpoint(path), device="cpu", dtype=torch.float32)


class Watched(CausalAttention):
    """Keeps the largest magnitude of the keys and values of each layer and head."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = torch.zeros(2, 2, KV_HEADS)

    def attend(self, layer, q_bthd, k_bthd, v_bthd, positions_bt):  # type: ignore[no-untyped-def]
        for which, x in enumerate((k_bthd, v_bthd)):
            self.largest[layer, which] = torch.maximum(self.largest[layer, which], x.abs().amax((0, 1, 3)))
        return super().attend(layer, q_bthd, k_bthd, v_bthd, positions_bt)


def largest(path: Path) -> torch.Tensor:
    """Of the calibration data in a quantized model, `[layers, 2, kv_heads]`."""
    watched, decoder = Watched(), loaded(path)
    with torch.no_grad():
        for sequence in SEQUENCES.sequences:
            decoder.hidden(torch.tensor([sequence]), context=watched)
    return watched.largest


@pytest.mark.parametrize("name", ["fp8", "int8", "fp8-head", "int8-head"])
def test_the_largest_magnitudes_become_the_largest_codes(quantized: dict[str, Path], name: str) -> None:
    found = loaded(quantized[name]).kv_scales
    assert found is not None
    dtype, _, head = name.partition("-")
    expected = largest(quantized[name]) / LARGEST[dtype]
    if not head:
        expected = expected.amax(-1, keepdim=True).expand(2, 2, KV_HEADS)
    scales = torch.stack([torch.stack(found.keys), torch.stack(found.values)], dim=1)
    torch.testing.assert_close(scales, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("algorithm", ["awq", "smoothquant"])
def test_scales_are_those_of_the_layer_after_folding(model: Path, tmp_path: Path, algorithm: str) -> None:
    scheme = "w8a16-g64" if algorithm == "awq" else "w8a8-int8"
    run(model, tmp_path / "out", "int8-head", algorithm=algorithm, scheme=scheme)
    found = loaded(tmp_path / "out").kv_scales
    assert found is not None
    scales = torch.stack([torch.stack(found.keys), torch.stack(found.values)], dim=1)
    # Activations of 8 bits, which the run does not round, change keys and values a little.
    tolerance = 1e-4 if algorithm == "awq" else 0.1
    torch.testing.assert_close(scales, largest(tmp_path / "out") / 127, rtol=tolerance, atol=0)


def test_what_is_written(quantized: dict[str, Path]) -> None:
    """As vLLM's loader and compressed-tensors expect it."""
    for name, strategy, shape in (("fp8", "tensor", (1,)), ("int8-head", "attn_head", (KV_HEADS, 1, 1))):
        checkpoint = Checkpoint(quantized[name])
        scheme = QuantizationArgs.model_validate(checkpoint.config["quantization_config"]["kv_cache_scheme"])
        assert (scheme.num_bits, scheme.type, scheme.symmetric, scheme.dynamic) == (
            *(8, "float" if name == "fp8" else "int"),
            *(True, False),
        )
        assert scheme.strategy == QuantizationStrategy(strategy)
        for layer in range(2):
            for kind in "kv":
                tensor = checkpoint.tensor(f"model.layers.{layer}.self_attn.{kind}_scale")
                assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.float32)
        assert json.loads((quantized[name] / "warpbus-report.json").read_text())["settings"]["kv_cache"] == name
    plain = Checkpoint(quantized["plain"])
    assert not any(name.endswith("_scale") and "self_attn.k_" in name for name in plain.names() if "proj" not in name)
    assert "kv_cache_scheme" not in plain.config["quantization_config"]


def test_the_same_bytes_whatever_the_number_of_processes(
    model: Path, quantized: dict[str, Path], tmp_path: Path
) -> None:
    run(model, tmp_path / "two", "int8-head", processes=2)
    for file in sorted(quantized["int8-head"].glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


@pytest.mark.parametrize(("name", "tolerance"), [("fp8", 0.2), ("int8", 0.05), ("int8-head", 0.05)])
def test_an_engine_caches_with_the_scales(quantized: dict[str, Path], name: str, tolerance: float) -> None:
    """By default; what it then holds is what an evaluation attends to."""
    decoder = loaded(quantized[name])
    engine, prompt = Engine(decoder, cache_tokens=256), [5, 6, 7, 8, 9, 10, 11, 12, 13]
    scales = decoder.kv_scales
    assert scales is not None
    assert engine.kv_kind == f"{scales.scheme.dtype} with the checkpoint's scales"
    answer = engine.decode([prompt], 8)[0]
    cache = engine._instance.cache
    kept = [block for block in range(cache.count) if cache.committed > block]
    for layer in range(2):
        stored = cache.layers[layer]
        for own, found in zip((scales.keys[layer], scales.values[layer]), stored[2:], strict=True):
            assert found is not None
            written = found[kept][found[kept] != 0].unique()
            assert set(written.tolist()) == set(own.tolist())
    assert len(answer) == 8
    assert Engine(decoder, kv_dtype="unquantized", cache_tokens=256).kv_kind is None
    other = "fp8" if scales.scheme.dtype == "int8" else "int8"
    assert Engine(decoder, kv_dtype=other, cache_tokens=256).kv_kind == other  # of its own scales, per token
    # The forward pass of an evaluation and decoding token by token see the same cache.
    context = CausalAttention()
    context.stored = scales.rounded
    with torch.no_grad():
        logits = decoder(torch.tensor([[*prompt, *answer[:-1]]]), context=context)[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() < tolerance * float(logits.std())


def test_a_plan_counts_on_the_scales(quantized: dict[str, Path]) -> None:
    checkpoint = Checkpoint(quantized["fp8"])
    stored = Stored.of_checkpoint(checkpoint, read_config(checkpoint), torch.float16)
    plans = {name: plan_memory(stored, 10**10, kv_dtype=name) for name in ("auto", "unquantized")}
    assert [plan.kv_dtype for plan in plans.values()] == ["fp8", "unquantized"]


def test_an_evaluation_attends_to_the_rounded_cache(quantized: dict[str, Path]) -> None:
    documents = [Document(list(sequence), [True] * len(sequence)) for sequence in SEQUENCES.sequences]
    plain, fp8, int8 = (loaded(quantized[name]) for name in ("plain", "fp8", "int8-head"))
    found = score({"plain": plain, "fp8": fp8, "int8": int8}, documents)
    assert 0 < found["int8"].divergence < found["fp8"].divergence < 0.01
    fp8.kv_scales = None  # the weights are the same: what differs is the cache
    assert score({"plain": plain, "fp8": fp8}, documents)["fp8"].divergence == 0


def test_each_part_of_a_sharded_model_has_the_scales_of_its_heads(quantized: dict[str, Path]) -> None:
    whole = loaded(quantized["int8-head"]).kv_scales
    assert whole is not None
    config = read_config(Checkpoint(quantized["int8-head"]))
    for rank in range(2):
        part = load_kv_scales(Checkpoint(quantized["int8-head"]), config, Part(config, rank, 2).kv_heads)
        assert part is not None
        assert [each.tolist() for each in part.keys] == [each[rank : rank + 1].tolist() for each in whole.keys]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache": "int4"}, "kv_cache is 'int4': choose from fp8, int8, fp8-head, int8-head"),
        ({"kv_cache": "fp8", "algorithm": "rtn"}, "its scales are calibrated, and rtn has no calibration data"),
        ({"kv_cache": "fp8", "format": "gptq"}, "format gptq holds no scales of a KV cache"),
        ({"kv_cache": "fp8", "scheme": "w4a16-nvfp4"}, "layers in FP4 or trellis codes exclude it"),
    ],
)
def test_what_cannot_be_written_is_refused(model: Path, tmp_path: Path, options: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(UsageError, match=message):
        run(model, tmp_path / "out", **options)
    assert not any(tmp_path.iterdir())


def test_files_that_are_not_right_are_refused(quantized: dict[str, Path], tmp_path: Path) -> None:
    source = Checkpoint(quantized["fp8"])
    name = "model.layers.1.self_attn.v_scale"

    def changed(tensor: torch.Tensor | None, **scheme: object) -> Checkpoint:
        section = source.config["quantization_config"]
        described = section["kv_cache_scheme"] | scheme
        config = source.config | {"quantization_config": section | {"kv_cache_scheme": described}}
        with CheckpointWriter(tmp_path / "changed", overwrite=True) as writer:
            writer.write_json("config.json", config)
            for each in source.names():
                if each != name:
                    writer.add(each, source.tensor(each))
            if tensor is not None:
                writer.add(name, tensor)
            writer.finish()
        return Checkpoint(tmp_path / "changed")

    for tensor, message in (
        (None, f"{name}: missing, although config.json announces"),
        (torch.ones(3), f"{name}: expected 1 floating point scales"),
        (torch.ones(1, dtype=torch.int32), f"{name}: expected 1 floating point scales"),
        (torch.zeros(1), f"{name}: expected positive, finite scales"),
        (torch.tensor([float("nan")]), f"{name}: expected positive, finite scales"),
        (torch.tensor([float("inf")]), f"{name}: expected positive, finite scales"),
    ):
        with pytest.raises(TensorError, match=message):
            load_model(changed(tensor), device="cpu", dtype=torch.float32)
    right = torch.tensor([0.01], dtype=torch.bfloat16)
    scales = load_model(changed(right), device="cpu", dtype=torch.float32).kv_scales
    assert scales is not None
    assert scales.values[1].tolist() == right.float().expand(KV_HEADS).tolist()
    for scheme, message in (
        ({"dynamic": True}, r"kv_cache_scheme\.dynamic is True, expected False"),
        ({"num_bits": 4}, r"kv_cache_scheme\.num_bits is 4, expected 8"),
        ({"symmetric": False}, r"kv_cache_scheme\.symmetric is False, expected True"),
        ({"strategy": "channel"}, r"kv_cache_scheme\.strategy is 'channel', expected 'tensor' or 'attn_head'"),
        ({"group_size": 16}, r"kv_cache_scheme\.group_size is 16, expected absent"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_model(changed(right, **scheme), device="cpu", dtype=torch.float32)
    changed(right)
    for target in ("gptq", "bfloat16", "gguf"):
        with pytest.raises(UsageError, match=f"has scales of a KV cache, which --to {target} has no place for"):
            convert(tmp_path / "changed", tmp_path / "out", to=target)
