"""The cases of `wna16` and `w8a8` on the CPU: what is compared with what, and on which bytes."""

import sys
import types

import pytest
import torch

from warpbus.bench import cases, quantized, timing
from warpbus.bench.cases import Run, geometric_means, run
from warpbus.bench.peers import Humming, Tinygemm
from warpbus.bench.quantized import W8A8, WNA8, WNA16, random_weight
from warpbus.bench.timing import TimingEffort
from warpbus.errors import SchemeError, UsageError
from warpbus.kernels.ops.packed import unpack
from warpbus.qtensor import QTensor, Scheme
from warpbus.qtensor.packing import unpack as unpack_bits

CPU = torch.device("cpu")
SMALL = {"qkv": (48, 128, "rows"), "gate_up": (64, 256, "rows")}


def settings(**changes):
    return Run(**{"device": CPU, "command": "warpbus bench x", "quick": True, **changes})


@pytest.fixture
def small(monkeypatch):
    """Little layers on the CPU, where there is no tinygemm."""
    monkeypatch.setattr(quantized, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(quantized, "matrix_rate", lambda device, dtype: 1e11)
    monkeypatch.setattr(cases, "QUICK", TimingEffort(samples=2, sample_seconds=1e-6, seconds=0.1))
    monkeypatch.setattr(timing, "cpu_cache_bytes", lambda: 2**12)
    monkeypatch.setattr(quantized, "LAYERS", SMALL)
    monkeypatch.setattr(Tinygemm, "takes", staticmethod(lambda scheme, n, k: False))


def test_every_layer_at_every_number_of_rows():
    cases = WNA16.cases(settings(quick=False))
    assert len(cases) == 4 * 9
    assert len(WNA16.cases(settings())) == 4 * 3
    assert len(WNA16.cases(settings(sizes=(5,), variants=("w4a16-g32", "w8a16-asym")))) == 2 * 4


def test_a_variant_is_a_scheme_that_fits():
    with pytest.raises(SchemeError, match="unknown scheme 'int3'"):
        WNA16.cases(settings(variants=("int3",)))


@pytest.mark.parametrize("name", ["w4a16-g128", "w8a16-g64-asym", "w3a16"])
def test_a_case_multiplies_the_same_matrix_in_every_form(small, name):
    asked = settings(variants=(name,), sizes=(3,))
    for prepare, (layer, (n, k, _)) in zip(WNA16.cases(asked), SMALL.items(), strict=True):
        case = prepare()
        scheme = Scheme.parse(name)
        assert case.parameters == {
            "shape": layer,
            "m": 3,
            "n": n,
            "k": k,
            "dtype": "float16",
            "variant": name,
        }
        assert case.metric == "time"
        assert case.touched == int(scheme.bits_per_weight(k) * n * k / 8) + 2 * 3 * (n + k)
        assert [rival.name for rival in case.rivals] == ["cuBLAS"]
        x, _, weights = inputs = case.make()
        expected = x.float() @ unpack(weights.packed).dequantize(torch.float32).T
        dense = case.rivals[0].call(*inputs)
        assert (dense - expected).norm() / expected.norm() < 2e-3
    assert asked.notes == ["humming was left out: the package humming-kernels is not installed."]


def test_products_are_about_normal():
    for name in ("w4a16-g128", "w8a16-asym", "w2a16-g32"):
        scheme = Scheme.parse(name)
        weight = random_weight(scheme, 64, 1024, CPU).dequantize(torch.float32)
        assert 0.5 < (torch.randn(32, 1024) @ weight.T).std() < 3


def test_weights_are_kept_from_case_to_case():
    shelf = quantized.Shelf()
    reported = []

    def make(first):
        reported.append(first)
        return object()

    first = shelf.supplier("qkv", make)
    made = [first(), first()]
    assert reported == [None, made[0]]
    again = shelf.supplier("qkv", make)
    assert [again(), again()] == made
    assert again() not in made
    other = shelf.supplier("down", make)
    assert other() not in made
    assert reported[-1] is None


def test_means_of_what_was_promised(small, monkeypatch):
    monkeypatch.setattr(quantized, "wna16_linear", lambda x, weight: x @ unpack(weight).dequantize(x.dtype).T)
    benchmark = type(WNA16)(**{**vars(WNA16), "needs_gpu": False})
    records = run(benchmark, settings(sizes=(1, 256)))
    assert [(record.case["shape"], record.case["m"]) for record in records] == [
        *(("qkv", 1), ("qkv", 256)),
        *(("gate_up", 1), ("gate_up", 256)),
    ]
    by_case = {(record.case["shape"], record.case["m"]): record.ratio for record in records}
    means = geometric_means(benchmark, records)
    assert means["m 1 to 16, qkv and o"] == pytest.approx(by_case["qkv", 1])
    assert means["m 256 to 4096, gate_up and down"] == pytest.approx(by_case["gate_up", 256])
    # qkv at 256 rows is no promise.
    product = by_case["qkv", 1] * by_case["gate_up", 1] * by_case["gate_up", 256]
    assert means["all of these"] == pytest.approx(product ** (1 / 3))


class FakeLayer(torch.nn.Module):
    """Takes what the package's layer takes, and writes it down."""

    def __init__(self, shape_n, shape_k, weight_config, torch_dtype):
        super().__init__()
        self.made = (shape_n, shape_k, weight_config, torch_dtype)
        self.humming_config = types.SimpleNamespace(to_str=lambda: "{}")

    def load_from_tensors(self, tensors):
        self.tensors = tensors

    def transform(self):
        self.weight = torch.nn.Parameter(self.tensors["weight"], requires_grad=False)

    def forward(self, x, tuning_config):
        return tuning_config


def test_humming_gets_the_codes_and_its_own_choice_of_kernels(monkeypatch):
    compiled = []
    kernel = types.SimpleNamespace(prepare_kernels=lambda *given: compiled.append(given))
    for name, contents in {
        "humming": {},
        "humming.layer": {"HummingLayer": FakeLayer},
        "humming.tune": {"get_heuristics_config": lambda config, shape_m, device: {"block": shape_m}},
        "humming.kernel": {},
        "humming.kernel.humming": {"HummingKernel": kernel},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    weight = random_weight(Scheme.parse("w4a16-g64-asym"), 32, 128, CPU)
    made = Humming.of(weight, torch.float16, (1, 16))
    assert made.layer.made == (32, 128, {"dtype": "uint4", "group_size": 64, "has_zero_point": True}, torch.float16)
    tensors = made.layer.tensors
    assert torch.equal(unpack_bits(tensors["weight"], 4, 128), weight.codes())
    assert torch.equal(unpack_bits(tensors["zero_point"].T.contiguous(), 4, 32).T, weight.zeros)
    assert tensors["weight_scale"].dtype == torch.float16
    assert made.parts[0].data_ptr() == weight.qweight.data_ptr()
    assert compiled[0][2] == [(0, 2**30, {"block": 1}), (0, 2**30, {"block": 16})]
    assert made(torch.empty(16, 128)) == '{"block": 16}'


def test_what_tinygemm_takes():
    assert Tinygemm.takes(Scheme.parse("w4a16-g128"), 27392, 4096)
    assert Tinygemm.takes(Scheme.parse("w4a16-g32-asym"), 4096, 13696)
    assert not Tinygemm.takes(Scheme.parse("w8a16-g128"), 4096, 4096)
    assert not Tinygemm.takes(Scheme.parse("w4a16"), 4096, 4096)
    assert not Tinygemm.takes(Scheme.parse("w4a16-g32"), 4096, 3424)


def test_tinygemm_means_the_same_numbers(monkeypatch):
    """`(code - 8) * scale + zero` of what is handed over is the weight."""
    handed = {}
    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", lambda codes, tiles: handed.update(codes=codes))
    weight = random_weight(Scheme.parse("w4a16-g32-asym"), 16, 128, CPU)
    made = Tinygemm.of(weight)
    high, low = handed["codes"] >> 4, handed["codes"] & 15
    codes = torch.stack([high, low], dim=-1).flatten(1)
    scales, zeros = (part.T.float().repeat_interleave(32, dim=1) for part in made.scales_and_zeros.unbind(-1))
    found = (codes.float() - 8) * scales + zeros
    expected = weight.dequantize(torch.float32)
    assert made.group_size == 32
    assert (found - expected).norm() / expected.norm() < 1e-2
    assert isinstance(weight, QTensor)


def test_w8a8_quantizes_on_the_way_and_its_peers_do_not(small, monkeypatch):
    monkeypatch.setattr(quantized, "_WIDE", ("gate_up",))
    assert len(W8A8.cases(settings(quick=False))) == 2 * 4
    for variant, peer in (("fp8", "torch._scaled_mm"), ("int8", "torch._int_mm")):
        for prepare, m in zip(W8A8.cases(settings(sizes=(4, 32), variants=(variant,))), (4, 32), strict=True):
            case = prepare()
            assert case.parameters["variant"] == variant
            assert case.parameters["dtype"] == "bfloat16"
            assert case.touched == 64 * 256 + 2 * m * (64 + 256)
            names = [rival.name for rival in case.rivals]
            assert names == (["cuBLAS"] if (variant, m) == ("int8", 4) else ["cuBLAS", peer])
            inputs = case.make()
            product = case.ours(*inputs).float()
            dense = case.rivals[0].call(*inputs).float()
            assert (product - dense).norm() / dense.norm() < 0.05


def test_what_w8a8_cannot_be_asked_for():
    with pytest.raises(UsageError, match="--variant int4: there is no such variant: choose among fp8, int8"):
        W8A8.cases(settings(variants=("int4",)))


@pytest.mark.parametrize(("variant", "least"), [("w4a16-g128", 0.01), ("w4a16-g128+int8", 0.003)])
def test_prompts_with_activations_in_8_bits_beside_16_bits(small, variant, least):
    assert len(WNA8.cases(settings(quick=False))) == 2 * 4
    asked = settings(sizes=(512,), variants=(variant,))
    for prepare, (layer, (n, k, _)) in zip(WNA8.cases(asked), SMALL.items(), strict=True):
        case = prepare()
        assert (case.parameters["shape"], case.parameters["variant"]) == (layer, variant)
        assert case.work == 2 * 512 * n * k
        assert [rival.name for rival in case.rivals] == ["cuBLAS", "wna16"]
        inputs = case.make()
        product, dense, exact = (call(*inputs).float() for call in (case.ours, *(each.call for each in case.rivals)))
        assert (exact - dense).norm() < 0.01 * dense.norm()
        assert least < (product - dense).norm() / dense.norm() < 0.05


def test_what_wna8_cannot_be_asked_for():
    with pytest.raises(UsageError, match="wna8 has no kernel for w8a16 and fp8: give up to 4 bits"):
        WNA8.cases(settings(variants=("w8a16",)))
    with pytest.raises(UsageError, match=r"activations are fp8 or int8: give w4a16[+]int8"):
        WNA8.cases(settings(variants=("w4a16+int4",)))
    with pytest.raises(UsageError, match="wna8 multiplies 512 rows and more, not 16"):
        WNA8.cases(settings(sizes=(16, 512)))
