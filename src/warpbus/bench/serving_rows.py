"""The measurements under loads, as results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from warpbus.bench.cases import Result
from warpbus.bench.records import Parameter
from warpbus.bench.serving_load import QUANTILES, Figures, HostTimes, quantile

FIRST, BETWEEN, OUTPUT, REQUESTS = "first token", "between tokens", "output", "requests"
"""The subjects of rows."""

_SHORTEST = 1e-6  # of what a record holds, which is no zero


@dataclass(frozen=True)
class PeerFigures:
    """Someone else's figures under a load, a `Figures` for each time that it was sent."""

    name: str
    version: str
    rounds: Sequence[Figures]


def closed_rows(
    parameters: Mapping[str, Parameter],
    rounds: Sequence[Figures],
    rivals: Sequence[PeerFigures],
    *,
    requests: int,
    tokens: int,
    floor: float | None,
    step_floor: float | None,
) -> list[Result]:
    """Rates and latencies of a closed loop.

    Args:
        requests, tokens: of the load, and of each answer.
        floor: seconds that all of it takes at least.
        step_floor: seconds that a step takes at least.
    """
    rates = [
        _row(
            {**parameters, "of": OUTPUT},
            ("speed", "tokens/s"),
            [each.tokens_per_second for each in rounds],
            [(rival.name, rival.version, [each.tokens_per_second for each in rival.rounds]) for rival in rivals],
            None if floor is None else requests * tokens / floor,
        ),
        _row(
            {**parameters, "of": REQUESTS},
            ("speed", "requests/s"),
            [each.requests_per_second for each in rounds],
            [(rival.name, rival.version, [each.requests_per_second for each in rival.rounds]) for rival in rivals],
            None if floor is None else requests / floor,
        ),
    ]
    return rates + _latencies(parameters, rounds, rivals, step_floor)


def open_rows(
    parameters: Mapping[str, Parameter], rounds: Sequence[Figures], rivals: Sequence[PeerFigures], offered: float
) -> list[Result]:
    """The rate at which requests were answered beside that at which they were sent, and latencies."""
    answered = [each.requests_per_second for each in rounds]
    rate = _row(
        {**parameters, "of": REQUESTS},
        ("speed", "requests/s"),
        answered,
        [("offered", "the rate of arrivals", [offered])],
        None,
    )
    return [rate, *_latencies(parameters, rounds, rivals, None)]


def host_rows(parameters: Mapping[str, Parameter], runs: Sequence[HostTimes], computed: float) -> list[Result]:
    """The host's part of the mean step, beside the step; and the cache's memory beside what tokens take.

    Args:
        computed: bytes of the keys and values of all tokens that were in the cache at once.
    """
    step = [1e6 * run.stepping / run.steps for run in runs]
    parts = {
        "scheduling": [1e6 * run.planning / run.steps for run in runs],
        "launching": [1e6 * run.launching / run.steps for run in runs],
    }
    rows = [
        _row({**parameters, "of": name}, ("time", "us"), spent, [("the step", "all of it", step)], None)
        for name, spent in parts.items()
    ]
    taken = [run.cache_bytes / 1e9 for run in runs]
    peer = ("its tokens", "keys and values alone", [computed / 1e9])
    return [*rows, _row({**parameters, "of": "cache"}, ("memory", "GB"), taken, [peer], None)]


def _latencies(
    parameters: Mapping[str, Parameter], rounds: Sequence[Figures], rivals: Sequence[PeerFigures], floor: float | None
) -> list[Result]:
    rows = []
    for of in (FIRST, BETWEEN):
        if not all(_seconds(each, of) for each in rounds):
            continue  # answers of one piece
        for name, share in QUANTILES.items():
            rows.append(
                _row(
                    {**parameters, "of": of, "quantile": name},
                    ("latency", "ms"),
                    [1e3 * quantile(_seconds(each, of), share) for each in rounds],
                    [
                        (
                            rival.name,
                            rival.version,
                            [1e3 * quantile(_seconds(each, of), share) for each in rival.rounds],
                        )
                        for rival in rivals
                        if all(_seconds(each, of) for each in rival.rounds)
                    ],
                    1e3 * floor if floor is not None and of == BETWEEN and name == "p50" else None,
                )
            )
    return rows


def _seconds(figures: Figures, of: str) -> Sequence[float]:
    return figures.first_token if of == FIRST else figures.between_tokens


def _row(
    parameters: Mapping[str, Parameter],
    metric: tuple[str, str],
    ours: Sequence[float],
    peers: Sequence[tuple[str, str, Sequence[float]]],
    floor: float | None,
) -> Result:
    return Result(
        parameters={**parameters, "timed": "clock"},
        metric=metric[0],
        unit=metric[1],
        ours=[max(_SHORTEST, value) for value in ours],
        peers=[(name, version, [max(_SHORTEST, value) for value in values]) for name, version, values in peers],
        floor=floor,
    )
