"""The verdict on a quantization: the model before and after, and the cost of the quantization."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from warpbus.errors import DeviceError, QualityError
from warpbus.evaluation import pictures
from warpbus.evaluation import report as evaluations
from warpbus.evaluation.page import PageTable, Picture, write_page
from warpbus.evaluation.side_by_side import Evaluation, evaluate
from warpbus.formats.files import replace_file
from warpbus.quantization.preflight import REPORT_NAME
from warpbus.quantization.report import Report

# Name, name in Chinese, before, after, change.
Row = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Verdict:
    """A model before and after its quantization.

    Attributes:
        before, after: as measured on the same documents.
        quantization: the report of the quantization.
        allowed: the largest accepted relative increase of the perplexity; None for any.
        data: the name of the file with the documents.
    """

    before: Evaluation
    after: Evaluation
    quantization: Report
    allowed: float | None = None
    data: str = ""

    @property
    def increase(self) -> float:
        """The relative increase of the perplexity; negative if it fell."""
        return self.after.perplexity / self.before.perplexity - 1

    @property
    def passed(self) -> bool | None:
        """Whether the increase is accepted; None if there is no limit."""
        return None if self.allowed is None else self.increase <= self.allowed

    @property
    def title(self) -> str:
        """The title: model, scheme and algorithm."""
        return f"{Path(self.quantization.model).name}: {self.quantization.scheme}, {self.quantization.algorithm}"

    def check(self) -> None:
        """Raises:
        QualityError: if the perplexity increased by more than is allowed.
        """
        if self.passed is False:
            raise QualityError(
                f"{self.quantization.output}: perplexity {self.before.perplexity:.3f} -> {self.after.perplexity:.3f} "
                f"({self.increase:+.2%}), more than the {self.allowed:+.2%} allowed; the model was written: try more "
                "bits, smaller groups or another algorithm"
            )

    def to_json(self) -> dict[str, Any]:
        """The report of the quantization, with the key "verdict" added."""
        found = {
            "before": asdict(self.before),
            "after": asdict(self.after),
            "perplexity_increase": self.increase,
            "allowed_increase": self.allowed,
            "passed": self.passed,
            "data": self.data,
        }
        return self.quantization.to_json() | {"verdict": found}

    def keep(self) -> None:
        """Add the verdict to the report in the directory of the quantized model, from which its card is made.

        Raises:
            StorageError: it cannot be written.
        """
        text = f"{json.dumps(self.to_json(), indent=2, ensure_ascii=False)}\n"
        replace_file(Path(self.after.model) / REPORT_NAME, lambda partial: partial.write_text(text, encoding="utf-8"))

    def sentences(self) -> list[str]:
        """The main results as sentences, in English and in Chinese."""
        done = self.quantization
        change = f"{self.before.perplexity:.2f} → {self.after.perplexity:.2f} ({self.increase:+.2%})"
        smaller = self.before.disk_bytes / self.after.disk_bytes
        english = f"{done.scheme} by {done.algorithm}: perplexity {change}, {smaller:.2f} x smaller"
        chinese = f"{done.scheme}，{done.algorithm}：困惑度 {change}，体积缩小到 1/{smaller:.2f}"
        if self.before.tokens_per_second and self.after.tokens_per_second:
            faster = self.after.tokens_per_second / self.before.tokens_per_second
            english += f", {faster:.2f} x as fast"
            chinese += f"，速度为原来的 {faster:.2f} 倍"
        return [english + ".", chinese + "。"]

    def sections(self) -> list[list[Row]]:
        """All figures as text: quality; size and speed; cost of the quantization."""
        return [self._quality(), self._gains(), self._effort()]

    def _quality(self) -> list[Row]:
        before, after = self.before, self.after
        perplexities = f"{before.perplexity:.3f}", f"{after.perplexity:.3f}"
        rows = [
            ("perplexity", "困惑度", *perplexities, f"{self.increase:+.2%}"),
            ("KL divergence (nats)", "KL 散度", "", f"{after.divergence:.4f}", ""),
            ("agrees on the token", "首选词一致", "", f"{after.agreement:.1%}", ""),
        ]
        for positions, (perplexity, _) in (before.by_position or {}).items():
            changed, divergence = (after.by_position or {})[positions]
            cells = f"{perplexity:.3f}", f"{changed:.3f}", f"{changed / perplexity - 1:+.2%}"
            rows.append((f"perplexity, tokens {positions}", f"困惑度，位置 {positions}", *cells))
            rows.append((f"KL, tokens {positions}", f"KL 散度，位置 {positions}", "", f"{divergence:.4f}", ""))
        if before.accuracy is not None and after.accuracy is not None:
            gained = f"{100 * (after.accuracy - before.accuracy):+.1f} points"
            rows.append(("right choices", "选择题正确率", f"{before.accuracy:.1%}", f"{after.accuracy:.1%}", gained))
        return rows

    def _gains(self) -> list[Row]:
        before, after = self.before, self.after
        rows = [
            ("weights", "权重格式", before.scheme, after.scheme, ""),
            _bytes_row("size on disk", "磁盘占用", before.disk_bytes, after.disk_bytes),
            _bytes_row("weights in memory", "权重内存", before.weight_bytes, after.weight_bytes),
        ]
        if before.kv_cache or after.kv_cache:
            caches = before.kv_cache or "unquantized", after.kv_cache or "unquantized"
            rows.insert(1, ("KV cache", "KV 缓存", *caches, ""))
        if before.peak_bytes and after.peak_bytes:
            rows.append(_bytes_row("peak while decoding", "解码峰值内存", before.peak_bytes, after.peak_bytes))
        if before.tokens_per_second and after.tokens_per_second:
            speeds = f"{before.tokens_per_second:,.0f}", f"{after.tokens_per_second:,.0f}"
            ratio = _ratio(after.tokens_per_second / before.tokens_per_second, "faster", "slower")
            rows.append(("decoding (tokens/s)", "解码速度（词元/秒）", *speeds, ratio))
        return rows

    def _effort(self) -> list[Row]:
        done, worst = self.quantization, self.quantization.worst
        kind = "outputs" if done.calibration_tokens else "weights"
        gpu_seconds = "no GPU" if done.gpu_seconds is None else f"{done.gpu_seconds:,.1f}"
        energy = "no GPU" if done.gpu_seconds is None else done.energy_text
        rows = [
            (f"mean error ({kind})", "平均相对误差", "", f"{done.mean_error:.2%}", ""),
            ("largest error", "最大相对误差", "", f"{worst.error:.2%}", worst.name),
            ("quantizing (s)", "量化用时（秒）", "", f"{done.seconds:,.1f}", done.where),
            ("GPU-seconds", "显卡时间（秒）", "", gpu_seconds, ""),
            ("energy of the GPUs", "显卡能耗", "", energy, ""),
        ]
        if done.head is not None:
            rows.insert(
                2, ("error of the head (weights)", "输出层权重相对误差", "", f"{done.head.error:.2%}", done.head.scheme)
            )
        if done.prices:
            rows.append(("cost, estimated", "费用（估算）", "", done.cost_text, f"at {done.prices_text}"))
        return rows

    def table(self) -> Table:
        """For the terminal."""
        drawn = Table(title=Text(self.sentences()[0]), title_justify="left", title_style="bold", header_style="bold")
        drawn.add_column("", overflow="fold")
        for heading in ("before", "after", "change"):
            drawn.add_column(heading, justify="right", overflow="fold")
        for section in self.sections():
            for name, _, *cells in section:
                drawn.add_row(name, *map(Text, cells))
            drawn.add_section()
        return drawn

    def figure(self) -> Figure:
        """Before and after; below it the errors of all matrices and where the time went."""
        pair = (self.before, self.after)
        (_, upper), (width, lower) = evaluations.size(pair), pictures.size(self.quantization)
        drawn = pictures.paper((max(10, width), upper + lower + 0.4), self.title)
        grid = drawn.add_gridspec(2, 1, height_ratios=[upper, lower])
        evaluations.fill(drawn.add_subfigure(grid[0]), pair)
        pictures.fill(drawn.add_subfigure(grid[1]), self.quantization)
        return drawn

    def draw(self, path: Path) -> None:
        """Write the picture of `figure` as a PNG.

        Raises:
            StorageError: if it cannot be written.
        """
        with pictures.style():
            drawn = self.figure()
        replace_file(path, lambda partial: drawn.savefig(partial, dpi=130, format="png"))

    def write_page(self, path: Path) -> None:
        """Write one self-contained HTML page: all figures, pictures, what the words mean.

        Raises:
            StorageError: if it cannot be written.
        """
        done = self.quantization
        figures = [[(f"{name} {chinese}", *cells) for name, chinese, *cells in rows] for rows in self.sections()]
        tables = [
            PageTable(["", "before 量化前", "after 量化后", "change 变化"], figures),
            PageTable(["layer 层", *done.linears], [_errors(done)], f"{done.error_kind} 各矩阵的相对误差"),
        ]
        if done.stages:
            stages = [[stage, f"{seconds:.2f}"] for stage, seconds in done.stages.items()]
            tables.append(PageTable(["stage 阶段", "seconds 秒"], [stages], "where the time went 时间分布"))
        write_page(
            path,
            title=self.title,
            lead=[*self.sentences(), *self._demand()],
            passed=self.passed,
            tables=tables,
            pictures=[
                Picture("Perplexity, divergence, size and speed of both models, the error of each matrix", self.figure)
            ],
            terms=[
                *(term for term in evaluations.terms(self.before.tokens) if not term[0].startswith("change")),
                (
                    "energy 能耗",
                    "What the GPUs' own sensors counted while the model was quantized; the rest of the machine is not "
                    "in it. 量化期间由 GPU 传感器测得，不含主机其余部分。",
                ),
            ],
            command="warpbus quantize --evaluate",
        )

    def _demand(self) -> list[str]:
        if self.allowed is None:
            return []
        return [f"The perplexity may grow by {self.allowed:.2%}. 困惑度最多可上升 {self.allowed:.2%}。"]


def judge(
    done: Report,
    *,
    data: Path,
    questions: Path | None = None,
    length: int = 2048,
    limit: int | None = None,
    allowed: float | None = None,
    device: torch.device,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Verdict:
    """Compare a quantized model with the original; both are in memory at the same time.

    Args:
        done: the report of the quantization.
        data, questions, length, limit, device, progress: see `evaluate`.
        allowed: see `Verdict`.

    Raises:
        DeviceError: the device's memory is too small for both models.
        WarpbusError: see `evaluate`.
    """
    models = [("original", Path(done.model)), ("quantized", Path(done.output))]
    try:
        before, after = evaluate(
            models, data=data, questions=questions, length=length, limit=limit, device=device, progress=progress
        )
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"{device}: out of memory with the original and the quantized model on it together; {done.output} was "
            "written: compare them with warpbus eval on a larger GPU or with --device cpu"
        ) from error
    return Verdict(before, after, done, allowed, data.name)


def _errors(done: Report) -> list[Sequence[str]]:
    """One row per layer; with scheme and algorithm if they differ from those of the model."""
    rows: list[Sequence[str]] = []
    for layer in sorted({each.layer for each in done.rows}):
        cells = {each.linear: done.cell(each, " · ") for each in done.rows if each.layer == layer}
        rows.append([str(layer), *(cells.get(linear, "–") for linear in done.linears)])
    return rows


def _bytes_row(name: str, chinese: str, before: int, after: int) -> Row:
    unit, size = ("GB", 1e9) if before >= 1e10 else ("MB", 1e6)
    texts = f"{before / size:,.1f} {unit}", f"{after / size:,.1f} {unit}"
    return (name, chinese, *texts, _ratio(before / after, "smaller", "larger"))


def _ratio(ratio: float, better: str, worse: str) -> str:
    return f"{ratio:.2f} x {better}" if ratio >= 1 else f"{1 / ratio:.2f} x {worse}"
