"""The output of `warpbus quantize` after the work: the report, and with --evaluate the verdict."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from warpbus.cli.language import Console
from warpbus.cli.models import DEMO
from warpbus.cli.progress import progress_bar
from warpbus.cli.tables import report_tables
from warpbus.demo import evaluation_paths
from warpbus.errors import UsageError

if TYPE_CHECKING:
    from warpbus.quantization import Report

LENGTH = 2048  # tokens of a document
DEMO_DOCUMENTS = 100


@dataclass(frozen=True)
class Output:
    """The options of the verdict, checked.

    Attributes:
        data, questions: the data of the comparison; without data there is none.
        limit: documents and questions at most.
        allowed: the increase of the perplexity that is allowed, as a share.
        plot, html: files to write.
        as_json: print JSON instead of tables.
    """

    data: Path | None
    questions: Path | None
    limit: int | None
    allowed: float | None
    plot: Path | None
    html: Path | None
    as_json: bool

    def show(self, report: "Report", device: str) -> None:
        """Print and write it.

        Raises:
            QualityError: if the perplexity increased by more than is allowed; all else is done by then.
        """
        console = Console()
        if not self.as_json:
            console.print(report_tables(report))
            for what, result in report.ends.items():
                console.print(result.sentence(what), highlight=False, markup=False, soft_wrap=True)
            if report.tuning is not None:
                console.print(str(report.tuning), highlight=False, markup=False, soft_wrap=True)
            console.print(report.summary(), highlight=False, markup=False, soft_wrap=True)
        if self.data is None:
            if self.plot is not None:
                from warpbus.evaluation import pictures

                pictures.draw(report, self.plot)
            if self.as_json:
                print(json.dumps(report.to_json(), ensure_ascii=False))
            return
        from warpbus.cuda.devices import resolve_device
        from warpbus.evaluation import judge
        from warpbus.evaluation.report import doubted

        with progress_bar() as show:
            verdict = judge(
                report,
                data=self.data,
                questions=self.questions,
                length=LENGTH,
                limit=self.limit,
                allowed=self.allowed,
                device=resolve_device(device),
                progress=show,
            )
        verdict.keep()
        if self.plot is not None:
            verdict.draw(self.plot)
        if self.html is not None:
            verdict.write_page(self.html)
        if self.as_json:
            print(json.dumps(verdict.to_json(), ensure_ascii=False))
        else:
            console.print()
            console.print(verdict.table())
            if (doubt := doubted([verdict.before, verdict.after])) is not None:
                console.print(doubt, highlight=False, markup=False, soft_wrap=True)
        verdict.check()


def check_output(
    model: Path,
    *,
    evaluate: str | None,
    questions: Path | None,
    max_perplexity_increase: str | None,
    plot: Path | None,
    html: Path | None,
    as_json: bool,
) -> Output:
    """Look at the flags and at the data before the model is quantized.

    Raises:
        UsageError: if a flag is wrong, or needs --evaluate.
        WarpbusError: see `check_data` and `check_files`.
    """
    for flag, value in (
        ("--questions", questions),
        ("--max-perplexity-increase", max_perplexity_increase),
        ("--html", html),
    ):
        if value is not None and evaluate is None:
            raise UsageError(f"{flag} needs --evaluate: name the texts that the models are to be compared on")
    if plot is not None or html is not None:
        from warpbus.formats.files import check_files

        check_files(plot, html)
    allowed = None if max_perplexity_increase is None else _share(max_perplexity_increase)
    data, limit = None if evaluate is None else Path(evaluate), None
    if evaluate == DEMO:
        data, packaged_questions = evaluation_paths()
        questions, limit = questions or packaged_questions, DEMO_DOCUMENTS
    if data is not None:
        from warpbus.evaluation import check_data  # it takes longer to load than all that quantizing needs

        check_data(model, data=data, questions=questions, length=LENGTH, limit=limit)
    return Output(data, questions, limit, allowed, plot, html, as_json)


def _share(text: str) -> float:
    """A percentage as a share."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not text.endswith("%") or not 0 <= value < math.inf:
        raise UsageError(f"--max-perplexity-increase is {text!r}: give a percentage from 0% up, such as 5%")
    return value / 100
