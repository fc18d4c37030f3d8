"""`gemm`, `gemv` and `linear`: the dense operators on the shapes of a GLM, beside cuBLAS and torch.compile."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.bench.cases import (
    Benchmark,
    Case,
    PeerContender,
    Plot,
    Run,
    cublas_rival,
    cublas_vector_rival,
    normal,
    torch_rival,
)
from warpbus.bench.ceilings import matrix_rate, read_bandwidth
from warpbus.bench.findings import kernels
from warpbus.bench.records import Parameter
from warpbus.bench.timing import Call
from warpbus.cuda.dtype_names import short_name
from warpbus.kernels.ops.gemm import VARIANTS, gemm, linear
from warpbus.kernels.ops.gemv import gemv

# The linear layers of ChatGLM2-6B: rows (out) and columns (in) of the weight, and which tensor parallelism cuts.
LAYERS = {
    "qkv": (4608, 4096, "rows"),
    "o": (4096, 4096, "columns"),
    "gate_up": (27392, 4096, "rows"),
    "down": (4096, 13696, "columns"),
}
HEAD = {"lm_head": (65024, 4096, "rows")}

_SIZES = tuple(2**power for power in range(8, 15))
_QUICK = (1024, 4096)
_TOKENS = (1024, 4096)


def _gemm_cases(run: Run) -> list[Callable[[], Case]]:
    variants = run.choose_variants(tuple(VARIANTS), ("auto",))
    cases: list[Callable[[], Case]] = [
        partial(_square, run, n, variant) for variant in variants for n in run.choose_sizes(_SIZES, _QUICK)
    ]
    # Sizes are those of square products: who asks for them wants no others.
    if not run.sizes:
        cases += [
            partial(_layer, run, name, tokens, variant)
            for variant in variants
            for tokens in (_TOKENS[:1] if run.quick else _TOKENS)
            for name in LAYERS
        ]
    return cases


def _square(run: Run, n: int, variant: str) -> Case:
    dtype = run.dtype or torch.float16
    work = 2 * n**3
    return Case(
        parameters={"shape": "square", "m": n, "n": n, "k": n, "dtype": short_name(dtype), "variant": variant},
        metric="throughput",
        work=work,
        floor_seconds=work / matrix_rate(run.device, dtype),
        make=lambda: (normal(n, n, run.device, dtype), normal(n, n, run.device, dtype, n**-0.5)),
        ours=partial(gemm, variant=variant),
        rivals=[cublas_rival(torch.matmul)],
    )


def _layer(run: Run, name: str, tokens: int, variant: str) -> Case:
    dtype = run.dtype or torch.float16
    n, k, _ = LAYERS[name]
    work = 2 * tokens * n * k
    return Case(
        parameters={"shape": name, "m": tokens, "n": n, "k": k, "dtype": short_name(dtype), "variant": variant},
        metric="throughput",
        work=work,
        floor_seconds=work / matrix_rate(run.device, dtype),
        make=lambda: (normal(tokens, k, run.device, dtype), normal(n, k, run.device, dtype, k**-0.5)),
        ours=partial(linear, variant=variant),
        rivals=[cublas_rival(F.linear)],
    )


def decode_shapes() -> dict[str, tuple[int, int, int]]:
    """Name, and how many GPUs share the layer: rows, columns and that number, for one GPU, two and four."""
    shapes = {}
    for parts in (1, 2, 4):
        for name, (rows, columns, cut) in (LAYERS | HEAD).items():
            n, k = (rows // parts, columns) if cut == "rows" else (rows, columns // parts)
            shapes[name if parts == 1 else f"{name}/{parts}"] = (n, k, parts)
    return shapes


def _gemv_cases(run: Run) -> list[Callable[[], Case]]:
    if run.sizes:
        return [partial(_decode, run, "square", n, n, 1) for n in run.sizes]
    shapes = decode_shapes()
    return [
        partial(_decode, run, name, n, k, parts)
        for name, (n, k, parts) in shapes.items()
        if parts == 1 or not run.quick
    ]


def _decode(run: Run, name: str, n: int, k: int, parts: int) -> Case:
    dtype = run.dtype or torch.float16
    moved = (n * k + n + k) * dtype.itemsize

    def make() -> tuple[Tensor, Tensor]:
        return normal(n, k, run.device, dtype, k**-0.5), torch.randn(k, device=run.device, dtype=dtype)

    return Case(
        parameters={"shape": name, "m": 1, "n": n, "k": k, "tp": parts, "dtype": short_name(dtype)},
        metric="bandwidth",
        work=moved,
        floor_seconds=moved / read_bandwidth(run.device),
        make=make,
        ours=gemv,
        rivals=[cublas_vector_rival()],
    )


def _linear_cases(run: Run) -> list[Callable[[], Case]]:
    variants = run.choose_variants(tuple(VARIANTS), ("auto",))
    sizes = run.choose_sizes((1024, 4096), (1024,))
    tokens: tuple[int, ...] = (1, 64, 1024, 4096)
    if not run.on_gpu:
        run.note("There is no GPU here: ours is the operator's CPU reference, the same for every variant.")
        variants, tokens = variants[:1], tokens[:3]
        sizes = run.choose_sizes((256, 1024), (256,))
    return [
        partial(_sigmoid_layer, run, n, m, variant)
        for variant in variants
        for n in sizes
        for m in (tokens[:2] if run.quick else tokens)
    ]


def _sigmoid_layer(run: Run, n: int, m: int, variant: str) -> Case:
    dtype = run.dtype or (torch.float16 if run.on_gpu else torch.bfloat16)
    moved = (n * n + 2 * m * n + n) * dtype.itemsize

    def make() -> tuple[Tensor, Tensor, Tensor]:
        x, weight = normal(m, n, run.device, dtype), normal(n, n, run.device, dtype, n**-0.5)
        return x, weight, torch.randn(n, device=run.device, dtype=dtype)

    rivals = [torch_rival(_eager)]
    compiled = _compiled(run, *make())
    if compiled is not None:
        rivals.append(PeerContender("torch.compile", torch.__version__, compiled))
    return Case(
        parameters={"m": m, "n": n, "k": n, "dtype": short_name(dtype), "variant": variant},
        metric="time",
        work=2 * m * n * n,
        floor_seconds=max(moved / read_bandwidth(run.device), 2 * m * n * n / matrix_rate(run.device, dtype)),
        make=make,
        ours=partial(linear, activation="sigmoid", variant=variant),
        rivals=rivals,
    )


def _eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.sigmoid(F.linear(x, weight, bias))


def _compiled(run: Run, x: Tensor, weight: Tensor, bias: Tensor) -> Call | None:
    """The layer compiled for these shapes, or `None` with a note where this machine lacks what that takes."""
    # Else the ninth shape would silently run uncompiled.
    torch.compiler.reset()
    compiled: Call = torch.compile(_eager, dynamic=False)
    try:
        compiled(x, weight, bias)
    except Exception as error:  # whatever the compilers below torch raise
        run.note(f"torch.compile was left out: it does not work here ({type(error).__name__}).")
        return None
    return compiled


def _squares_from(least: int) -> Callable[[Mapping[str, Parameter]], bool]:
    return lambda case: case["shape"] == "square" and int(case["n"]) >= least


def _layers_at(tokens: int) -> Callable[[Mapping[str, Parameter]], bool]:
    return lambda case: case["shape"] in LAYERS and case["m"] == tokens


def _decoding_on(gpus: int) -> Callable[[Mapping[str, Parameter]], bool]:
    return lambda case: case["shape"] != "square" and case["tp"] == gpus


GEMM = Benchmark(
    name="gemm",
    title="Matrix product, 16 bits",
    cases=_gemm_cases,
    plot=Plot(x=None),
    needs_gpu=True,
    means={
        "N >= 1024": _squares_from(1024),
        "N >= 4096": _squares_from(4096),
        **{f"ChatGLM2-6B, {tokens} tokens": _layers_at(tokens) for tokens in _TOKENS},
    },
)
GEMV = Benchmark(
    name="gemv",
    title="Matrix times vector, 16 bits: one token through ChatGLM2-6B",
    cases=_gemv_cases,
    plot=Plot(x=None, panels=("tp",)),
    takes=("dtype",),
    needs_gpu=True,
    means={f"ChatGLM2-6B on {gpus} GPU{'s' * (gpus > 1)}": _decoding_on(gpus) for gpus in (1, 2, 4)},
)
LINEAR = Benchmark(
    name="linear",
    title="sigmoid(Wx + b) in one kernel",
    cases=_linear_cases,
    plot=Plot(x=None, panels=("n",), relative=True, finding=kernels),
)
