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
from warpbus.evaluation.side_by_side import Evaluation, evaluate
from warpbus.figures.page import Gate, PageTable, Picture, write_page
from warpbus.figures.theme import caption, paper, save, style
from warpbus.formats.files import replace_file
from warpbus.quantization.preflight import REPORT_NAME
from warpbus.quantization.report import Report

# Name, before, after, change.
Row = tuple[str, str, str, str]


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
        """The main results as sentences."""
        done = self.quantization
        return [f"{done.scheme} by {done.algorithm}: {each}." for each in evaluations.gains(self.before, self.after)]

    def sections(self) -> list[list[Row]]:
        """All figures as text: quality; size and speed; cost of the quantization."""
        return [self._quality(), self._gains(), self._effort()]

    def _quality(self) -> list[Row]:
        before, after = self.before, self.after
        perplexities = f"{before.perplexity:.3f}", f"{after.perplexity:.3f}"
        rows = [
            ("perplexity", *perplexities, f"{self.increase:+.2%}"),
            ("KL divergence (nats)", "", f"{after.divergence:.4f}", ""),
            ("agrees on the token", "", f"{after.agreement:.1%}", ""),
        ]
        if after.change_interval is not None:
            lower, upper = after.change_interval
            rows.insert(1, ("perplexity, 95 % interval", "", "", f"[{lower:+.2%}, {upper:+.2%}]"))
        if after.divergence_interval is not None:
            lower, upper = after.divergence_interval
            rows.insert(-1, ("KL, 95 % interval", "", f"[{lower:.4f}, {upper:.4f}]", ""))
        for positions, (perplexity, _) in (before.by_position or {}).items():
            changed, divergence = (after.by_position or {})[positions]
            cells = f"{perplexity:.3f}", f"{changed:.3f}", f"{changed / perplexity - 1:+.2%}"
            rows.append((f"perplexity, tokens {positions}", *cells))
            rows.append((f"KL, tokens {positions}", "", f"{divergence:.4f}", ""))
        if before.accuracy is not None and after.accuracy is not None:
            gained = f"{100 * (after.accuracy - before.accuracy):+.1f} points"
            rows.append(("choices correct", f"{before.accuracy:.1%}", f"{after.accuracy:.1%}", gained))
        return rows

    def _gains(self) -> list[Row]:
        before, after = self.before, self.after
        rows = [
            ("weights", before.scheme, after.scheme, ""),
            _bytes_row("size on disk", before.disk_bytes, after.disk_bytes),
            _bytes_row("weights in memory", before.weight_bytes, after.weight_bytes),
        ]
        if before.kv_cache or after.kv_cache:
            caches = before.kv_cache or "unquantized", after.kv_cache or "unquantized"
            rows.insert(1, ("KV cache", *caches, ""))
        if before.peak_bytes and after.peak_bytes:
            rows.append(_bytes_row("peak while decoding", before.peak_bytes, after.peak_bytes))
        if before.tokens_per_second and after.tokens_per_second:
            speeds = f"{before.tokens_per_second:,.0f}", f"{after.tokens_per_second:,.0f}"
            ratio = _ratio(after.tokens_per_second / before.tokens_per_second, "faster", "slower")
            rows.append(("decoding (tokens/s)", *speeds, ratio))
        return rows

    def _effort(self) -> list[Row]:
        done, worst = self.quantization, self.quantization.worst
        kind = "outputs" if done.calibration_tokens else "weights"
        gpu_seconds = "no GPU" if done.gpu_seconds is None else f"{done.gpu_seconds:,.1f}"
        energy = "no GPU" if done.gpu_seconds is None else done.energy_text
        rows = [
            (f"mean error ({kind})", "", f"{done.mean_error:.2%}", ""),
            ("largest error", "", f"{worst.error:.2%}", worst.name),
            ("quantizing (s)", "", f"{done.seconds:,.1f}", done.where),
            ("GPU-seconds", "", gpu_seconds, ""),
            ("energy of the GPUs", "", energy, ""),
        ]
        for what, result in done.ends.items():
            rows.insert(2, (f"error of the {what} (weights)", "", f"{result.error:.2%}", result.scheme))
        if done.tuning is not None:
            tuned = done.tuning
            rows.insert(2, ("KL before and after tuning", f"{tuned.before:.4f}", f"{tuned.after:.4f}", "effort high"))
        if done.prices:
            rows.append(("cost, estimated", "", done.cost_text, f"at {done.prices_text}"))
        return rows

    def table(self) -> Table:
        """For the terminal."""
        drawn = Table(title=Text(self.sentences()[0]), title_justify="left", title_style="bold", header_style="bold")
        drawn.add_column("", overflow="fold")
        for heading in ("before", "after", "change"):
            drawn.add_column(heading, justify="right", overflow="fold")
        for section in self.sections():
            for name, *cells in section:
                drawn.add_row(name, *map(Text, cells))
            drawn.add_section()
        return drawn

    def figure(self) -> Figure:
        """Before and after; below it the errors of all matrices and where the time went."""
        pair = (self.before, self.after)
        (upper_width, upper), (width, lower) = evaluations.size(pair), pictures.size(self.quantization)
        drawn = paper(max(upper_width, width), upper + lower + 0.3)
        grid = drawn.add_gridspec(2, 1, height_ratios=[upper, lower])
        evaluations.fill(drawn.add_subfigure(grid[0]), pair)
        pictures.fill(drawn.add_subfigure(grid[1]), self.quantization)
        return caption(drawn, self.sentences()[0].removesuffix("."), self.title, evaluations.machine(self.after))

    def draw(self, path: Path) -> None:
        """Write the picture of `figure` as a PNG.

        Raises:
            StorageError: if it cannot be written.
        """
        with style():
            save(self.figure(), path)

    def write_page(self, path: Path) -> None:
        """Write one self-contained HTML page: all figures, pictures, the meaning of the words; in English and Chinese.

        Raises:
            StorageError: if it cannot be written.
        """
        done = self.quantization
        tables = [
            PageTable(["", "before", "after", "change"], self.sections()),
            PageTable(["layer", *done.linears], [_errors(done)], done.error_kind),
        ]
        if done.stages:
            stages = [[stage, f"{seconds:.2f}"] for stage, seconds in done.stages.items()]
            tables.append(PageTable(["stage", "seconds"], [stages], "where the time went (s)"))
        left_out = {"change"} if self.after.change_interval else {"change", evaluations.INTERVAL}
        write_page(
            path,
            title=self.title,
            lead=self.sentences(),
            gate=self._gate(),
            tables=tables,
            pictures=[
                Picture("Perplexity, KL divergence, size and speed of both models, errors of the matrices", self.figure)
            ],
            terms=[
                *(term for term in evaluations.terms(self.before.tokens) if term[0] not in left_out),
                (
                    "energy of the GPUs",
                    "Measured by the sensors of the GPUs while the model was quantized, without the rest of the "
                    "machine.",
                ),
            ],
            command="warpbus quantize --evaluate",
        )

    def _gate(self) -> Gate | None:
        if self.allowed is None:
            return None
        return Gate(
            f"The perplexity may increase by at most {self.allowed:.2%}. It changed by {self.increase:+.2%}.",
            bool(self.passed),
        )


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


def _bytes_row(name: str, before: int, after: int) -> Row:
    unit, size = ("GB", 1e9) if before >= 1e10 else ("MB", 1e6)
    texts = f"{before / size:,.1f} {unit}", f"{after / size:,.1f} {unit}"
    return (name, *texts, _ratio(before / after, "smaller", "larger"))


def _ratio(ratio: float, better: str, worse: str) -> str:
    return f"{ratio:.2f} x {better}" if ratio >= 1 else f"{1 / ratio:.2f} x {worse}"
