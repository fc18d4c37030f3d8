"""`warpbus doctor`: what this machine has, what will run where, and what to do about what is missing."""

import ctypes
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

import warpbus
from warpbus.cli.compile import compile_all
from warpbus.cli.language import Console
from warpbus.cli.limits import show_limits
from warpbus.cuda.cpu import INSTALL, find_compiler
from warpbus.errors import DeviceError, UsageError
from warpbus.pool.tenant import sandbox

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
IN_CHECKOUT = Path(warpbus.__file__).parents[2].joinpath("tests", "cpu").is_dir()

# The purpose of each extra that this version uses, and the packages that it installs.
EXTRAS = {
    "cuda": (
        "kernels on a GPU",
        ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-crt"),
    ),
    "cluster": ("several machines", ("ray",)),
    "serve": ("warpbus serve", ("fastapi", "uvicorn", "h11", "pydantic", "prometheus-client", "llguidance")),
    "tasks": ("warpbus eval --tasks", ("lm-eval",)),
    "test": (
        "make test",
        (
            *("pytest", "pytest-xdist", "hypothesis", "transformers", "compressed-tensors", "gguf", "psutil"),
            *("scikit-learn", "anthropic", "openai", "httpx", "schemathesis", "jsonschema"),
            *("openapi-spec-validator", "playwright", "trustme"),
        ),
    ),
}


@dataclass(frozen=True)
class GpuReport:
    """An NVIDIA GPU as torch sees it.

    Attributes:
        memory, free: bytes; `free` is `None` where the GPU cannot be used, and `problem` says why.
        links: the GPUs that it can copy to directly.
        compiled: this torch has kernels for it.
    """

    index: int
    name: str
    capability: str
    memory: int
    free: int | None
    problem: str | None
    compiled: bool
    multiprocessors: int
    links: list[int]


def doctor(
    compile: Annotated[
        bool, typer.Option("--compile", help="compile all kernels for the GPUs here, and show the resources of each")
    ] = False,
    arch: Annotated[
        list[str] | None,
        typer.Option(help="with --compile: for this architecture, such as sm_90a; can be given more than once"),
    ] = None,
    limits: Annotated[
        bool,
        typer.Option("--limits", help="query the devices: limits of blocks, memory and caches, and measured rates"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print what was found as JSON")] = False,
) -> None:
    """Show the hardware and software of this machine, where each command runs, and how to add missing parts."""
    if limits and (compile or arch):
        raise UsageError("--limits and --compile are two reports: ask for one at a time")
    if limits:
        show_limits(as_json)
        return
    if compile:
        compile_all(arch or [], as_json)
        return
    if arch:
        raise UsageError("--arch needs --compile: it names what to compile for")
    import torch

    found = _examine(torch)
    if as_json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
        return
    console = Console()
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="bold")
    facts.add_column()
    for name, text in _facts(found):
        facts.add_row(name, escape(text))
    console.print(facts)
    works = Table(title="What runs where", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    works.add_column("")
    works.add_column("where")
    for name, where in found["runs"].items():
        works.add_row(name, escape(where))
    console.print()
    console.print(works)
    console.print()
    if found["advice"]:
        console.print("[bold]What would help[/]")
        advice = Table.grid(padding=(0, 1))  # a second line of an item is indented like its first one
        for text in found["advice"]:
            advice.add_row(" •", escape(text))
        console.print(advice, highlight=False)
    else:
        console.print("[green]Nothing is missing.[/]")


def _examine(torch: Any) -> dict[str, Any]:
    driver = _driver_version()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [asdict(_gpu(torch, index)) for index in range(count)]
    total, available = _memory()
    disk = shutil.disk_usage(Path.cwd())
    extras = {name: _missing(distributions) for name, (_, distributions) in EXTRAS.items()}
    found: dict[str, Any] = {
        "warpbus": warpbus.__version__,
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory": {"total": total, "available": available},
        "disk": {"path": str(Path.cwd()), "free": disk.free},
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()},
        "driver": driver and {"cuda": driver},
        "compiler": _compiler(),
        "host_compiler": _host_compiler(),
        "kernel_cache": _kernel_cache(),
        "sandbox": {"missing": sandbox.missing()},
        "gpus": gpus,
        "missing": extras,
    }
    found["runs"] = _runs(found)
    found["advice"] = _advice(found)
    return found


def _driver_version() -> str | None:
    """The newest CUDA version that the installed driver supports, or `None` without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _compiler() -> str | None:
    """The version of NVRTC and of its headers, or `None` where it is not installed."""
    from warpbus.cuda.jit import compiler_version

    try:
        return compiler_version()
    except DeviceError:
        return None


def _host_compiler() -> str | None:
    """The command of the C++ compiler, or `None` where there is none."""
    try:
        return " ".join(find_compiler())
    except DeviceError:
        return None


def _kernel_cache() -> dict[str, Any]:
    """Where compiled kernels are kept, how many there are, and their bytes."""
    from warpbus.cuda.compiled_cache import cache_directory

    directory = cache_directory()
    sizes = [path.stat().st_size for path in directory.glob("*.cubin")]
    return {"path": str(directory), "entries": len(sizes), "bytes": sum(sizes)}


def _gpu(torch: Any, index: int) -> GpuReport:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    free, problem = None, None
    try:
        free = torch.cuda.mem_get_info(index)[0]
    except RuntimeError as error:  # full, in exclusive use by another process, or fallen off the bus
        problem = next(iter(str(error).splitlines()), type(error).__name__)
    return GpuReport(
        index=index,
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory=properties.total_memory,
        free=free,
        problem=problem,
        compiled=any(_runs_on(arch, capability) for arch in torch.cuda.get_arch_list()),
        multiprocessors=properties.multi_processor_count,
        links=[other for other in others if torch.cuda.can_device_access_peer(index, other)],
    )


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch` runs on a GPU: `sm_86` within its generation, `compute_90` (PTX) on all later ones, what
    ends with "a" on that one alone."""
    kind, _, digits = arch.partition("_")
    number = digits.rstrip("af")
    if not number.isdecimal():
        return False
    built = int(number[:-1]), int(number[-1])
    if digits.endswith("a"):
        return built == capability
    if kind == "compute":
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def _memory() -> tuple[int, int]:
    """Bytes of main memory in all and available, from the kernel."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return sizes["MemTotal"], sizes["MemAvailable"]


def _missing(distributions: tuple[str, ...]) -> list[str]:
    missing = []
    for name in distributions:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def _runs(found: dict[str, Any]) -> dict[str, str]:
    gpus = found["gpus"]
    cpu = f"CPU, {_counted(found['cores'], 'core')}, float32"
    if not gpus:
        return {"chat, serve, eval, demo": cpu, "quantize": cpu, "train": f"{cpu}: small models only"}
    # Without --device it is the first GPU, whatever that is. Training needs no kernels of ours.
    able = [gpu for gpu in gpus if _has_kernels(gpu)]
    if not able:
        place = f"{cpu}, with --device cpu"
    else:
        index = able[0]["index"]
        place = f"GPU {index} ({able[0]['name']})" + (f", with --device cuda:{index}" if index else "")
    several = f"{len(gpus)} GPUs with --gpus {len(gpus)}" if len(gpus) > 1 else f"GPU 0 ({gpus[0]['name']})"
    return {"chat, serve, eval, demo": place, "quantize": place, "train": several}


def _advice(found: dict[str, Any]) -> list[str]:
    advice = []
    cuda_build = found["torch"]["cuda"]
    if found["gpus"]:
        for gpu in found["gpus"]:
            if gpu["problem"]:
                advice.append(f"GPU {gpu['index']} ({gpu['name']}) cannot be used ({gpu['problem']}): see nvidia-smi")
            if not _has_kernels(gpu):
                advice.append(
                    f"GPU {gpu['index']} ({gpu['name']}) is older than Ampere: Warpbus's kernels do not run there: use "
                    "--device cpu"
                )
            elif not gpu["compiled"]:
                advice.append(
                    f"This torch has no code for GPU {gpu['index']} ({gpu['name']}, sm_{_sm(gpu)}): install a torch "
                    "build that has"
                )
    elif found["driver"] is None:
        advice.append("No NVIDIA driver was found: everything runs on the CPU. With an NVIDIA GPU, install its driver.")
        if cuda_build is not None:
            advice.append(
                "This torch brings about 3 GB of CUDA libraries that nothing here can use. Its CPU "
                f"build is smaller: pip install torch=={found['torch']['version'].partition('+')[0]} --force-reinstall "
                f"--index-url {CPU_INDEX}"
            )
    elif cuda_build is None:
        advice.append("There is an NVIDIA driver, but this torch is the CPU build: install a CUDA build of torch.")
    # Within a major version of CUDA, an older driver runs programs that a newer one was built for.
    elif _number(found["driver"]["cuda"])[0] < _number(cuda_build)[0]:
        advice.append(
            f"The driver supports CUDA {found['driver']['cuda']}, torch was built for {cuda_build}: update the driver."
        )
    else:
        advice.append("torch sees no GPU although a driver is there: look at nvidia-smi and CUDA_VISIBLE_DEVICES.")
    for name, missing in found["missing"].items():
        # Nothing is compiled for a GPU that is not there, and only a checkout has tests.
        if missing and (name != "cuda" or found["gpus"]) and (name != "test" or IN_CHECKOUT):
            purpose = EXTRAS[name][0]
            advice.append(f"For {purpose}: pip install 'warpbus[{name}]' (missing: {', '.join(missing)})")
    if found["host_compiler"] is None:
        advice.append(f"For CUDA programs, exercises and 4-bit weights on the CPU: {INSTALL}")
    advice += [f"Tenants of a pool (warpbus pool serve): {line}." for line in found["sandbox"]["missing"]]
    if found["disk"]["free"] < 20e9:
        advice.append(
            f"{found['disk']['path']} has {found['disk']['free'] / 1e9:.0f} GB free: a 6 B model in 16 bits is 13 GB."
        )
    return advice


def _has_kernels(gpu: dict[str, Any]) -> bool:
    """Whether the kernels are written for a GPU: for Ampere and what came after."""
    return _number(gpu["capability"]) >= (8, 0)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _sm(gpu: dict[str, Any]) -> str:
    return str(gpu["capability"]).replace(".", "")


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    memory, torch, cache = found["memory"], found["torch"], found["kernel_cache"]
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU build"
    facts = [
        ("warpbus", found["warpbus"]),
        ("Python", found["python"]),
        ("system", f"{found['system']}, {_counted(found['cores'], 'core')}"),
        ("memory", f"{memory['available'] / 1e9:.1f} of {memory['total'] / 1e9:.1f} GB available"),
        ("disk", f"{found['disk']['free'] / 1e9:.0f} GB free at {found['disk']['path']}"),
        ("torch", f"{torch['version']} ({build}), {_counted(torch['threads'], 'thread')}"),
        ("driver", f"CUDA {found['driver']['cuda']}" if found["driver"] else "none"),
        ("CUDA compiler", f"NVRTC {found['compiler']}" if found["compiler"] else "none"),
        ("C++ compiler", found["host_compiler"] or "none"),
        ("pool sandbox", "incomplete, see below" if found["sandbox"]["missing"] else "complete"),
        ("kernel cache", f"{cache['entries']:,} entries, {cache['bytes'] / 1e6:,.1f} MB at {cache['path']}"),
    ]
    for gpu in found["gpus"]:
        links = f", reaches GPU {', '.join(map(str, gpu['links']))} directly" if gpu["links"] else ""
        free = "unknown" if gpu["free"] is None else f"{gpu['free'] / 1e9:.1f}"
        facts.append(
            (
                f"GPU {gpu['index']}",
                f"{gpu['name']}, sm_{_sm(gpu)}, {gpu['multiprocessors']} multiprocessors, "
                f"{free} of {gpu['memory'] / 1e9:.1f} GB free{links}",
            )
        )
    return facts
