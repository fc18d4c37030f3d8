"""`wna16`, `wna8` and `w8a8`: quantized linear operators on the layers of ChatGLM2-6B, beside their peers."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import warpbus
from warpbus.bench.cases import (
    Benchmark,
    Case,
    PeerContender,
    Plot,
    Run,
    cublas_rival,
    distribution,
    normal,
)
from warpbus.bench.ceilings import copy_bandwidth, matrix_rate
from warpbus.bench.dense import LAYERS
from warpbus.bench.peers import TINYGEMM_ROWS, Humming, Tinygemm
from warpbus.bench.records import Parameter
from warpbus.bench.timing import Call, Inputs
from warpbus.cuda.dtype_names import short_name
from warpbus.cuda.jit import architecture
from warpbus.errors import UsageError
from warpbus.kernels.ops import wna8
from warpbus.kernels.ops.packed import PackedWeight, pack
from warpbus.kernels.ops.w8a8 import quantize_rows, quantize_tokens, w8a8_linear
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.qtensor import QTensor, Scheme

_ROWS = (1, 4, 8, 16, 64, 128, 256, 1024, 4096)
_QUICK_ROWS = (1, 16, 256)
_SCHEME = "w4a16-g128"
_WIDE = ("gate_up", "down")
_8_BIT = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_8_BIT_ROWS = (16, 256, 1024, 4096)
_8_BIT_RATE = 2  # of the tensor cores' rate for 16 bits
_PROMPT_ROWS = (512, 1024, 4096, 8192)  # of `wna8`, which takes no fewer
_INT_MM_ROWS = 17  # at least, in torch's integer product


@dataclass(frozen=True)
class _Weights:
    """One random matrix in every contender's form."""

    packed: PackedWeight
    dense: Tensor
    tinygemm: Tinygemm | None
    humming: Humming | None


class Shelf:
    """The weights of one layer, in as many copies as its cases ask for, kept from case to case: to make them takes
    longer than to measure one. Those of another layer take their place."""

    def __init__(self) -> None:
        self._label: object = None
        self._copies: list[Any] = []

    def supplier(self, label: object, make: Callable[[Any], Any]) -> Callable[[], Any]:
        """A function that gives another copy at every call, old ones first. `make` gets the first copy, or `None`."""
        if label != self._label:
            self._label, self._copies = label, []
        numbers = itertools.count()

        def supply() -> Any:
            number = next(numbers)
            if number == len(self._copies):
                self._copies.append(make(self._copies[0] if self._copies else None))
            return self._copies[number]

        return supply


def _wna16_cases(run: Run) -> list[Callable[[], Case]]:
    schemes = [Scheme.parse(name) for name in run.variants or (_SCHEME,)]
    for scheme, (name, (_, k, _)) in itertools.product(schemes, LAYERS.items()):
        scheme.groups(k, name)
    rows = run.choose_sizes(_ROWS, _QUICK_ROWS)
    shelf = Shelf()
    return [partial(_layer, run, scheme, name, m, rows, shelf) for scheme in schemes for name in LAYERS for m in rows]


def _layer(run: Run, scheme: Scheme, name: str, m: int, rows: tuple[int, ...], shelf: Shelf) -> Case:
    dtype = run.dtype or torch.float16
    n, k, _ = LAYERS[name]

    def weights(first: _Weights | None) -> _Weights:
        weight = random_weight(scheme, n, k, run.device)
        humming = None
        if first is None:
            try:
                humming = Humming.of(weight, dtype, rows)
            except Exception as error:  # not installed, or whatever its compiler raises
                run.note(f"humming was left out: {_reason(error)}")
        elif first.humming is not None:
            humming = Humming.of(weight, dtype, rows)
        tinygemm = Tinygemm.of(weight) if Tinygemm.takes(scheme, n, k) else None
        return _Weights(pack(weight, dtype), weight.dequantize(dtype), tinygemm, humming)

    label = scheme, name, dtype
    first = shelf.supplier(label, weights)()
    supply = shelf.supplier(label, weights)

    def make() -> tuple[Tensor, Tensor, _Weights]:
        x = normal(m, k, run.device, dtype)
        return x, x.bfloat16(), supply()

    rivals = [cublas_rival(lambda x, _, each: F.linear(x, each.dense))]
    if first.tinygemm is not None and m <= TINYGEMM_ROWS:
        rivals.append(PeerContender("tinygemm", torch.__version__, lambda _, x, each: each.tinygemm(x)))
    if first.humming is not None:
        version = distribution("humming-kernels") or "unknown"
        rivals.append(PeerContender("humming", version, lambda x, _, each: each.humming(x)))
    return layer_case(run, name, m, dtype, scheme, make, lambda x, _, each: wna16_linear(x, each.packed), rivals)


def layer_case(
    run: Run,
    name: str,
    m: int,
    dtype: torch.dtype,
    variant: Scheme | str,
    make: Callable[[], Inputs],
    ours: Call,
    rivals: Sequence[PeerContender],
    *,
    rate: float = 1,
    bits: float | None = None,
) -> Case:
    """The case of one of `LAYERS`, whose floor is the larger of two times: of the weight, x `[m, in]` and the result at
    the copy bandwidth, and of the product at the rate of the tensor cores.

    Args:
        variant: the weight's scheme, or a name of 8-bit weights.
        make, ours, rivals: see `Case`.
        rate: of the tensor cores, relative to that for `dtype`.
        bits: of a weight; by default those of the scheme, or 8.
    """
    n, k, _ = LAYERS[name]
    if bits is None:
        bits = variant.bits_per_weight(k) if isinstance(variant, Scheme) else 8
    moved = int(bits * n * k / 8) + m * (n + k) * dtype.itemsize
    flops = 2 * m * n * k
    return Case(
        parameters={"shape": name, "m": m, "n": n, "k": k, "dtype": short_name(dtype), "variant": str(variant)},
        metric="time",
        work=flops,
        floor_seconds=max(moved / copy_bandwidth(run.device), flops / (rate * matrix_rate(run.device, dtype))),
        make=make,
        ours=ours,
        rivals=rivals,
        touched=moved,
    )


def _wna8_cases(run: Run) -> list[Callable[[], Case]]:
    variants = [_prompt_variant(name) for name in run.variants or (_SCHEME,)]
    rows = run.choose_sizes(_PROMPT_ROWS, _PROMPT_ROWS[1:3])
    if min(rows) < wna8.LEAST_ROWS:
        raise UsageError(f"wna8 multiplies {wna8.LEAST_ROWS} rows and more, not {min(rows)}: wna16 takes fewer")
    shelf = Shelf()
    return [partial(_prompt_layer, run, each, name, m, shelf) for each in variants for name in LAYERS for m in rows]


def _prompt_variant(name: str) -> tuple[Scheme, str]:
    """A scheme and the type of the activations: of "w4a16-g128+int8", or "w4a16-g128", which is FP8."""
    text, _, word = name.partition("+")
    scheme, word = Scheme.parse(text), word or "fp8"
    if word not in _8_BIT:
        raise UsageError(f"variant {name}: activations are fp8 or int8: give {text}+int8")
    if not wna8.supports(scheme, _8_BIT[word]):
        raise UsageError(f"wna8 has no kernel for {scheme} and {word}: give up to 4 bits in groups of 64 or 128")
    return scheme, word


def _prompt_layer(run: Run, variant: tuple[Scheme, str], name: str, m: int, shelf: Shelf) -> Case:
    scheme, word = variant
    if run.on_gpu and not wna8.runs_on(arch := architecture(run.device), _8_BIT[word]):
        raise UsageError(f"wna8 in {word} needs an Ada, Hopper or later GPU, this one is {arch}: give {scheme}+int8")
    dtype = run.dtype or torch.bfloat16
    n, k, _ = LAYERS[name]

    def weights(_: object) -> tuple[PackedWeight, Tensor]:
        weight = random_weight(scheme, n, k, run.device)
        return pack(weight, dtype), weight.dequantize(dtype)

    supply = shelf.supplier((scheme, name, dtype), weights)

    def make() -> tuple[Tensor, tuple[PackedWeight, Tensor]]:
        return normal(m, k, run.device, dtype), supply()

    def ours(x: Tensor, weight: tuple[PackedWeight, Tensor]) -> Tensor:
        return wna16_linear(x, weight[0], activation_dtype=_8_BIT[word])

    rivals = [
        cublas_rival(lambda x, weight: F.linear(x, weight[1])),
        PeerContender("wna16", warpbus.__version__, lambda x, weight: wna16_linear(x, weight[0])),
    ]
    label = scheme if word == "fp8" else f"{scheme}+{word}"
    return layer_case(run, name, m, dtype, label, make, ours, rivals, rate=_8_BIT_RATE, bits=scheme.bits_per_weight(k))


def random_weight(scheme: Scheme, n: int, k: int, device: torch.device) -> QTensor:
    """Codes of every value alike, and scales for which a product with normal numbers is about normal again."""
    codes = torch.randint(scheme.max_code + 1, (n, k), device=device, dtype=torch.uint8)
    groups = scheme.groups(k)
    deviation = scheme.max_code / 12**0.5  # of codes of every value alike
    scales = torch.rand(n, groups, device=device).add_(0.5) * (k**-0.5 / deviation)
    zeros = None
    if not scheme.symmetric:
        zeros = torch.randint(scheme.max_code + 1, (n, groups), device=device, dtype=torch.uint8)
    return QTensor.from_codes(scheme, codes, scales, zeros)


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("humming"):
        return "the package humming-kernels is not installed."
    said = str(error).strip().splitlines() or [""]
    return f"it does not work here ({type(error).__name__}: {said[0][:200]})."


def _w8a8_cases(run: Run) -> list[Callable[[], Case]]:
    variants = run.choose_variants(tuple(_8_BIT), tuple(_8_BIT))
    shelf = Shelf()
    return [
        partial(_8_bit_layer, run, variant, name, m, shelf)
        for variant in variants
        for name in _WIDE
        for m in run.choose_sizes(_8_BIT_ROWS, _8_BIT_ROWS[1:2])
    ]


def _8_bit_layer(run: Run, variant: str, name: str, m: int, shelf: Shelf) -> Case:
    dtype, codes = run.dtype or torch.bfloat16, _8_BIT[variant]
    n, k, _ = LAYERS[name]

    def weights(_: object) -> tuple[Tensor, Tensor, Tensor]:
        dense = normal(n, k, run.device, dtype, k**-0.5)
        return dense, *quantize_rows(dense, codes)

    supply = shelf.supplier((variant, name, dtype), weights)

    def make() -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        x = normal(m, k, run.device, dtype)
        return x, quantize_tokens(x, codes), supply()

    rivals = [cublas_rival(lambda x, _, weight: F.linear(x, weight[0]))]
    # torch's operators take activations that are quantized already.
    if codes == torch.float8_e4m3fn and dtype == torch.bfloat16:
        rivals.append(PeerContender("torch._scaled_mm", torch.__version__, partial(_scaled_mm, dtype)))
    elif codes == torch.int8 and m >= _INT_MM_ROWS:
        rivals.append(
            PeerContender("torch._int_mm", torch.__version__, lambda _, x, weight: torch._int_mm(x[0], weight[1].T))
        )

    def ours(x: Tensor, _: object, weight: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return w8a8_linear(x, weight[1], weight[2])

    return layer_case(run, name, m, dtype, variant, make, ours, rivals, rate=_8_BIT_RATE)


def _scaled_mm(
    dtype: torch.dtype, _: Tensor, x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    product: Tensor = torch._scaled_mm(
        x[0], weight[1].T, x[1][:, None], weight[2][None], out_dtype=dtype, use_fast_accum=True
    )
    return product


def _at(rows: tuple[int, ...], layers: tuple[str, ...]) -> Callable[[Mapping[str, Parameter]], bool]:
    return lambda case: case["m"] in rows and case["shape"] in layers


def _any_of(*groups: Callable[[Mapping[str, Parameter]], bool]) -> Callable[[Mapping[str, Parameter]], bool]:
    return lambda case: any(belongs(case) for belongs in groups)


_FEW_WIDE, _FEW_OTHERS = _at((1, 4, 8, 16), _WIDE), _at((1, 4, 8, 16), ("qkv", "o"))
_MIDDLE, _MANY = _at((64, 128), _WIDE), _at((256, 1024, 4096), _WIDE)

WNA16 = Benchmark(
    name="wna16",
    title="A linear layer with weights of few bits",
    cases=_wna16_cases,
    plot=Plot(x="m", x_label="rows of x", panels=("shape",)),
    needs_gpu=True,
    means={
        "m 1 to 16, gate_up and down": _FEW_WIDE,
        "m 1 to 16, qkv and o": _FEW_OTHERS,
        "m 64 and 128, gate_up and down": _MIDDLE,
        "m 256 to 4096, gate_up and down": _MANY,
        "all of these": _any_of(_FEW_WIDE, _FEW_OTHERS, _MIDDLE, _MANY),
    },
)

WNA8 = Benchmark(
    name="wna8",
    title="A linear layer with weights of few bits, activations rounded to 8 bits",
    cases=_wna8_cases,
    plot=Plot(x="m", x_label="rows of x", panels=("shape",)),
    needs_gpu=True,
    means={f"m {m}": _at((m,), tuple(LAYERS)) for m in _PROMPT_ROWS},
)

W8A8 = Benchmark(
    name="w8a8",
    title="A linear layer in 8 bits, activations quantized on the way",
    cases=_w8a8_cases,
    plot=Plot(x="m", x_label="rows of x", panels=("variant", "shape")),
    needs_gpu=True,
    means={f"m {m}": _at((m,), _WIDE) for m in _8_BIT_ROWS},
)
