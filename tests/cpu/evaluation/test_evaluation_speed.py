"""Speed and memory, measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from warpbus.errors import WarpbusError
from warpbus.evaluation import speed
from warpbus.evaluation.speed import Speed, measure_speed


def test_speed_of_a_tiny_model(tiny_model: Path) -> None:
    found = measure_speed(tiny_model, device="cpu", tokens=8)
    assert found.device == "cpu"
    assert 5 < found.tokens_per_second < 1e5
    assert 50e6 < found.peak_bytes < 4e9


def test_the_peak_is_not_that_of_the_process_that_asks(tmp_path: Path) -> None:
    """What getrusage calls the maximum survives exec; a child must not report its parent's memory."""
    code = (
        "import subprocess, sys; held = b'x' * 600_000_000; "
        "print(subprocess.check_output([sys.executable, '-c', "
        "'from warpbus.evaluation.speed import _peak_resident_bytes as peak; print(peak())'], text=True))"
    )
    plain = "from warpbus.evaluation.speed import _peak_resident_bytes as peak; print(peak())"
    within, alone = (
        int(subprocess.run([sys.executable, "-c", each], capture_output=True, text=True, check=True).stdout)
        for each in (code, plain)
    )
    assert within == pytest.approx(alone, rel=0.2)


def test_a_failure_says_what_the_process_said(tmp_path: Path) -> None:
    with pytest.raises(WarpbusError, match=r"the speed could not be measured: .*there is no such directory") as raised:
        measure_speed(tmp_path / "none", device="cpu")
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "none"))


def test_a_process_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, -9, "", "")

    monkeypatch.setattr(subprocess, "run", killed)
    with pytest.raises(WarpbusError, match="signal 9, it said nothing"):
        measure_speed(tmp_path)


def test_every_token_counts_but_the_first(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No stop token ends the run early, and the rate is that of the tokens in the measured time."""
    seen = []
    generate = speed.LLM.generate

    def watched(llm: speed.LLM, prompts: object, params: object) -> object:
        found = generate(llm, prompts, params)
        seen.append(found[0])
        return found

    monkeypatch.setattr(speed.LLM, "generate", watched)
    monkeypatch.setattr(sys, "argv", ["speed", str(tiny_model), "cpu", "auto", "12"])
    speed.main()
    found = Speed(**json.loads(capsys.readouterr().out))
    assert 4 <= len(seen) <= 21
    assert {len(completion.token_ids) for completion in seen} == {12}
    rates = [11 / completion.decode_seconds for completion in seen[1:]]
    assert (found.tokens_per_second, found.slowest) == pytest.approx((max(rates), min(rates)))
