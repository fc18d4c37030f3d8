"""A quantization of which a process is stopped: it is named and given up after a while, and Ctrl-C ends the run."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from quantization_models import write_model

from warpbus.dist import ProcessStalledError, watchdog
from warpbus.errors import UsageError
from warpbus.quantization import Calibration, Progress, quantize

DATA = Calibration(tuple(tuple((7 * i + 3 * j) % 400 for j in range(9)) for i in range(16)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "tiny", num_hidden_layers=4)


def stop_one(more: Callable[[], None] = lambda: None) -> Progress:
    """Stops one of the two processes once the first matrix is done."""
    others = set(psutil.Process().children())

    def stop(done: int, total: int, result: object) -> None:
        if done == 1:
            own = {child for child in psutil.Process().children() if "warpbus.dist" in " ".join(child.cmdline())}
            max(own - others, key=lambda child: (child.create_time(), child.pid)).suspend()
            more()

    return Progress(matrix=stop)


def run(model: Path, output: Path, progress: Progress, **options: float) -> None:
    quantize(
        *(model, output),
        scheme="w3a16-g32-asym",
        calibration=DATA,
        device="cpu",
        processes=2,
        progress=progress,
        **options,
    )


def test_a_stopped_process_is_given_up(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SHORTEST_LIMIT", 4.0)
    with pytest.raises(
        ProcessStalledError, match=r"^process 1 on cpu has sent no heartbeat for \d+ s, and was killed: check"
    ):
        run(model, tmp_path / "out", stop_one(), rank_timeout=12.0)
    assert not (tmp_path / "out").exists()


def test_a_timeout_that_is_too_short(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^rank_timeout is 3 s: give 10 or more, or inf for no limit$"):
        run(model, tmp_path / "out", Progress(), rank_timeout=3.0)


def test_ctrl_c_ends_a_run_that_stands_still(model: Path, tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out", stop_one(lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert {child for child in psutil.Process().children() if child not in before} == set()
