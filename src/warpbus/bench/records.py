"""The schema in which every benchmark of Warpbus writes its measurements; docs/benchmark_cases.md explains it."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from warpbus.errors import DataError, UsageError
from warpbus.formats.files import replace_file

RESULTS = Path("benchmarks/results")

# The metrics, and whether less is better.
LESS_IS_BETTER = {
    "time": True,
    "latency": True,
    "memory": True,
    "energy": True,
    "cost": True,
    "perplexity": True,
    "count": True,
    "throughput": False,
    "bandwidth": False,
    "speed": False,
    "agreement": False,
}

Parameter = str | int | float | bool


@dataclass(frozen=True)
class Peer:
    """A contender that ours is compared with: `value` is in the unit of the record, measured in the same run."""

    name: str
    version: str
    value: float


@dataclass(frozen=True)
class Record:
    """One case of a benchmark against one peer.

    Attributes:
        bench: the verb's argument, such as "gemm".
        case: the named parameters of the case.
        metric: one of `LESS_IS_BETTER`.
        unit: of `ours`, `peer.value`, `floor` and `samples`.
        ours: the median of our samples.
        ratio: how many times better than the peer; above 1 is better, whatever the metric.
        floor: the physical limit on this machine, or `None` where none is known: the least time, the greatest rate.
        samples: every sample of "ours" and of "peer", in the order in which they were taken.
        device: the name of the GPU, or "cpu".
        versions: of what took part: warpbus, python, torch, cuda, ...
        date: of the run, UTC, as 2026-01-31T12:00:00Z.
        command: the command that measures it again.
    """

    bench: str
    case: Mapping[str, Parameter]
    metric: str
    unit: str
    ours: float
    peer: Peer
    ratio: float
    floor: float | None
    samples: Mapping[str, Sequence[float]]
    device: str
    versions: Mapping[str, str]
    date: str
    command: str

    def __post_init__(self) -> None:
        name = f"record {self.bench} {dict(self.case)}"
        for field in ("bench", "unit", "device", "date", "command"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field):
                raise DataError(f"{name}: {field} must be a text that is not empty")
        if self.metric not in LESS_IS_BETTER:
            raise DataError(f"{name}: metric is {self.metric!r}: expected one of {', '.join(LESS_IS_BETTER)}")
        for field, value in (("ours", self.ours), ("peer.value", self.peer.value), ("floor", self.floor)):
            if (value is not None or field != "floor") and not _positive(value):
                raise DataError(f"{name}: {field} is {value!r}: expected a positive number")
        if not math.isclose(self.ratio, ratio(self.metric, self.ours, self.peer.value), rel_tol=1e-6):
            raise DataError(f"{name}: ratio is {self.ratio}, but ours is {self.ours} and the peer's {self.peer.value}")
        if set(self.samples) != {"ours", "peer"} or not all(self.samples.values()):
            raise DataError(f"{name}: samples must hold at least one number each of ours and peer")
        if not all(_positive(value) for values in self.samples.values() for value in values):
            raise DataError(f"{name}: samples must be positive numbers")

    @property
    def share_of_floor(self) -> float | None:
        """How much of what the machine can do was reached, 1 at most where the floor is exact."""
        return None if self.floor is None else ratio(self.metric, self.ours, self.floor)


def ratio(metric: str, ours: float, other: float) -> float:
    """How many times better `ours` is than `other`: a quotient of rates, or the inverse one of times."""
    return other / ours if LESS_IS_BETTER[metric] else ours / other


def now() -> str:
    """The date of a record."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def slug(device: str) -> str:
    """A device in a file's name: "NVIDIA H100 80GB HBM3" is nvidia-h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def results_path(directory: Path, bench: str, device: str) -> Path:
    """Where the records of a benchmark on a device are kept."""
    return directory / f"{bench}-{slug(device)}.json"


def to_json(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Plain dictionaries, the keys in the order of the schema."""
    return [asdict(record) for record in records]


def write(records: Sequence[Record], directory: Path) -> Path:
    """Write the records of one run, in place of those of an earlier run of the same benchmark on the same device.

    Returns:
        The file.

    Raises:
        UsageError: if the records are none, or of more than one benchmark or device.
        StorageError: if the file cannot be written; what was there before still is then.
    """
    kinds = {(record.bench, record.device) for record in records}
    if len(kinds) != 1:
        raise UsageError(f"records of one benchmark on one device make a file; these are of {len(kinds)}")
    path = results_path(directory, *kinds.pop())
    # One record a line, so that a new run makes a readable difference.
    lines = ",\n".join(json.dumps(record, ensure_ascii=False, allow_nan=False) for record in to_json(records))
    replace_file(path, lambda partial: partial.write_text(f"[\n{lines}\n]\n", encoding="utf-8"))
    return path


def read(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        DataError: if it is not there, not JSON, or not in the schema.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}): measure again with warpbus bench") from None
    names = [field.name for field in fields(Record)]
    if not isinstance(found, list):
        raise DataError(f"{path}: expected a list of records")
    records = []
    for at, each in enumerate(found):
        if not isinstance(each, dict) or sorted(each) != sorted(names):
            raise DataError(f"{path}: record {at}: expected the keys {', '.join(names)}")
        try:
            records.append(Record(**{**each, "peer": Peer(**each["peer"])}))
        except (TypeError, AttributeError) as error:
            raise DataError(f"{path}: record {at}: {error}") from None
        except DataError as error:
            raise DataError(f"{path}: record {at}: {error}") from None
    return records


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
