"""`warpbus bench story`: comparisons, costs, the page, and a run that is interrupted and goes on."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from warpbus.bench.records import read
from warpbus.cli import app
from warpbus.errors import DataError, UsageError
from warpbus.evaluation import Speed
from warpbus.figures.theme import style
from warpbus.story import measure, report
from warpbus.story.measure import Work, tell
from warpbus.story.options import StoryOptions
from warpbus.story.rows import (
    CPU,
    GENERATE,
    GPTQ4,
    GPU,
    ORIGINAL,
    QUANTIZE,
    RTN4,
    RTN8,
    TRAIN,
    Quality,
    Story,
    StoryRow,
)

QUALITY = {
    ORIGINAL: Quality(20.0, 0.0, 1.0, 1234, 12_000_000_000, "bfloat16"),
    RTN4: Quality(21.0, 0.05, 0.9, 1234, 4_000_000_000, "w4a16-g128"),
    GPTQ4: Quality(20.4, 0.02, 0.93, 1234, 4_000_000_000, "w4a16-g128"),
}
ROWS = (
    StoryRow(QUANTIZE, GPU, 1, RTN4, 1 / 2, 900.0, 6_000_000_000, "4.20%"),
    StoryRow(QUANTIZE, GPU, 1, GPTQ4, 1 / 26, 13_000.0, 8_000_000_000, "3.10%"),
    StoryRow(QUANTIZE, GPU, 2, GPTQ4, 1 / 16, 15_000.0, 8_000_000_000, "3.10%"),
    StoryRow(GENERATE, CPU, 1, ORIGINAL, 2.0, None, 26_000_000_000),
    StoryRow(GENERATE, GPU, 1, ORIGINAL, 200.0, 2.0, 14_000_000_000),
    StoryRow(GENERATE, GPU, 1, GPTQ4, 600.0, 0.7, 5_000_000_000),
    StoryRow(TRAIN, GPU, 1, "full", 8_000.0, 0.05, 70_000_000_000, "6,000 M"),
    StoryRow(TRAIN, GPU, 1, "lora", 16_000.0, 0.03, 20_000_000_000, "4 M"),
    StoryRow(TRAIN, GPU, 2, "lora", 30_000.0, 0.03, 20_000_000_000, "4 M"),
)
STORY = Story(
    model="glm",
    rows=ROWS,
    quality=QUALITY,
    prices={CPU: 0.36, GPU: 3.6},
    machine="2 x NVIDIA H100, AMD EPYC",
    date="2026-01-31T12:00:00Z",
    command="warpbus bench story glm",
    data="texts.jsonl",
    missing=("not measured: train full CPU 1: too large",),
)


def shown(story: Story, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(report.table(story))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_sentences_compare_devices_bits_numbers_of_gpus_and_methods() -> None:
    assert STORY.findings() == [
        "The GPU generates 100 times as fast as the CPU (16 bits)",
        "4 bits (GPTQ) on the GPU: 3.00 times as fast as 16 bits, 3.00 times smaller, perplexity +2.00%",
        "To quantize to 4 bits, GPTQ takes 13.0 times as long as RTN: perplexity +2.00% instead of +5.00%",
        "2 GPUs quantize 1.62 times as fast as 1",
        "2 GPUs train 1.88 times as fast as 1",
        "LoRA trains 2.00 times as fast as full fine-tuning on the GPU",
    ]
    unknown = replace(STORY, rows=ROWS[3:4], quality={})
    assert unknown.findings() == []


def test_costs_follow_from_time_price_and_number_of_gpus() -> None:
    assert ROWS[1].cost(STORY.prices) == pytest.approx(26 / 1000)
    assert ROWS[2].cost(STORY.prices) == pytest.approx(2 * 16 / 1000)
    assert ROWS[3].cost(STORY.prices) == pytest.approx(0.36 / 3600 * 1e6 / 2)
    assert ROWS[8].cost(STORY.prices) == pytest.approx(2 * 3.6 / 3600 * 1e6 / 30_000)


def test_the_terminal_shows_every_figure_and_what_is_missing() -> None:
    text = shown(STORY)
    assert max(map(len, text.splitlines())) <= 80
    for expected in ("2 GPUs", "16 bits", "not measured", "100x", "2,000", "+2.00%", "0.0200", "93.0%", "50.00"):
        assert expected in text
    assert "3.6 dollars per GPU-hour and 0.36 per hour of this machine" in " ".join(text.split())
    assert "too large" in text
    assert "parameters" in text  # not broken within the word
    on_cpu = replace(STORY, rows=ROWS[3:4], missing=("This run used no GPU",))
    assert "J/1,000" not in shown(on_cpu)
    stored = {**QUALITY, ORIGINAL: replace(QUALITY[ORIGINAL], scheme="float32")}
    assert "32 bits" in shown(replace(on_cpu, quality=stored))
    assert "16 bits" not in shown(replace(on_cpu, quality=stored)).replace("weights of 16 bits", "")


def test_the_picture_has_a_block_per_task() -> None:
    with style():
        drawn = report.figure(STORY)
        titles = [axis.get_title(loc="left").replace("\\", "") for axis in drawn.axes]
    assert titles == [
        *("generation (tokens/s)", "energy (J/1,000 tokens)", "cost ($/1M tokens)", "size on disk (MB)", "perplexity"),
        *("training (tokens/s)", "energy (J/1,000 tokens)", "cost ($/1M tokens)", "memory (MB)"),
        *("quantization (s)", "energy (J)", "cost ($)", "memory (MB)"),
    ]
    assert [label.get_text() for label in drawn.axes[0].get_yticklabels()] == [
        *("CPU, 16 bits", "GPU, 16 bits", "GPU, 4 bits (GPTQ)")
    ]
    assert "not measured" in {text.get_text() for text in drawn.axes[1].texts}


def test_the_page_has_both_languages(tmp_path: Path) -> None:
    report.write_page(STORY, tmp_path / "a.html")
    english, chinese = (tmp_path / "a.html").read_text(encoding="utf-8").split("<article")[1:]
    assert "The GPU generates 100 times as fast as the CPU (16 bits)" in english
    assert "GPU 的生成速度是 CPU 的 100 倍（16 比特）" in chinese
    assert "GPU 上的 4 比特（GPTQ）：速度是 16 比特的 3.00 倍" in chinese
    assert "1,234" in english
    report.write_page(replace(STORY, quality={}, rows=ROWS[3:4]), tmp_path / "b.html")


def test_records_are_those_of_a_benchmark(tmp_path: Path) -> None:
    found = report.records(STORY)
    assert {record.device for record in found} == {"NVIDIA H100"}
    values = {(each.metric, each.case["task"], each.case["form"], each.case.get("place")): each for each in found}
    assert values["speed", GENERATE, GPTQ4, GPU].ratio == pytest.approx(300)
    assert values["energy", TRAIN, "lora", GPU].unit == "J/1000 tokens"
    assert values["perplexity", "perplexity", GPTQ4, None].case["kl"] == 0.02
    assert ("energy", GENERATE, ORIGINAL, CPU) not in values


def test_quantizations_are_compared_only_with_the_same_scheme_and_algorithm() -> None:
    times = [each for each in report.records(STORY) if each.case["task"] == QUANTIZE and each.metric == "time"]
    assert [each.ratio for each in times] == pytest.approx([1, 1, 26 / 16])
    assert [each.peer.name for each in times] == [f"warpbus, GPU, {form}" for form in (RTN4, GPTQ4, GPTQ4)]
    lines = [line for line in shown(STORY, width=110).splitlines() if "RTN" in line or "GPTQ" in line]
    assert any("4 bits (RTN)" in line and "4.20%" in line for line in lines)
    assert sum("4 bits (GPTQ)" in line and "3.10%" in line for line in lines) == 2
    one = replace(STORY, rows=ROWS[:2])
    assert "1.00x" not in shown(one)


MakeModel = WriteLines = Callable[..., Path]


@pytest.fixture
def work(make_model: MakeModel, write_lines: WriteLines, tmp_path: Path) -> Work:
    model = make_model(tmp_path / "model", hidden_size=128, intermediate_size=128)
    data = write_lines(tmp_path / "data.jsonl", *({"text": "床前明月光，疑是地上霜。" * 4} for _ in range(3)))
    options = StoryOptions(samples=2, documents=3, tokens=4)
    return Work("model", model, tmp_path / "out", data, data, torch.device("cpu"), options, "warpbus bench story model")


def run(work: Work, *more: str) -> tuple[int, str, str]:
    words = ["bench", "story", str(work.model), "--output", str(work.directory), "--data", str(work.data)]
    words += ["--calibration", str(work.data), "--samples", "2", "--documents", "3", "--tokens", "4", *more]
    found = CliRunner().invoke(app, words, env={"COLUMNS": "100"})
    return found.exit_code, found.stdout, found.stderr


def test_an_interrupted_run_goes_on_and_a_finished_one_measures_nothing(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:

        def interrupted(*_: object, **__: object) -> Speed:
            raise KeyboardInterrupt

        patched.setattr(measure, "measure_speed", interrupted)
        code, _, said = run(work)
        assert code == 130
        assert "3 finished parts kept in" in " ".join(said.split())

    with monkeypatch.context() as patched:
        patched.setattr(measure, "quantize", lambda *_, **__: pytest.fail("was quantized already"))
        patched.setattr(measure, "measure_speed", lambda path, **_: Speed(9.0, 10**8, "cpu"))
        code, shown_text, _ = run(work)
        assert code == 0
    for expected in ("generation", "quality", "training", "quantization", "32 bits", "(GPTQ)", "LoRA", "no GPU"):
        assert expected in shown_text
    for name in ("story.html", "story.png", "story-cpu.json"):
        assert (work.directory / name).stat().st_size > 3000
    first = read(work.directory / "story-cpu.json")
    assert {each.case["task"] for each in first} == {GENERATE, TRAIN, QUANTIZE, "perplexity"}
    assert {each.metric for each in first} == {"speed", "time", "cost", "memory", "perplexity"}

    for name in ("quantize", "measure_speed", "Processes", "evaluate"):
        monkeypatch.setattr(measure, name, lambda *_, **__: pytest.fail("was measured already"))
    code, printed, _ = run(work, "--json", "--price", "4")
    assert code == 0
    again = json.loads(printed)
    assert [each["ours"] for each in again] == [each.ours for each in first]


def test_what_cannot_be_measured_is_noted_and_the_rest_goes_on(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Speed:
        raise DataError("no room")

    monkeypatch.setattr(measure, "measure_speed", full)
    monkeypatch.setattr(measure, "_TRAINED_ON_CPU", 1)
    reported = tell(work)
    assert {row.task for row in reported.rows} == {QUANTIZE}
    assert "not measured: generate 4 bits (GPTQ) CPU: no room" in reported.missing
    assert any("a CPU takes minutes for a step" in each for each in reported.missing)
    assert set(reported.quality) == {ORIGINAL, RTN8, RTN4, GPTQ4}
    assert reported.quality[GPTQ4].divergence > 0


def test_mistakes(work: Work) -> None:
    with pytest.raises(UsageError, match="--gpus: this runs on the CPU"):
        tell(replace(work, options=replace(work.options, counts=(1, 2))))
    with pytest.raises(DataError, match="no such file"):
        tell(replace(work, data=work.data.with_name("none.jsonl")))
    work.directory.mkdir()
    (work.directory / measure.KEPT).write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"is damaged .* --restart"):
        tell(work)
