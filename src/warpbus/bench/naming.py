"""Names of the parameters of a case in pictures: words, not the keys of records."""

from collections.abc import Mapping, Sequence

from warpbus.bench.records import LESS_IS_BETTER, Parameter, Record, ratio
from warpbus.bench.report import shown

_ABOVE = 1.005  # of a limit

_VALUES: Mapping[tuple[str, Parameter], str] = {
    ("transfers", False): "data on the GPU",
    ("transfers", True): "transfers included",
    ("operator", "matmul"): "matrix product",
    ("operator", "gemv"): "matrix times vector",
    ("task", "encode"): "reading a prompt",
    ("task", "generate"): "generating",
    ("variant", "auto"): "",
    ("experts", "whole"): "whole experts per GPU",
    ("memory", "no limit"): "without a plan",
}
_COUNTED = {
    "tp": ("1 GPU", "{} GPUs"),
    "gpus": ("1 GPU", "{} GPUs"),
    "processes": ("1 process", "{} processes"),
    "kv_heads": ("1 KV head", "{} KV heads"),
    "context": ("1 token of context", "{} tokens of context"),
    "batch": ("1 sequence", "{} sequences"),
    "generated": ("1 token", "{} tokens"),
    "tokens": ("1 token", "{} tokens"),
}
_METRICS = {
    "time": "time",
    "latency": "time",
    "memory": "memory",
    "energy": "energy",
    "cost": "cost",
    "perplexity": "perplexity",
    "count": "number",
    "throughput": "throughput",
    "bandwidth": "bandwidth",
    "speed": "speed",
    "agreement": "agreement",
}


def described(name: str, value: Parameter | None) -> str:
    """A parameter and its value in words; empty where there is nothing to say."""
    if value is None:
        return ""
    if (name, value) in _VALUES:
        return _VALUES[name, value]
    if name in _COUNTED and isinstance(value, int):
        one, more = _COUNTED[name]
        return one if value == 1 else more.format(f"{value:,}")
    if name == "n" and isinstance(value, int):
        return f"{value:,} wide"
    if isinstance(value, bool):
        return name if value else ""
    return str(value) if isinstance(value, str) else f"{name.replace('_', ' ')} {shown(value)}"


def panel_title(names: Sequence[str], values: Sequence[Parameter | None]) -> str:
    """The title of a panel."""
    return ", ".join(filter(None, (described(name, value) for name, value in zip(names, values, strict=True))))


def case_label(case: Mapping[str, Parameter], names: Sequence[str]) -> str:
    """The label that distinguishes a case from others, short: words, then numbers as "4,096 x 1,024"."""
    words, numbers = [], []
    rows_alone = [name for name in names if isinstance(case.get(name), int)] == ["m"]
    for name in names:
        value = case.get(name)
        if isinstance(value, str | bool) or name in _COUNTED:
            words.append(described(name, value))
        elif rows_alone and name == "m":
            words.append("1 row" if value == 1 else f"{value:,} rows")
        elif value is not None:
            numbers.append(f"{value:,}")
    return " ".join([*filter(None, words), " x ".join(numbers)]).strip()


def axis_label(record: Record) -> str:
    """The label of an axis: quantity, unit, and which end is better."""
    better = "less" if LESS_IS_BETTER[record.metric] else "more"
    metric, unit = _METRICS[record.metric], record.unit
    return f"{metric} ({unit}), {better} is better" if metric != unit else f"{metric}, {better} is better"


def limit_label(records: Sequence[Record]) -> str:
    """The name for the limit of records: one that a contender has exceeded is no physical limit."""
    shares = (
        ratio(record.metric, value, record.floor)
        for record in records
        for value in (record.ours, record.peer.value)
        if record.floor is not None
    )
    return "limit as measured, can be exceeded" if any(share > _ABOVE for share in shares) else "limit"
