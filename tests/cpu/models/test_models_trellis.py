"""Models of trellises where a device has kernels for them: codes are kept. A CPU stands in for that device."""

from pathlib import Path

import pytest
import torch
from quantized_files import CHATGLM6B, HF, write_quantized
from thread_groups import GLM4_MOE, together

from warpbus.engine.plan import Stored, plan_memory
from warpbus.errors import TensorError
from warpbus.formats import Checkpoint, format_of
from warpbus.kernels.ops.trellis_dequantize import BUFFER_BYTES
from warpbus.kernels.ops.trellis_packed import PackedTrellis, pack_trellis
from warpbus.models import Decoder, load_layer, load_model, quantized_parameters, read_config
from warpbus.models.cost import packed_bytes
from warpbus.models.layers import QuantizedLinear, RMSNorm, project
from warpbus.models.placement import keeps_trellises
from warpbus.qtensor import QTensor, Scheme

W3 = Scheme.parse("w3a16-trellis")
DTYPE = torch.bfloat16
KINDS = {
    "glm": HF,
    "chatglm-6b": CHATGLM6B | {"hidden_size": 128, "num_attention_heads": 4},  # whose rows are stored by head
    "experts": GLM4_MOE,
}
TOKENS = torch.tensor([[40, *range(2, 30), 40]])


@pytest.fixture
def kernels(monkeypatch):
    """As if this device had them; operators run their references."""
    monkeypatch.setattr("warpbus.models.placement.gpu_has_kernels", lambda device: True)


@pytest.fixture(scope="module", params=KINDS)
def directory(request, tmp_path_factory) -> Path:
    return write_quantized(tmp_path_factory.mktemp("trellis") / "model", KINDS[request.param], "warpbus", str(W3))[0]


@pytest.fixture(scope="module")
def glm(tmp_path_factory) -> Path:
    return write_quantized(tmp_path_factory.mktemp("trellis") / "model", HF, "warpbus", str(W3))[0]


def load(directory: Path, dtype: torch.dtype = DTYPE, **options: object) -> Decoder:
    return load_model(Checkpoint(directory), device="cpu", dtype=dtype, **options)


def linears(model: torch.nn.Module) -> dict[str, QuantizedLinear]:
    return {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}


@torch.no_grad()
def test_codes_are_kept(directory, kernels):
    model, exact = load(directory), load(directory, torch.float32)
    checkpoint = Checkpoint(directory)
    kept = quantized_parameters(checkpoint, read_config(checkpoint), trellises=True)
    assert {f"{name}.weight" for name in linears(model)} == set(kept)
    assert set(kept.values()) == {W3}
    for name, linear in linears(model).items():
        assert isinstance(linear.form, PackedTrellis)
        assert linear.form.nbytes == packed_bytes(W3, linear.out_features, linear.in_features)
        torch.testing.assert_close(
            linear.weight.dequantize(torch.float32), exact.get_parameter(f"{name}.weight"), rtol=0, atol=0
        )
    assert not linears(exact)  # float32 has no kernels
    expected, most = exact(TOKENS), 0.2 if model.config.has_experts else 0.05  # a token may choose other experts
    assert (model(TOKENS).float() - expected).norm() < most * expected.norm()
    layer = load_layer(checkpoint, read_config(checkpoint), 1, device="cpu", dtype=DTYPE)
    assert all(isinstance(each.form, PackedTrellis) for each in linears(layer).values())


def test_without_kernels_matrices_are_dequantized(directory):
    assert not keeps_trellises("cpu", DTYPE)
    assert not linears(load(directory))
    checkpoint = Checkpoint(directory)
    assert quantized_parameters(checkpoint, read_config(checkpoint)) == {}
    assert format_of(checkpoint.config) is None
    assert format_of(checkpoint.config, trellises=True).name == "warpbus"


def test_several_processes_have_them_dequantized(glm, kernels):
    """Columns of a trellis are rotated together, and cannot be cut."""
    parts = together(2, lambda group: (model := load(glm, group=group), model(TOKENS)))
    assert not any(linears(model) for model, _ in parts)
    with torch.no_grad():
        expected = load(glm)(TOKENS).float()
    assert (parts[0][1].float() - expected).norm() < 0.05 * expected.norm()


def test_a_damaged_file_is_refused(glm, kernels):
    checkpoint = Checkpoint(glm)
    name = "model.layers.0.mlp.down_proj.weight_trellis"
    tensors = {each: checkpoint.stored(each) for each in checkpoint.names() if each != name}
    tensors[name] = checkpoint.stored(name.replace("down_proj", "gate_up_proj"))
    with pytest.raises(TensorError, match=r"weight_scale has shape \[64, 1\], expected \[320, 1\]"):
        load_model(Checkpoint.of_tensors(glm, tensors, checkpoint.config), device="cpu", dtype=DTYPE)


def test_the_plan_counts_the_codes(glm):
    checkpoint = Checkpoint(glm)
    config = read_config(checkpoint)
    halves, wide = (Stored.of_checkpoint(checkpoint, config, dtype) for dtype in (DTYPE, torch.float32))
    down = "layers.1.mlp.down.weight"
    n, k = config.parameters[down]
    assert halves.sizes[down] == packed_bytes(W3, n, k)
    assert wide.sizes[down] == 4 * n * k
    assert halves.shared(2).quantized == {}
    plain = Stored(config, DTYPE, {})
    more = plan_memory(halves, 10**10).parts["workspace"] - plan_memory(plain, 10**10).parts["workspace"]
    assert more == BUFFER_BYTES


def weight_of(n: int, k: int) -> QTensor:
    words = torch.randint(-(2**31), 2**31, (n, k * 3 // 32), dtype=torch.int64).to(torch.int32)
    return QTensor(W3, words, torch.rand(n, 1) + 0.5, None, (n, k))


def test_a_layer_moves_without_losing_its_scales(seed):
    weight = weight_of(32, 96)
    layer = QuantizedLinear(pack_trellis(weight, torch.float16))
    assert set(layer.state_dict()) == {"codes", "scales", "signs"}
    assert (layer.codes.numel(), layer.signs.numel()) == (32 * 128 * 3 // 32, 96 // 8)
    other = QuantizedLinear(pack_trellis(weight_of(32, 96), torch.float16))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 96).half()
    assert torch.equal(other(x), layer(x))
    moved = layer.to(torch.bfloat16)  # a CPU has no other form than the matrix itself
    assert isinstance(moved.form, QTensor)
    assert moved.scales.dtype == torch.float32
    assert torch.equal(moved.weight.qweight, weight.qweight)
    assert torch.equal(moved.weight.scales, weight.scales)
    assert moved(x.bfloat16()).dtype == torch.bfloat16


@torch.no_grad()
def test_a_projection_with_what_surrounds_it(seed):
    weight, norm = weight_of(64, 96), RMSNorm(96, 1e-5).to(DTYPE)
    norm.weight.uniform_(0.5, 1.5)
    x, residual = torch.randn(2, 5, 96).to(DTYPE), torch.randn(2, 5, 32).to(DTYPE)
    packed, held = QuantizedLinear(pack_trellis(weight, DTYPE)), QuantizedLinear(weight, dtype=DTYPE)
    found, expected = (
        project(each, x, norm=norm, residual=residual, activation="swiglu").float() for each in (packed, held)
    )
    assert (found - expected).norm() < 0.02 * expected.norm()
