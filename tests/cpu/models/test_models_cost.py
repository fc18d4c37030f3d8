"""What a model costs, against the model itself."""

import pytest
import torch
from dense_configs import with_traits
from torch import nn

from warpbus.kernels.ops.packed import pack
from warpbus.models import SHAPES, Decoder, ModelConfig, random_model
from warpbus.models.cost import MemoryNeed, TimeRange, forward_flop, packed_bytes, parameter_bytes
from warpbus.models.layers import QuantizedLinear
from warpbus.qtensor import QTensor, Scheme

W4 = Scheme.parse("w4a16-g128")
SMALL = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "ffn_size": 256}
GLM2 = with_traits(SHAPES["chatglm2-6b"], vocab_size=90, **SMALL)
KINDS = {
    "glm": GLM2,
    "tied": with_traits(GLM2, tie_embeddings=True, qk_norm=True, output_norms=True),
    "chatglm": with_traits(SHAPES["chatglm-6b"], vocab_size=90, **(SMALL | {"num_kv_heads": 4})),
}


@pytest.mark.parametrize("scheme", ["w4a16-g128", "w8a16-asym", "w3a16-g64-asym", "w2a16-g32"])
def test_packed_bytes_are_those_of_the_packed_matrix(scheme):
    chosen = Scheme.parse(scheme)
    codes = torch.zeros(40, 384, dtype=torch.uint8)
    ones = torch.ones(40, chosen.groups(384))
    weight = QTensor.from_codes(chosen, codes, ones, None if chosen.symmetric else ones)
    assert packed_bytes(chosen, 40, 384) == pack(weight, torch.float16).nbytes


@pytest.mark.parametrize("text", ["w8a8-int8", "w8a8-fp8"])
def test_w8a8_takes_its_values_and_scales_of_32_bits(text):
    scheme = Scheme.parse(text)
    weight = QTensor.from_values(scheme, torch.zeros(40, 384, dtype=scheme.dtype), torch.ones(40).half())
    layer = QuantizedLinear(weight, dtype=torch.float16)
    assert packed_bytes(scheme, 40, 384) == sum(buffer.nbytes for buffer in layer.buffers()) == 40 * 384 + 40 * 4


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_parameters_take_the_bytes_that_the_decoder_has(config: ModelConfig) -> None:
    with torch.device("meta"):
        parameters = dict(Decoder(config).to(torch.float16).named_parameters())
    assert config.parameters == {name: tuple(each.shape) for name, each in parameters.items()}
    found = parameter_bytes(config, torch.float16, {})
    assert found == {name: each.nbytes for name, each in parameters.items()}


def test_only_what_is_quantized_is_packed() -> None:
    found = parameter_bytes(GLM2, torch.float16, {"layers.1.mlp.down.weight": W4})
    plain = parameter_bytes(GLM2, torch.float16, {})
    assert found == plain | {"layers.1.mlp.down.weight": packed_bytes(W4, 128, 256)}


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_flop_are_two_for_each_element_that_a_token_is_multiplied_by(config: ModelConfig) -> None:
    model = random_model(config, None, "cpu", torch.float32)
    multiplied = [each.weight.numel() for each in model.layers.modules() if isinstance(each, nn.Linear)]
    assert forward_flop(config) == 2 * (sum(multiplied) + 90 * 128)


def test_a_need_is_the_sum_of_its_parts_unless_they_are_not_there_at_once() -> None:
    parts = {"states": 3 * 10**6, "layers": 2 * 10**9}
    need = MemoryNeed("cuda:1", parts, 2 * 10**9)
    assert need.total == 2_003_000_000
    assert not need.fits
    assert need.shortage() == "cuda:1: needs about 2.00 GB (states 3.0 MB, layers 2.00 GB), 2.00 GB free"
    assert MemoryNeed("cuda:1", parts, 2 * 10**9, peak=2 * 10**9).fits
    assert MemoryNeed("cuda:1", parts, None).fits


@pytest.mark.parametrize(
    ("least", "most", "text"),
    [
        (12.28, 39.01, "about 12 to 40 s"),
        (0.01239, 6.31, "about 0.012 to 6.4 s"),
        (0.0, 100.5, "about 0 to 101 s"),
        (59.9, 150.0, "about 0.99 to 2.5 min"),
        (3700.0, 7201.0, "about 1 to 2.1 h"),
        (86_400.0, 40 * 86_400.0, "about 1 to 40 d"),
    ],
)
def test_a_range_of_times_is_rounded_so_that_it_holds(least: float, most: float, text: str) -> None:
    assert str(TimeRange(least, most)) == text
