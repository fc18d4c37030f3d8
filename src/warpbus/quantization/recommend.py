"""Which scheme and algorithm to take: candidates, what each was found to cost on sample layers, and the choice.

Errors of a few layers tell which of two candidates is better, not how good the whole model will be. So quality is
judged by a candidate among the others: one that loses no more than rounding to the nearest with 4 bits does counts as
usable, since that is what people have long run.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from warpbus.cuda.memory_size import short_size
from warpbus.errors import NumericError, SchemeError, UsageError
from warpbus.qtensor import Scheme
from warpbus.quantization.methods import fitting_algorithms

GOALS = ("quality", "speed", "size")

USABLE = ("w4a16-g128", "rtn")
"""The candidate whose error is the most that is taken for the sake of speed or size, where another fits."""

# Measured times differ by a few percent from run to run, errors by less: what is closer than that counts as equal.
_SAME_TIME = 0.03
_SAME_ERROR = 0.01

# A machine that does nothing else has medians within some percent of the least time.
_CLEAR_SPREAD = 0.1

_SCHEMES = ("w8a16", "w8a8-int8", "w8a8-fp8", "w4a16-g32", "w4a16-g128", "w3a16-g128")


@dataclass(frozen=True)
class Candidate:
    """A way to quantize a model."""

    scheme: Scheme
    algorithm: str


@dataclass(frozen=True)
class Trial:
    """The measured cost of a candidate.

    Attributes:
        scheme, algorithm: the candidate.
        error: relative error of the sample layers' outputs.
        nbytes: of the whole model on the disk.
        memory: bytes that running it takes, cache and working memory included.
        token_seconds: of the matrix-vector products of a token, on the device.
        seconds: that quantizing the whole model is going to take.
        token_spread: by what share of `token_seconds` the median of its samples exceeds it, see `TokenTime`.
    """

    scheme: str
    algorithm: str
    error: float
    nbytes: int
    memory: int
    token_seconds: float
    seconds: float
    token_spread: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.scheme} by {self.algorithm}"

    def fits(self, memory: int | None) -> bool:
        """Whether running it takes no more than so many bytes; None: any number."""
        return memory is None or self.memory <= memory

    @property
    def token_range(self) -> str:
        """Milliseconds per token: the least, and the median of the samples where it is much more."""
        least = 1000 * self.token_seconds
        wide = self.token_spread > _CLEAR_SPREAD
        return f"{least:.2f} to {least * (1 + self.token_spread):.2f}" if wide else f"{least:.2f}"


@dataclass(frozen=True)
class Recommendation:
    """The trials, and the one to take.

    Attributes:
        model: its directory.
        device: the measured device.
        goal: one of `GOALS`.
        memory: bytes that running the model may take; `None`: any.
        layers: the sample layers.
        trials: all of them.
        chosen: the one to take.
        reason: why, in a sentence.
    """

    model: str
    device: str
    goal: str
    memory: int | None
    layers: tuple[int, ...]
    trials: tuple[Trial, ...]
    chosen: Trial
    reason: str

    @classmethod
    def of(
        cls,
        trials: Sequence[Trial],
        *,
        model: str,
        device: str,
        goal: str,
        memory: int | None,
        layers: Sequence[int],
    ) -> Self:
        """Choose among trials, see `choose`."""
        chosen, reason = choose(trials, goal=goal, memory=memory)
        return cls(model, device, goal, memory, tuple(layers), tuple(trials), chosen, reason)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)


def candidates(columns: Sequence[int], *, fp8: bool, scheme: Scheme | None = None) -> list[Candidate]:
    """The candidates worth trying, the most bits first.

    Args:
        columns: input features of the model's matrices; schemes whose groups do not fit them are left out.
        fp8: whether the device multiplies 8-bit floating-point numbers.
        scheme: the only one to try, whatever the device and the matrices.
    """
    fitting = [each for each in map(Scheme.parse, _SCHEMES) if _possible(each, columns, fp8)]
    return [
        Candidate(each, algorithm)
        for each in (fitting if scheme is None else [scheme])
        for algorithm in fitting_algorithms(each)
    ]


def _possible(scheme: Scheme, columns: Sequence[int], fp8: bool) -> bool:
    if scheme.activations == "fp8" and not fp8:
        return False
    try:
        for size in columns:
            scheme.groups(size)
    except SchemeError:
        return False
    return True


def choose(trials: Sequence[Trial], *, goal: str, memory: int | None = None) -> tuple[Trial, str]:
    """The trial to take, and why.

    Of those that fit the memory:
    - "quality": the least error; of those as good, the smallest.
    - "speed": the least time a token; of those as fast, the least error.
    - "size": the least bytes; of those as small, the least error.
    For speed and size only usable ones are looked at (see `USABLE`), as long as one of them fits; otherwise the least
    error decides. With equal figures the quicker one to make is taken, then the first.

    Raises:
        UsageError: if there is nothing to choose from, the goal does not exist, or nothing fits the memory.
        NumericError: if an error or a time is NaN or infinite.
    """
    if goal not in GOALS:
        raise UsageError(f"goal is {goal!r}: choose from {', '.join(GOALS)}")
    if not trials:
        raise UsageError("nothing to choose from: no scheme fits the matrices of this model")
    for trial in trials:
        if not all(0 <= value < float("inf") for value in (trial.error, trial.token_seconds, trial.seconds)):
            raise NumericError(f"{trial.name}: its error or times are no finite numbers: leave it out")
    fitting = [trial for trial in trials if trial.fits(memory)]
    if memory is not None and not fitting:
        least = min(trials, key=lambda trial: trial.memory)
        raise UsageError(
            f"memory is {short_size(memory)}: even {least.name} takes {short_size(least.memory)}: allow more, or a "
            "smaller model"
        )
    within = "" if memory is None else f" within {short_size(memory)}"
    if goal == "quality":
        return _least_error(fitting), f"the least error{within}"
    limit = _usable_error(trials)
    usable = [trial for trial in fitting if trial.error <= limit]
    if not usable:
        return _least_error(fitting), f"the least error{within}; none there is as good as {' by '.join(USABLE)}"
    if goal == "speed":
        fastest = min(trial.token_seconds for trial in usable)
        ties = [trial for trial in usable if trial.token_seconds <= fastest * (1 + _SAME_TIME)]
        chosen = _least_error(ties)
        return chosen, f"the fastest{within} that is usable{_doubt(chosen, usable, ties)}"
    smallest = min(trial.nbytes for trial in usable)
    return _least_error([trial for trial in usable if trial.nbytes == smallest]), f"the smallest{within} that is usable"


def _doubt(chosen: Trial, usable: Sequence[Trial], ties: Sequence[Trial]) -> str:
    """The remark on trials whose times overlap with those of the fastest one; empty if there are none."""
    slowest = chosen.token_seconds * (1 + chosen.token_spread)
    schemes = {trial.scheme: trial for trial in usable if trial.token_seconds < slowest}
    others = [trial for scheme, trial in schemes.items() if scheme not in {tie.scheme for tie in ties}]
    if not others:
        return ""
    listed = " and ".join(f"{trial.scheme} ({trial.token_range})" for trial in others)
    return (
        f"; unsure: its times, {chosen.token_range} ms per token, overlap with those of {listed}: "
        "something else may keep this machine busy: repeat when it is idle"
    )


def _least_error(trials: Sequence[Trial]) -> Trial:
    least = min(trial.error for trial in trials)
    ties = [trial for trial in trials if trial.error <= least * (1 + _SAME_ERROR)]
    return min(ties, key=lambda trial: (trial.nbytes, trial.error, trial.seconds))


def _usable_error(trials: Sequence[Trial]) -> float:
    """The error of `USABLE`, or where it was not tried the least that 4 bits or fewer came to."""
    for trial in trials:
        if (trial.scheme, trial.algorithm) == USABLE:
            return trial.error
    small = [trial.error for trial in trials if Scheme.parse(trial.scheme).bits <= 4]
    return min(small, default=max(trial.error for trial in trials))
