"""`vector-add`: when does it pay to take a vector to a GPU?"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from warpbus.bench.cases import Benchmark, Case, PeerContender, Plot, Run, cpu_rival, torch_rival
from warpbus.bench.ceilings import copy_bandwidth
from warpbus.bench.findings import gpu_against_cpu
from warpbus.bench.timing import Inputs, Timing, measure
from warpbus.kernels.ops.elementwise import VECTOR_ADD_VARIANTS, vector_add

_SIZES = tuple(10**power for power in range(3, 9))
_QUICK = (10**3, 10**5, 10**7)
_ITEM = 4  # bytes of float32


def _cases(run: Run) -> list[Callable[[], Case]]:
    sizes = run.choose_sizes(_SIZES, _QUICK)
    variants = run.choose_variants(("auto", *VECTOR_ADD_VARIANTS), ("auto",))
    if not run.on_gpu:
        run.note("There is no GPU here: ours is the operator's CPU reference, the same for every variant.")
        return [partial(_on_cpu, run, n) for n in sizes]
    run.note("transfers: vectors start and end in the CPU's pageable memory, as a program without a GPU has them.")
    cpu = cache(lambda n: measure([torch.add], partial(_vectors, n, torch.device("cpu")), run.effort)[0])
    return [
        partial(_on_gpu, run, n, variant, transfers, partial(cpu, n))
        for transfers in (False, True)
        for variant in variants
        for n in sizes
    ]


def _on_gpu(run: Run, n: int, variant: str, transfers: bool, cpu: Callable[[], Timing]) -> Case:
    def ours(a: Tensor, b: Tensor) -> Tensor:
        return vector_add(a.to(run.device), b.to(run.device), variant).cpu()

    def theirs(a: Tensor, b: Tensor) -> Tensor:
        return torch.add(a.to(run.device), b.to(run.device)).cpu()

    moved = 3 * _ITEM * n
    return Case(
        parameters={"n": n, "variant": variant, "transfers": transfers},
        metric="time",
        work=moved,
        # Where transfers are timed the GPU's memory is not what limits.
        floor_seconds=None if transfers else moved / copy_bandwidth(run.device),
        make=partial(_vectors, n, torch.device("cpu") if transfers else run.device),
        ours=ours if transfers else partial(vector_add, variant=variant),
        rivals=[torch_rival(theirs if transfers else torch.add), cpu_rival(cpu)],
    )


def _on_cpu(run: Run, n: int) -> Case:
    def make() -> Inputs:
        a, b = _vectors(n, run.device)
        return a, b, a.numpy(), b.numpy()

    moved = 3 * _ITEM * n
    return Case(
        parameters={"n": n},
        metric="time",
        work=moved,
        floor_seconds=moved / copy_bandwidth(run.device),
        make=make,
        ours=lambda a, b, c, d: vector_add(a, b),
        rivals=[PeerContender("numpy", np.__version__, lambda a, b, c, d: np.add(c, d))],
    )


def _vectors(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(n, device=device), torch.randn(n, device=device)


VECTOR_ADD = Benchmark(
    name="vector-add",
    title="Vector addition, float32",
    cases=_cases,
    plot=Plot(x="n", x_label="elements", panels=("transfers",), finding=gpu_against_cpu),
    takes=("variants",),
)
