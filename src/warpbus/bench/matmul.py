"""`matmul`: CPU against GPU by the size of a matrix product; `ladder`: what each rung gains over the one before."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from warpbus.bench.cases import (
    Benchmark,
    Case,
    PeerContender,
    Plot,
    Run,
    cpu_rival,
    cublas_rival,
    cublas_vector_rival,
    normal,
)
from warpbus.bench.ceilings import matrix_rate, read_bandwidth
from warpbus.bench.findings import gpu_against_cpu, rungs
from warpbus.bench.timing import Inputs, Timing, measure
from warpbus.cuda.dtype_names import short_name
from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import runs_on
from warpbus.errors import DeviceError
from warpbus.kernels.ops.ladder import GEMV_RUNGS, MATMUL_RUNGS, Rung, gemv, matmul

_SIZES = tuple(2**power for power in range(6, 14))
_QUICK = (64, 512, 2048)
_FIRST_RUNGS = ("naive", "tiled", "wmma")


def _matmul_cases(run: Run) -> list[Callable[[], Case]]:
    sizes = run.choose_sizes(_SIZES, _QUICK)
    if not run.on_gpu:
        run.note("There is no GPU here: ours is the operator's CPU reference, the same for every variant.")
        run.choose_variants(tuple(MATMUL_RUNGS), ())
        return [partial(_matmul_on_cpu, run, n) for n in sizes]
    run.note("transfers: matrices start and end in the CPU's pageable memory, as a program without a GPU has them.")
    rungs = _runnable(run, MATMUL_RUNGS, run.choose_variants(tuple(MATMUL_RUNGS), _FIRST_RUNGS))

    @cache
    def cpu(n: int) -> Timing:
        return measure([torch.matmul], partial(_square, n, torch.device("cpu"), torch.float32), run.effort)[0]

    return [
        partial(_matmul_on_gpu, run, rung, n, transfers, partial(cpu, n))
        for transfers in (False, True)
        for rung in rungs
        for n in sizes
    ]


def _matmul_on_gpu(run: Run, rung: Rung, n: int, transfers: bool, cpu: Callable[[], Timing]) -> Case:
    dtype = torch.float32 if torch.float32 in rung.dtypes else torch.float16

    def ours(a: Tensor, b: Tensor) -> Tensor:
        return matmul(a.to(run.device), b.to(run.device), rung.name).cpu()

    def theirs(a: Tensor, b: Tensor) -> Tensor:
        return torch.matmul(a.to(run.device), b.to(run.device)).cpu()

    return Case(
        parameters={"rung": rung.name, "n": n, "dtype": short_name(dtype), "transfers": transfers},
        metric="time",
        work=2 * n**3,
        floor_seconds=None if transfers else 2 * n**3 / matrix_rate(run.device, dtype),
        make=partial(_square, n, torch.device("cpu") if transfers else run.device, dtype),
        ours=ours if transfers else partial(matmul, rung=rung.name),
        rivals=[cublas_rival(theirs if transfers else torch.matmul), cpu_rival(cpu)],
    )


def _matmul_on_cpu(run: Run, n: int) -> Case:
    def make() -> Inputs:
        a, b = _square(n, run.device, torch.float32)
        return a, b, a.numpy(), b.numpy()

    return Case(
        parameters={"n": n, "dtype": "float32"},
        metric="time",
        work=2 * n**3,
        floor_seconds=2 * n**3 / matrix_rate(run.device, torch.float32),
        make=make,
        ours=lambda a, b, c, d: matmul(a, b, next(iter(MATMUL_RUNGS))),
        rivals=[PeerContender("numpy", np.__version__, lambda a, b, c, d: np.matmul(c, d))],
    )


def _ladder_cases(run: Run) -> list[Callable[[], Case]]:
    sizes = run.choose_sizes((4096, 1024), (1024,))
    known = (*MATMUL_RUNGS, *GEMV_RUNGS)
    chosen = run.choose_variants(known, known)
    products = _runnable(run, MATMUL_RUNGS, [name for name in chosen if name in MATMUL_RUNGS])
    vectors = _runnable(run, GEMV_RUNGS, [name for name in chosen if name in GEMV_RUNGS])
    cases: list[Callable[[], Case]] = [partial(_product, run, rung, n) for n in sizes for rung in products]
    return cases + [partial(_vector, run, rung, n) for n in sizes for rung in vectors]


def _product(run: Run, rung: Rung, n: int) -> Case:
    dtype = _dtype(run, rung)
    return Case(
        parameters={"operator": "matmul", "n": n, "rung": rung.name, "dtype": short_name(dtype)},
        metric="throughput",
        work=2 * n**3,
        floor_seconds=2 * n**3 / matrix_rate(run.device, dtype),
        make=partial(_square, n, run.device, dtype),
        ours=partial(matmul, rung=rung.name),
        rivals=[cublas_rival(torch.matmul)],
    )


def _vector(run: Run, rung: Rung, n: int) -> Case:
    dtype = _dtype(run, rung)
    moved = (n * n + 2 * n) * dtype.itemsize

    def make() -> Inputs:
        return normal(n, n, run.device, dtype, n**-0.5), torch.randn(n, device=run.device, dtype=dtype)

    return Case(
        parameters={"operator": "gemv", "n": n, "rung": rung.name, "dtype": short_name(dtype)},
        metric="bandwidth",
        work=moved,
        floor_seconds=moved / read_bandwidth(run.device),
        make=make,
        ours=partial(gemv, rung=rung.name),
        rivals=[cublas_vector_rival()],
    )


def _runnable(run: Run, rungs: dict[str, Rung], names: Sequence[str]) -> list[Rung]:
    """The rungs that this GPU can run and that take the dtype asked for; a note says which were left out."""
    arch = architecture(run.device)
    runnable = []
    for name in names:
        rung = rungs[name]
        if not runs_on(arch, rung.needs):
            run.note(f"{name} was left out: it needs {rung.needs}.")
        elif run.dtype is not None and run.dtype not in rung.dtypes:
            run.note(f"{name} was left out: it does not take {short_name(run.dtype)}.")
        else:
            runnable.append(rung)
    if names and not runnable:
        raise DeviceError(f"--variant {', '.join(names)}: {run.device_name} cannot run it: {' '.join(run.notes)}")
    return runnable


def _dtype(run: Run, rung: Rung) -> torch.dtype:
    return run.dtype or (torch.float16 if torch.float16 in rung.dtypes else torch.float32)


def _square(n: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return normal(n, n, device, dtype), normal(n, n, device, dtype, n**-0.5)


MATMUL = Benchmark(
    name="matmul",
    title="Square matrix product by size; the CPU multiplies in float32",
    cases=_matmul_cases,
    plot=Plot(x="n", x_label="rows and columns", panels=("transfers",), finding=gpu_against_cpu),
    takes=("variants",),
)
LADDER = Benchmark(
    name="ladder",
    title="Ratios are to cuBLAS measured in turn with the rung; its bar: median, range of all",
    cases=_ladder_cases,
    plot=Plot(x=None, panels=("operator", "n"), finding=rungs),
    needs_gpu=True,
)
