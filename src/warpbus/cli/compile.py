"""`warpbus doctor --compile`: every kernel into the cache, and what each takes of a multiprocessor."""

import json
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from warpbus.cli.language import Console
from warpbus.cli.progress import progress_bar
from warpbus.errors import DeviceError, UsageError, WarpbusError

if TYPE_CHECKING:
    from warpbus.cuda.kernel import Unit


def compile_all(archs: Sequence[str], as_json: bool) -> None:
    """Compile every unit for the architectures, by default those of this machine's GPUs, and print what came of it.

    Exits with 1 if a unit does not compile.

    Raises:
        UsageError: not an architecture; or none was given and there is no GPU.
        DeviceError: no compiler is installed, or no unit is meant for an architecture.
    """
    from warpbus.cuda.jit import compiler_version
    from warpbus.kernels.compilation import all_units

    targets = _targets(archs)
    compiler = compiler_version()
    units = all_units()
    work = [(unit, arch) for arch in targets for unit in units if unit.runs_on(arch)]
    for arch in targets:
        if not any(unit.runs_on(arch) for unit in units):
            raise DeviceError(f"{arch}: no kernel is meant for it: they need an sm_80 (Ampere) GPU or a later one")
    start = time.perf_counter()
    found = _compile(work)
    seconds = time.perf_counter() - start
    if as_json:
        print(json.dumps({"compiler": compiler, "seconds": round(seconds, 3), "units": found}, ensure_ascii=False))
    else:
        _show(found, f"NVRTC {compiler}: {len(found)} units in {seconds:.1f} s")
    if any(each["error"] for each in found):
        raise typer.Exit(1)


def _targets(archs: Sequence[str]) -> list[str]:
    import torch

    from warpbus.cuda.jit import ARCHITECTURES, architecture

    for arch in archs:
        if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
            raise UsageError(f"--arch {arch}: no architecture: give one such as {', '.join(ARCHITECTURES)}")
    if archs:
        return list(dict.fromkeys(archs))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise UsageError("--compile: there is no GPU here to compile for: add --arch, for example --arch sm_90a")
    return list(dict.fromkeys(architecture(index) for index in range(count)))


def _compile(work: Sequence[tuple["Unit", str]]) -> list[dict[str, Any]]:
    """The outcome of each unit, in the order given. NVRTC works outside Python's lock, so threads are enough."""
    found: dict[int, dict[str, Any]] = {}
    with progress_bar() as show, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        show("compiling", 0, len(work))
        waiting = {pool.submit(_one, unit, arch): at for at, (unit, arch) in enumerate(work)}
        try:
            for done in as_completed(waiting):
                found[waiting[done]] = done.result()
                show("compiling", len(found), len(work))
        except BaseException:
            # Ctrl-C waits for what is being compiled, not for all that is queued.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [found[at] for at in range(len(work))]


def _one(unit: "Unit", arch: str) -> dict[str, Any]:
    made: dict[str, Any] = {"unit": unit.label, "arch": arch, "kernels": {}, "remarks": [], "error": None}
    try:
        cubin = unit.compile(arch)
    except WarpbusError as error:
        return {**made, "error": str(error)}
    kernels = {name: asdict(resources) for name, resources in cubin.resources.items()}
    return {**made, "kernels": kernels, "remarks": list(cubin.remarks)}


def _show(found: Sequence[dict[str, Any]], title: str) -> None:
    console = Console()
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    several = len({each["arch"] for each in found}) > 1
    table.add_column("kernel", overflow="fold")
    if several:
        table.add_column("arch", no_wrap=True)
    for heading in ("registers", "shared B", "spills B"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in found:
        arch = [Text(each["arch"])] * several
        if each["error"]:
            table.add_row(Text(each["unit"]), *arch, Text("failed", style="red"))
        for name, taken in each["kernels"].items():
            spilled = taken["spill_stores"] + taken["spill_loads"]
            table.add_row(
                Text(f"{each['unit']}: {name}"),
                *arch,
                str(taken["registers"]),
                f"{taken['shared']:,}",
                Text(f"{spilled:,}", style="red" if spilled else ""),
            )
    console.print(table)
    for each in found:
        for remark in each["remarks"]:
            console.print(Text(f"{each['unit']} ({each['arch']}): {remark}", style="yellow"))
        if each["error"]:
            console.print(Text(each["error"], style="red"))
