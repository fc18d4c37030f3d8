"""ChatGLM-6B quantized: its own residual, its prompts, its rows in the file; and what cannot be done with it."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_configs import with_traits
from torch import Tensor

from warpbus.errors import UsageError
from warpbus.formats import Checkpoint, FinishedParts, format_named
from warpbus.models import SHAPES, Decoder, load_model
from warpbus.models.layers import QuantizedLinear
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.models.row_order import in_decoder_order
from warpbus.qtensor import Scheme
from warpbus.quantization import Calibration, Progress, quantize
from warpbus.quantization.algorithms import rtn
from warpbus.quantization.layerwise import LayerQuantization
from warpbus.quantization.mixed import mixed_schemes
from warpbus.quantization.options import QuantizationOptions
from warpbus.quantization.states import embed
from warpbus.quantization.statistics import ALONE, MOMENTS
from warpbus.quantization.stopwatch import Stopwatch
from warpbus.quantization.trials import try_candidates

SOP = 90
SHAPE = with_traits(
    SHAPES["chatglm-6b"],
    vocab_size=97,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_size=96,
    rope=replace(SHAPES["chatglm-6b"].rope, rotary_dim=8),
    max_context=64,
    stop_ids=(91,),
    normed_residual=56**0.5,
    prompt_end=SOP,
)
ON_CPU = QuantizationOptions(device="cpu")
SEQUENCES = Calibration(
    tuple(
        tuple(SOP if j == 3 + i % 4 and i % 5 else (7 * i + 3 * j) % SOP for j in range(8 + i % 9)) for i in range(30)
    )
)
TOKENS = torch.tensor([[*range(2, 9), SOP, *range(20, 30)], [*range(40, 43), SOP, *range(60, 74)]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "chatglm"
    write_random_checkpoint(directory, SHAPE, torch.float32, device="cpu")
    return directory


def load(directory: Path) -> Decoder:
    return load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)


@torch.no_grad()
def hidden(directory: Path) -> Tensor:
    return load(directory).hidden(TOKENS)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def run(model: Path, output: Path, algorithm: str, **options: Any) -> Any:
    settings = {"scheme": "w4a16-g32", "calibration": SEQUENCES, "device": "cpu"}
    return quantize(model, output, algorithm=algorithm, **{**settings, **options})


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("gptq", {}),
        ("gptq", {"format": "gptq"}),
        ("rtn", {"format": "awq"}),
        ("rtn", {"scheme": "w8a8-int8"}),
    ],
)
def test_a_whole_model(tmp_path: Path, model: Path, algorithm: str, options: dict[str, Any]) -> None:
    report = run(model, tmp_path / "out", algorithm, **options)
    names = [matrix.name for matrix in SHAPE.layers[0].matrices]
    assert [row.linear for row in report.layers] == names * 2
    assert report.linears == tuple(names)
    loaded, plain = load(tmp_path / "out"), load(model)
    for layer, before in zip(loaded.layers, plain.layers, strict=True):
        for linear in names:
            found, weight = layer.get_submodule(linear), before.get_submodule(linear).weight
            assert isinstance(found, QuantizedLinear)
            # Rows that were at another place would be as far off as random ones are: 1.4.
            assert distance(found.weight.dequantize(torch.float32), weight) < 0.3
            assert torch.equal(found.bias, before.get_submodule(linear).bias)
    assert distance(hidden(tmp_path / "out"), hidden(model)) < 0.3


def test_rows_are_written_where_the_file_has_them(tmp_path: Path, model: Path) -> None:
    """GPTQ with no drift to make up for at the first matrix: the file's rows, each near its own."""
    run(model, tmp_path / "out", "gptq", scheme="w8a16")
    name = "transformer.layers.0.attention.query_key_value"
    before, after = Checkpoint(model), Checkpoint(tmp_path / "out")
    written = format_named("compressed-tensors").from_tensors(after, name, Scheme.parse("w8a16"))
    file = before.tensor(f"{name}.weight")
    assert distance(written.dequantize(torch.float32), file) < 0.02
    assert distance(in_decoder_order(SHAPE, "attention.qkv.weight", file), file) > 1


def test_rounding_to_nearest_is_that_of_the_files_rows(tmp_path: Path, model: Path) -> None:
    run(model, tmp_path / "out", "rtn")
    weight = load(model).layers[1].attention.qkv.weight.data
    rounded = rtn(weight, Scheme.parse("w4a16-g32"), scale_dtype=torch.float32, name="qkv")
    assert torch.equal(load(tmp_path / "out").layers[1].attention.qkv.weight.codes(), rounded.codes())


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "out"

    def stop(done: int, total: int, result: Any) -> None:
        end = time.monotonic() + 60
        while done > 4:
            if FinishedParts(output).facts("layer-00000") is not None:
                raise KeyboardInterrupt
            assert time.monotonic() < end
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        run(model, output, "gptq", progress=Progress(matrix=stop))
    assert run(model, output, "gptq").resumed_layers == 1
    run(model, tmp_path / "whole", "gptq")
    files = {
        directory: {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "warpbus-report.json"}
        for directory in (output, tmp_path / "whole")
    }
    assert files[output] == files[tmp_path / "whole"]


@torch.no_grad()
def test_prompts_are_read_in_both_directions_while_calibrating(model: Path) -> None:
    decoder = load(model)
    states = embed(SEQUENCES, 64, decoder.embedding.weight.data, SHAPE, ALONE, torch.float32, drift=False)
    for index, layer in enumerate(decoder.layers):
        through = LayerQuantization(
            layer, index, states, frozenset({MOMENTS}), group=ALONE, watch=Stopwatch(ALONE.device)
        )
        through.visit(lambda linear, statistics: None)
    for batch, state in zip(SEQUENCES.batches(64), states, strict=True):
        expected = decoder.hidden(batch.ids)
        assert distance(decoder.final_norm(state.x)[batch.real], expected[batch.real]) < 1e-5


@pytest.mark.parametrize(("algorithm", "scheme"), [("awq", "w4a16-g32"), ("smoothquant", "w8a8-int8")])
def test_what_folds_is_refused(tmp_path: Path, model: Path, algorithm: str, scheme: str) -> None:
    with pytest.raises(UsageError, match=rf"^{algorithm} moves factors .* \(chatglm\) do not allow: use gptq, or rtn$"):
        run(model, tmp_path / "out", algorithm, scheme=scheme)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match=f"no way to quantize to {scheme} by {algorithm}"):
        try_candidates(model, calibration=SEQUENCES, scheme=Scheme.parse(scheme), algorithm=algorithm, options=ON_CPU)


def test_what_is_recommended_is_what_can_be_done(model: Path) -> None:
    found = try_candidates(model, calibration=SEQUENCES, scheme=Scheme.parse("w4a16-g32"), options=ON_CPU)
    assert [trial.algorithm for trial in found.trials] == ["gptq", "rtn"]
    assert all(0 < trial.error < 0.5 for trial in found.trials)


def test_mixed_schemes(tmp_path: Path, model: Path) -> None:
    schemes = mixed_schemes(model, 5.8, calibration=SEQUENCES, options=ON_CPU)
    assert len(schemes.distinct()) > 1
    run(model, tmp_path / "out", "rtn", scheme=schemes)
    assert distance(hidden(tmp_path / "out"), hidden(model)) < 0.5
