"""The verdict on a quantization: before and after, as JSON, table, picture and page."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console

from warpbus.errors import DataError, DeviceError, QualityError
from warpbus.evaluation import Evaluation, Speed, Verdict, check_data, judge
from warpbus.quantization import LayerResult, Report, quantize
from warpbus.quantization.report import TuningResult

LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")

WriteLines = MakeModel = Callable[..., Path]
HOSTILE = "<script>alert(1)</script>[/bold] $\\frac$ 诗人"

BEFORE = Evaluation(
    name="original",
    model="/models/glm",
    scheme="bfloat16",
    perplexity=20.0,
    divergence=0.0,
    agreement=1.0,
    accuracy=0.75,
    tokens=12_345,
    disk_bytes=12_487_000_000,
    weight_bytes=12_500_000_000,
    tokens_per_second=223.0,
    peak_bytes=13_000_000_000,
)
AFTER = replace(
    BEFORE,
    name="quantized",
    scheme="w4a16-g128",
    perplexity=20.5,
    divergence=0.01234,
    agreement=0.934,
    accuracy=0.73,
    disk_bytes=3_900_000_000,
    weight_bytes=3_950_000_000,
    tokens_per_second=609.0,
    peak_bytes=4_710_000_000,
)
DONE = Report(
    model="/models/glm",
    output="/models/glm-w4",
    scheme="w4a16-g128",
    algorithm="gptq",
    settings={"samples": 128},
    calibration_tokens=262_144,
    device="cuda:0",
    layers=tuple(
        LayerResult(layer, linear, "w8a16" if (layer, index) == (1, 3) else "w4a16-g128", 0.01 * (index + 1), 0.5)
        for layer in range(2)
        for index, linear in enumerate(LINEARS)
    ),
    bytes_before=12_487_000_000,
    bytes_after=3_900_000_000,
    resumed_layers=0,
    seconds=14.2,
    peak_memory=8_000_000_000,
    peak_gpu_memory=7_000_000_000,
    devices=("NVIDIA H200",) * 4,
    stages={"reading": 2.0, "forward": 6.0},
    gpu_seconds=56.8,
    energy_joules=36_000.0,
)
VERDICT = Verdict(BEFORE, AFTER, DONE.priced(gpu_hour=3.6, kwh=0.5))


def shown(verdict: Verdict, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(verdict.table())
    return console.file.getvalue()  # type: ignore[attr-defined]


class Page(HTMLParser):
    """Reads a page: the cells of its tables, what it refers to, and whether each element is closed in order."""

    VOID = ("meta", "source", "img", "br", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "srcset", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.fixture
def data(tmp_path: Path, write_lines: WriteLines) -> Path:
    turns = [{"role": "user", "content": "写诗"}, {"role": "assistant", "content": "床前明月光，疑是地上霜。"}]
    return write_lines(tmp_path / "data.jsonl", {"messages": turns}, {"text": "举头望明月，低头思故乡。" * 4})


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_has_everything(width: int) -> None:
    text = shown(VERDICT, width)
    for expected in (
        "20.000",
        "20.500",
        "+2.50%",
        "0.0123",
        "93.4%",
        "75.0%",
        "73.0%",
        "-2.0 points",
        "3.20 x smaller",
    ):
        assert expected in text
    for expected in ("12.5 GB", "3.9 GB", "223", "609", "2.73 x faster", "14.2", "4 x NVIDIA H200", "56.8", "10.00 Wh"):
        assert expected in text
    assert "4.00%" in text
    assert "layers.0.mlp.down" in text
    assert "about 0.062" in text  # 56.8 / 3600 * 3.6 + 0.01 * 0.5
    assert max(map(len, text.splitlines())) <= width


def test_what_was_not_measured_is_said_or_left_out() -> None:
    fewer = {"accuracy": None, "tokens_per_second": None, "peak_bytes": None}
    partly = Verdict(replace(BEFORE, **fewer), replace(AFTER, **fewer), replace(DONE, energy_joules=None))
    text = shown(partly)
    for left_out in ("choices", "tokens/s", "peak", "cost", "None", "faster"):
        assert left_out not in text
    assert "not measured" in text
    on_cpu = replace(DONE, gpu_seconds=None, energy_joules=None, devices=(), device="cpu")
    assert shown(replace(VERDICT, quantization=on_cpu)).count("no GPU") == 2


def test_changes_for_the_worse_are_called_so() -> None:
    text = shown(Verdict(AFTER, BEFORE, DONE))
    assert "3.20 x larger" in text
    assert "2.73 x slower" in text
    assert "-2.44%" in text


def test_the_gate() -> None:
    assert VERDICT.passed is None
    VERDICT.check()
    assert VERDICT.increase == pytest.approx(0.025)
    for allowed in (0.025 + 1e-9, 0.05):
        enough = replace(VERDICT, allowed=allowed)
        assert enough.passed is True
        enough.check()
    for allowed in (0.0, 0.02):
        failed = replace(VERDICT, allowed=allowed)
        assert failed.passed is False
        with pytest.raises(
            QualityError, match=r"^/models/glm-w4: perplexity 20\.000 -> 20\.500 \(\+2\.50%\)"
        ) as raised:
            failed.check()
        assert "\n" not in str(raised.value)
        assert raised.value.exit_code == 1
    better = Verdict(AFTER, BEFORE, DONE, allowed=0.0)
    assert better.passed is True


def test_json_adds_to_the_report() -> None:
    found = json.loads(json.dumps(replace(VERDICT, allowed=0.05).to_json()))
    verdict = found.pop("verdict")
    assert Report.from_json(found) == VERDICT.quantization
    assert Evaluation(**verdict["before"]) == BEFORE
    assert Evaluation(**verdict["after"]) == AFTER
    assert verdict["perplexity_increase"] == pytest.approx(0.025)
    assert (verdict["allowed_increase"], verdict["passed"]) == (0.05, True)


def test_the_page_has_the_numbers_and_fetches_nothing(tmp_path: Path) -> None:
    replace(VERDICT, allowed=0.02).write_page(tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    page = Page(text)
    rows = {row[0]: row[1:] for row in page.rows}
    for name in ("perplexity", "困惑度"):
        assert rows[name] == ["20.000", "20.500", "+2.50%"]
    assert rows["size on disk"] == ["12.5 GB", "3.9 GB", "3.20 x smaller"]
    assert rows["磁盘占用"] == ["12.5 GB", "3.9 GB", "缩小到 1/3.20"]
    assert rows["energy of the GPUs"] == ["", "36.00 kJ (10.00 Wh)", ""]
    assert rows["0"] == ["1.00%", "2.00%", "3.00%", "4.00%"]
    assert rows["1"][3] == "4.00% · w8a16"
    assert rows["forward"] == rows["前向"] == ["6.00"]
    assert "The perplexity may increase by at most 2.00%. It changed by +2.50%." in text
    assert ">not met<" in text
    assert ">未达到要求<" in text
    assert "passed" not in text
    assert "12,345" in text
    # A picture in each language, for a light and for a dark page.
    assert [link.split(",")[0] for link in page.links] == ["data:image/png;base64"] * 4
    assert page.links[0] != page.links[1]
    assert "default-src 'none'" in text
    assert "http" not in text.replace("http-equiv", "")


def test_names_are_text_and_no_markup(tmp_path: Path) -> None:
    hostile = replace(VERDICT, quantization=replace(DONE, model=f"/models/{HOSTILE}", devices=(HOSTILE,)))
    hostile.write_page(tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "script" not in Page(text).tags
    assert "&lt;script&gt;alert(1)&lt;" in text
    assert "<script" not in text
    hostile.draw(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<script>" in shown(hostile, 200)


def test_a_tiny_model_is_judged(
    make_model: MakeModel, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warpbus.evaluation.side_by_side.measure_speed", lambda *_, **__: Speed(9.0, 10**6, "cpu"))
    original = make_model(tmp_path / "original", hidden_size=128, intermediate_size=128)
    done = quantize(original, tmp_path / "small", scheme="w4a16-g32", algorithm="rtn", device="cpu")
    verdict = judge(done, data=data, device=torch.device("cpu"), allowed=10.0)
    assert (verdict.before.model, verdict.after.model) == (str(original), str(tmp_path / "small"))
    assert (verdict.before.divergence, verdict.after.scheme) == (0.0, "w4a16-g32")
    assert verdict.after.divergence > 0
    assert verdict.after.disk_bytes < verdict.before.disk_bytes
    assert verdict.after.tokens_per_second == 9.0
    assert verdict.passed is True
    assert verdict.quantization is done


def test_two_models_that_do_not_fit_together(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("warpbus.evaluation.verdict.evaluate", full)
    with pytest.raises(DeviceError, match=r"cpu: out of memory with .* /models/glm-w4 was written"):
        judge(DONE, data=data, device=torch.device("cpu"))


def test_data_are_checked_before_a_long_job(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    check_data(tiny_model, data=data)
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        check_data(tiny_model, data=tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="expected 'messages'"):
        check_data(tiny_model, data=data, questions=data, limit=2)


def test_the_cache_and_long_contexts_are_rows_of_their_own() -> None:
    before = replace(BEFORE, by_position={"0-511": [21.0, 0.0], "512-2,047": [16.0, 0.0]})
    after = replace(AFTER, kv_cache="fp8", by_position={"0-511": [21.5, 0.011], "512-2,047": [20.0, 0.02]})
    quality, gains, _ = Verdict(before, after, DONE).sections()
    rows = {row[0]: row[1:] for row in [*quality, *gains]}
    assert rows["KV cache"] == ("unquantized", "fp8", "")
    assert rows["perplexity, tokens 512-2,047"] == ("16.000", "20.000", "+25.00%")
    assert rows["KL, tokens 512-2,047"] == ("", "0.0200", "")
    plain = [row[0] for rows in Verdict(BEFORE, AFTER, DONE).sections() for row in rows]
    assert not any("interval" in name for name in plain)
    assert not any("KV cache" in name or "tokens 0" in name for name in plain)


def test_intervals_are_rows_and_explained(tmp_path: Path) -> None:
    after = replace(AFTER, change_interval=[0.021, 0.0289], divergence_interval=[0.0119, 0.0128])
    verdict = Verdict(BEFORE, after, DONE)
    rows = {row[0]: row[1:] for row in verdict.sections()[0]}
    assert rows["perplexity, 95 % interval"] == ("", "", "[+2.10%, +2.89%]")
    assert rows["KL, 95 % interval"] == ("", "[0.0119, 0.0128]", "")
    verdict.write_page(tmp_path / "sure.html")
    VERDICT.write_page(tmp_path / "unsure.html")
    assert "resamples of the texts" in (tmp_path / "sure.html").read_text(encoding="utf-8")
    assert "resamples of the texts" not in (tmp_path / "unsure.html").read_text(encoding="utf-8")


def test_the_effect_of_tuning_is_shown() -> None:
    tuned = replace(VERDICT, quantization=replace(DONE, tuning=TuningResult(before=0.0423, after=0.0387, epoch=2)))
    assert "KL before and after tuning" not in shown(VERDICT)
    (row,) = (line for line in shown(tuned).splitlines() if "KL before and after tuning" in line)
    assert {"0.0423", "0.0387"} <= set(row.split())
    assert Report.from_json(json.loads(json.dumps(tuned.quantization.to_json()))) == tuned.quantization
