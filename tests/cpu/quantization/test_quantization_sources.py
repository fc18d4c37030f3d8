"""A run that resumes notices weights that have changed, however quietly, and NaN is refused wherever it is."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from quantization_models import write_model

from warpbus.errors import NumericError, UsageError
from warpbus.formats import Checkpoint, FinishedParts
from warpbus.formats.safetensors_io import read_header, write_file
from warpbus.quantization import Calibration, Progress, Report, quantize
from warpbus.quantization.sources import check_finite

LAYERS = 3
SEQUENCES = Calibration(tuple(tuple((7 * i + 3 * j) % 400 for j in range(24)) for i in range(16)))
FIRST = "model.layers.0.mlp.down_proj.weight"
MIDDLE = "model.layers.1.self_attn.o_proj.weight"
LAST = "model.layers.2.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    return write_model(tmp_path / "model", dtype=torch.bfloat16, **sizes)


def run(model: Path, output: Path, algorithm: str, **options: Any) -> Report:
    return quantize(
        model, output, algorithm=algorithm, scheme="w4a16-g32", calibration=SEQUENCES, device="cpu", **options
    )


def interrupted(model: Path, output: Path, algorithm: str) -> None:
    """A run that ends after two layers are on the disk."""

    class End(BaseException):
        pass

    def stop(done: int, total: int, result: Any) -> None:
        if result.layer == 2:
            raise End

    with pytest.raises(End):
        run(model, output, algorithm, progress=Progress(matrix=stop))
    layers = [part for part in FinishedParts(output).parts() if part.startswith("layer")]
    assert layers == ["layer-00000", "layer-00001"]


def write(model: Path, name: str, value: float) -> None:
    """Change the last number of a tensor, and neither size nor times of its file."""
    entry = read_header(model / "model.safetensors")[name]
    before = entry.file.path.stat()
    with entry.file.path.open("r+b") as stream:
        stream.seek(entry.offset + entry.nbytes - entry.dtype.itemsize)
        stream.write(bytes(torch.tensor([value], dtype=entry.dtype).view(torch.uint8).tolist()))
    os.utime(entry.file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = entry.file.path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "warpbus-report.json"}


@pytest.mark.parametrize("algorithm", ["gptq", "rtn"])
@pytest.mark.parametrize("name", [FIRST, MIDDLE, EMBEDDING, "model.layers.0.input_layernorm.weight", "lm_head.weight"])
def test_quietly_changed_weights_are_noticed(tmp_path: Path, model: Path, algorithm: str, name: str) -> None:
    output = tmp_path / "out"
    interrupted(model, output, algorithm)
    kept = FinishedParts(output).parts()
    write(model, name, 0.75)
    with pytest.raises(UsageError, match=f"tensor {name} has changed since .* restart=True"):
        run(model, output, algorithm)
    assert FinishedParts(output).parts() == kept
    report = run(model, output, algorithm, restart=True)
    assert report.resumed_layers == 0
    run(model, tmp_path / "fresh", algorithm)
    assert files(output) == files(tmp_path / "fresh")


def test_weights_that_no_finished_layer_has_read_may_change(tmp_path: Path, model: Path) -> None:
    """What comes of it is what a fresh run gives."""
    interrupted(model, tmp_path / "out", "gptq")
    write(model, LAST, 0.75)
    assert run(model, tmp_path / "out", "gptq").resumed_layers == 2
    run(model, tmp_path / "fresh", "gptq")
    assert files(tmp_path / "out") == files(tmp_path / "fresh")


def test_a_layer_that_was_lost_may_not_change_below_one_that_was_not(tmp_path: Path, model: Path) -> None:
    """The second layer was calibrated on what the first one was then."""
    interrupted(model, tmp_path / "out", "gptq")
    (tmp_path / "out.quantization" / "layer-00000.json").unlink()
    write(model, FIRST, 0.75)
    with pytest.raises(UsageError, match="a tensor that layer-00001 depends on has changed"):
        run(model, tmp_path / "out", "gptq")


def test_other_times_of_the_files_change_nothing(tmp_path: Path, model: Path) -> None:
    interrupted(model, tmp_path / "out", "gptq")
    for file in model.iterdir():
        os.utime(file, (1, 1))
    reported: list[tuple[int, int]] = []
    report = run(model, tmp_path / "out", "gptq", progress=Progress(checked=lambda *call: reported.append(call)))
    assert report.resumed_layers == 2
    done, total = zip(*reported, strict=True)
    assert list(done) == sorted(done)
    assert set(total) == {done[-1]}
    checkpoint = Checkpoint(model)
    unread = [name for name in checkpoint.names() if name.startswith("model.layers.2.")]
    assert done[-1] == checkpoint.total_bytes - sum(map(checkpoint.nbytes, unread))


@pytest.mark.parametrize("algorithm", ["gptq", "rtn"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.norm.weight", float("nan")),
        (EMBEDDING, float("-inf")),
        ("lm_head.weight", float("nan")),
        ("model.layers.0.input_layernorm.weight", float("inf")),
    ],
)
def test_nan_and_infinity_are_refused_by_name(
    tmp_path: Path, model: Path, algorithm: str, name: str, value: float
) -> None:
    write(model, name, value)
    with pytest.raises(NumericError, match=f"{name}: NaN or infinity among its numbers"):
        run(model, tmp_path / "out", algorithm)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # nothing useless is left


def test_numbers_whose_sum_overflows_are_finite(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    large = torch.full((4,), 3e38, dtype=torch.bfloat16)
    write_file(file, {"large": large, "ids": torch.arange(3), "infinite": torch.tensor([1.0, float("inf")])})
    checkpoint = Checkpoint.of_tensors(tmp_path, read_header(file))
    check_finite(checkpoint, ["large", "ids"])
    with pytest.raises(NumericError, match="infinite: NaN or infinity"):
        check_finite(checkpoint, ["infinite"])
