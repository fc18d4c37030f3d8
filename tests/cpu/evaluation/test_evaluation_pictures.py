"""Pictures of quantizations and of training runs."""

import json
import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from quantization_reports import gpu_report, make_report, mixed

from warpbus.errors import StorageError
from warpbus.evaluation import pictures
from warpbus.evaluation.curve import draw_curve, draw_training


@pytest.mark.parametrize("report", [make_report(model="models/诗人 $\\frac$"), gpu_report(), mixed()])
def test_picture(report, tmp_path):
    path = tmp_path / "new" / "errors.png"
    pictures.draw(report, path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 800
    assert height > 400


def test_a_picture_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"file.errors\.png"):
        pictures.draw(make_report(), tmp_path / "file" / "errors.png")


def test_a_curve_of_one_step(tmp_path: Path) -> None:
    draw_curve([{"step": 1, "loss": 2.0, "learning_rate": 0.1}], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_shows_every_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr("warpbus.evaluation.curve.save", lambda figure, path: drawn.append(figure))
    log = [{"step": step, "loss": 2.0, "learning_rate": 0.1, "valid_loss": 1.0 + step} for step in range(1, 6)]
    draw_curve([{"step": 0, "loss": 50.0, "learning_rate": 0.1}, *log], tmp_path / "a.png")
    low, high = drawn[0].axes[0].get_ylim()
    assert low < 2.0
    assert high > 6.0
    draw_curve([{**entry, "loss": 2.0 - 0.1 * entry["step"]} for entry in log], tmp_path / "a.png")
    assert drawn[1].axes[0].get_ylim()[0] < 1.5


def test_the_curve_of_a_finished_run_lies_in_its_directory(tmp_path: Path) -> None:
    log = [{"step": step, "loss": 2.0 - 0.1 * step, "learning_rate": 0.1} for step in range(3)]
    (tmp_path / "training-log.json").write_text(json.dumps(log))
    assert draw_training(tmp_path) == tmp_path / "training.png"
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
