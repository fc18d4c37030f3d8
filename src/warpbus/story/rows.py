"""The results of a story: rows, what they cost, and the sentences that compare them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GENERATE, TRAIN, QUANTIZE = "generate", "train", "quantize"
ORIGINAL, RTN8, RTN4, GPTQ4 = "16 bits", "8 bits (RTN)", "4 bits (RTN)", "4 bits (GPTQ)"
CPU, GPU = "CPU", "GPU"
_METHOD_NAMES = {"lora": "LoRA"}


@dataclass(frozen=True)
class Quality:
    """What a form of the model predicts, and its size.

    Attributes:
        perplexity, divergence, agreement: see `Evaluation`.
        tokens: number of predicted tokens.
        disk_bytes: of the weight files.
        scheme: of the weights, or their dtype.
    """

    perplexity: float
    divergence: float
    agreement: float
    tokens: int
    disk_bytes: int
    scheme: str


@dataclass(frozen=True)
class StoryRow:
    """One measurement.

    Attributes:
        task: `GENERATE`, `TRAIN` or `QUANTIZE`.
        place: `CPU` or `GPU`.
        count: of processes or GPUs.
        form: of the weights, with the algorithm that quantizes them; or the training method.
        rate: tokens per second; of a quantization, models per second.
        joules: per token, or per quantized model; None where it was not measured.
        memory: bytes at most, of a GPU, or of the process on the CPU; None where it was not measured.
        detail: the number of trained parameters, or the mean error of the quantized matrices.
    """

    task: str
    place: str
    count: int
    form: str
    rate: float
    joules: float | None = None
    memory: int | None = None
    detail: str = ""

    @property
    def where(self) -> str:
        """The device in words."""
        return self.place if self.count == 1 else f"{self.count} {self.place}s"

    @property
    def seconds(self) -> float:
        """Of a token, or of a quantized model."""
        return 1 / self.rate

    def cost(self, prices: Mapping[str, float]) -> float:
        """Dollars for a million tokens, or for a quantized model, by the prices of an hour of `CPU` and of `GPU`."""
        units = 1 if self.task == QUANTIZE else 1_000_000
        return prices[self.place] * self.count * self.seconds * units / 3600


@dataclass(frozen=True)
class Story:
    """All that was measured of a model.

    Attributes:
        model: its name.
        rows: in the order of the measurements.
        quality: of each form of the weights.
        prices: dollars per hour of `CPU` and of `GPU`.
        missing: sentences on what was not measured, and why.
        machine: the names of the CPU and of the GPUs.
        date: UTC, as 2026-01-31T12:00:00Z.
        command: what was typed.
        data: the file that the perplexity was measured on.
    """

    model: str
    rows: tuple[StoryRow, ...]
    quality: Mapping[str, Quality]
    prices: Mapping[str, float]
    machine: str
    date: str
    command: str
    data: str
    missing: tuple[str, ...] = field(default=())

    def of(self, task: str) -> list[StoryRow]:
        """The rows of a task."""
        return [row for row in self.rows if row.task == task]

    def base(self, row: StoryRow) -> StoryRow:
        """The row that a row is compared with: the first one of its task; a quantization with the same one on fewer
        GPUs, since other schemes and algorithms are other work."""
        return next(each for each in self.of(row.task) if row.task != QUANTIZE or each.form == row.form)

    def find(self, task: str, place: str, form: str, count: int = 1) -> StoryRow | None:
        """The row of a task in a place."""
        wanted = task, place, form, count
        return next((row for row in self.rows if (row.task, row.place, row.form, row.count) == wanted), None)

    def label(self, form: str) -> str:
        """A form as it is shown: a model that is stored in float32 has 32 bits, and methods have their usual names."""
        original = self.quality.get(ORIGINAL)
        if form == ORIGINAL and original is not None and original.scheme == "float32":
            return "32 bits"
        return _METHOD_NAMES.get(form, form)

    @property
    def best_place(self) -> str:
        """`GPU` if anything was measured there."""
        return GPU if any(row.place == GPU for row in self.rows) else CPU

    def findings(self) -> list[str]:
        """The comparisons as sentences."""
        return [*self._gpu(), *self._bits(), *self._algorithms(), *self._several(), *self._methods()]

    def _gpu(self) -> list[str]:
        sentences = []
        for task, name in ((GENERATE, "generates"), (TRAIN, "trains")):
            for row in self.of(task):
                fast = self.find(task, GPU, row.form)
                if row.place == CPU and fast is not None:
                    sentences.append(
                        f"The GPU {name} {times(fast.rate / row.rate)} as fast as the CPU ({self.label(row.form)})"
                    )
                    break
        return sentences

    def _bits(self) -> list[str]:
        place = self.best_place
        before = self.find(GENERATE, place, ORIGINAL)
        sentences = []
        for form, found in self.quality.items():
            after = self.find(GENERATE, place, form)
            if form == ORIGINAL or before is None or after is None or ORIGINAL not in self.quality:
                continue
            original = self.quality[ORIGINAL]
            change = found.perplexity / original.perplexity - 1
            smaller = original.disk_bytes / found.disk_bytes
            sentences.append(
                f"{form} on the {place}: {times(after.rate / before.rate)} as fast as {self.label(ORIGINAL)}, "
                f"{smaller:.2f} times smaller, perplexity {change:+.2%}"
            )
        return sentences

    def _algorithms(self) -> list[str]:
        simple, gptq = (self.find(QUANTIZE, self.best_place, form) for form in (RTN4, GPTQ4))
        if simple is None or gptq is None or not {ORIGINAL, RTN4, GPTQ4} <= self.quality.keys():
            return []
        before, rounded, after = (self.quality[form].perplexity for form in (ORIGINAL, RTN4, GPTQ4))
        return [
            f"To quantize to 4 bits, GPTQ takes {times(gptq.seconds / simple.seconds)} as long as RTN: "
            f"perplexity {after / before - 1:+.2%} instead of {rounded / before - 1:+.2%}"
        ]

    def _several(self) -> list[str]:
        sentences = []
        for task, name in ((QUANTIZE, "quantize"), (TRAIN, "train")):
            several = [row for row in self.of(task) if row.count > 1]
            if several:
                most = max(several, key=lambda row: row.count)
                one = self.find(task, most.place, most.form)
                if one is not None:
                    sentences.append(f"{most.count} GPUs {name} {times(most.rate / one.rate)} as fast as 1")
        return sentences

    def _methods(self) -> list[str]:
        full, lora = (self.find(TRAIN, self.best_place, form) for form in ("full", "lora"))
        if full is None or lora is None:
            return []
        return [f"LoRA trains {times(lora.rate / full.rate)} as fast as full fine-tuning on the {self.best_place}"]


def times(ratio: float) -> str:
    """A ratio in words, such as "3.10 times"."""
    return f"{ratio:,.0f} times" if ratio >= 100 else f"{ratio:.1f} times" if ratio >= 10 else f"{ratio:.2f} times"


def joined(sentences: Sequence[str], limit: int) -> str:
    """The first sentences, a line each."""
    return "\n".join(sentences[:limit])
