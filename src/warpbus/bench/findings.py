"""The findings in the records of a benchmark, as the sentences above its picture; each line is a sentence."""

import math
from collections.abc import Sequence

from warpbus.bench.cases import WHOLE
from warpbus.bench.records import Record
from warpbus.bench.report import number

_CPU_DTYPE = "float32"  # in which `matmul` multiplies on the CPU
_PEERS = 3  # so many sentences stand above a picture
_NOT_SPEED = {"memory", "energy", "cost", "perplexity", "count", "agreement"}


def compared(records: Sequence[Record]) -> str:
    """The speed against each peer: the geometric mean of the ratios, and their range."""
    of_speed = [record for record in records if record.metric not in _NOT_SPEED] or list(records)
    if of_speed[0].metric in _NOT_SPEED:
        return f"{of_speed[0].metric} of Warpbus and of others"
    sentences = []
    for peer in list(dict.fromkeys(record.peer.name for record in of_speed))[:_PEERS]:
        ratios = [record.ratio for record in of_speed if record.peer.name == peer]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        sentence = f"Warpbus runs at {number(mean)} times the speed of {peer}"
        if peer.startswith("warpbus, "):  # our own engine with another dtype
            sentence = f"Quantized, Warpbus runs at {number(mean)} times its speed in {peer.removeprefix('warpbus, ')}"
        if len(ratios) > 1 and number(min(ratios)) != number(max(ratios)):
            sentence = f"{sentence} (from {number(min(ratios))} to {number(max(ratios))})"
        sentences.append(sentence)
    return "\n".join(sentences)


def kernels(records: Sequence[Record]) -> str:
    """The speed of operators against each peer. Without a GPU, no kernel ran."""
    if records[0].device == "cpu":
        return compared(records).replace("Warpbus runs", "On a CPU, the PyTorch reference of the kernels runs")
    return compared(records)


def gpu_against_cpu(records: Sequence[Record]) -> str:
    """How many times as fast as the CPU the GPU is at the largest size, and from which size on it is faster.

    The CPU computes in float32. Where some records of the GPU do too, they are compared, and the ratios of other dtypes
    follow.
    """
    against = [record for record in records if "CPU" in record.peer.name]
    if not against:
        return kernels(records)
    sentences = []
    for moved, how in ((False, "Data on the GPU"), (True, "Transfers included")):
        by_dtype: dict[str, list[Record]] = {}
        for record in against:
            if record.case["transfers"] is moved:
                by_dtype.setdefault(str(record.case.get("dtype", "")), []).append(record)
        if not by_dtype:
            continue
        dtype = _CPU_DTYPE if _CPU_DTYPE in by_dtype else next(iter(by_dtype))
        found = by_dtype.pop(dtype)
        largest = max(int(record.case["n"]) for record in found)
        if dtype:
            how = f"{how}, {dtype}" if dtype == _CPU_DTYPE else f"{how}, {dtype} (CPU {_CPU_DTYPE})"
        faster = _faster_from(found)
        sentence = f"{how}: {_best(found, largest)} times the CPU's speed at {largest:,}"
        sentence = f"{sentence}, faster from {faster:,} on" if faster else f"{sentence}, never faster"
        for name, records_of in by_dtype.items():
            sentence = f"{sentence}; {name}: {_best(records_of, largest)} times"
        sentences.append(sentence)
    return "\n".join(sentences)


def _best(records: Sequence[Record], size: int) -> str:
    """The ratio of the fastest variant at a size."""
    return number(max((record.ratio for record in records if record.case["n"] == size), default=math.nan))


def _faster_from(records: Sequence[Record]) -> int | None:
    """The size from which the best variant is always faster than the peer."""
    sizes = sorted({int(record.case["n"]) for record in records}, reverse=True)
    best = {size: max(record.ratio for record in records if record.case["n"] == size) for size in sizes}
    first = None
    for size in sizes:
        if best[size] <= 1:
            break
        first = size
    return first


def rungs(records: Sequence[Record]) -> str:
    """From the first rung to the fastest one, at the largest size of each operator."""
    names = {"matmul": "Matrix product", "gemv": "Matrix times vector"}
    sentences = []
    for operator in dict.fromkeys(record.case["operator"] for record in records):
        of = [record for record in records if record.case["operator"] == operator]
        largest = max(int(record.case["n"]) for record in of)
        found = [record for record in of if record.case["n"] == largest]
        best = max(found, key=lambda record: record.ours)
        values = f"{number(found[0].ours)} to {number(best.ours)} {best.unit}"
        sentences.append(
            f"{names[str(operator)]}: from {values}, {number(best.ratio)} times as fast as {best.peer.name}"
        )
    return "\n".join(sentences)


def scaling(records: Sequence[Record]) -> str:
    """How much faster the most GPUs or processes are than the fewest."""
    unit, words = ("gpus", "GPUs") if "gpus" in records[0].case else ("processes", "processes")
    most = max(records, key=lambda record: record.case[unit])
    fewest = min(int(record.case[unit]) for record in records)
    return f"{most.case[unit]} {words} run at {number(most.ratio)} times the speed of {fewest}"


def stages(records: Sequence[Record]) -> str:
    """How much faster a whole run is with the most GPUs or processes."""
    whole = [record for record in records if record.case.get("stage") == WHOLE and "warpbus" in record.peer.name]
    if not whole:
        return compared(records)
    fastest = max(whole, key=lambda record: record.ratio)
    unit = "gpus" if "gpus" in fastest.case else "processes"
    count = int(fastest.case[unit])
    words = {"gpus": "GPUs", "processes": "processes"}[unit]
    if fastest.ratio == 1:
        return f"The model is quantized in {number(fastest.ours)} s"
    return f"{count} {words} quantize the model in {number(fastest.ours)} s, {number(fastest.ratio)} times as fast as 1"
