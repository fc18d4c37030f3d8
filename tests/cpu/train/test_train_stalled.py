"""A run of which a process is stopped: it is named, given up after a while, and a signal ends the run at once."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from warpbus.dist import ProcessStalledError, watchdog
from warpbus.errors import UsageError
from warpbus.train import Stopped, TrainingProgress, TrainingSettings, train

SETTINGS = TrainingSettings(
    steps=1000, length=32, rows_per_step=4, rows_at_once=4, learning_rate=5e-3, warmup=2, save_every=2
)


@pytest.fixture
def data(tmp_path: Path, write_lines: Callable[..., Path]) -> Path:
    return write_lines(tmp_path / "data.jsonl", *({"text": f"床前明月光{index}"} for index in range(24)))


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SHORTEST_LIMIT", 4.0)


def stop_one_after(step: int, more: Callable[[], None] = lambda: None) -> Callable[[TrainingProgress], None]:
    """Stops one of the two processes of a run once it is so far."""
    others = set(psutil.Process().children())

    def report(progress: TrainingProgress) -> None:
        if progress.step == step:
            own = {child for child in psutil.Process().children() if "warpbus.dist" in " ".join(child.cmdline())}
            max(own - others, key=lambda child: (child.create_time(), child.pid)).suspend()
            more()

    return report


def test_a_stopped_process_is_given_up(
    blank_model: Path, tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = stop_one_after(3)
    with pytest.raises(
        ProcessStalledError, match=r"^process 1 on cpu has sent no heartbeat for \d+ s, and was killed: check"
    ):
        train(
            *(blank_model, tmp_path / "out"),
            data=data,
            settings=SETTINGS,
            device="cpu",
            processes=2,
            rank_timeout=12.0,
            report=report,
        )
    assert re.search(r"process 1 on cpu has sent no heartbeat for \d+ s: it is killed after 12 s", caplog.text)
    assert (tmp_path / "out.training" / "state.pt").exists()


def test_the_first_signal_ends_a_run_that_stands_still(blank_model: Path, tmp_path: Path, data: Path) -> None:
    report = stop_one_after(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Stopped, match=r"^stopped by SIGINT: the last checkpoint is .*state\.pt$") as raised:
        train(*(blank_model, tmp_path / "out"), data=data, settings=SETTINGS, device="cpu", processes=2, report=report)
    assert raised.value.signal == signal.SIGINT
    assert raised.value.step is None


def test_a_timeout_that_is_too_short(blank_model: Path, tmp_path: Path, data: Path) -> None:
    with pytest.raises(UsageError, match=r"^rank_timeout is 3 s: give 4 or more"):
        train(blank_model, tmp_path / "out", data=data, settings=SETTINGS, device="cpu", rank_timeout=3.0)
