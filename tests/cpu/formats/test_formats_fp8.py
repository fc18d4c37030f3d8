"""FP8 checkpoints are dequantized while they are read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_files import BLOCK, PER_TOKEN, STATIC, compressed, from_fp8, to_fp8, write_fp8
from torch import Tensor

from warpbus.errors import CheckpointError, TensorError
from warpbus.formats import Checkpoint, format_of, read_schemes
from warpbus.formats.fp8 import dequantized

NAME = "model.layers.0.mlp.down_proj.weight"
BLOCK_SCALES = "model.layers.0.mlp.down_proj.weight_scale_inv"
SCALES = "model.layers.0.mlp.down_proj.weight_scale"


def matrix(rows: int = 100, columns: int = 70) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator)
    return weight * torch.logspace(-3, 1, rows)[:, None]


def checkpoint(directory: Path, quantization: dict[str, Any], tensors: dict[str, Tensor], **config: Any) -> Checkpoint:
    return Checkpoint(write_fp8(directory, {"quantization_config": quantization, **config}, tensors))


@pytest.mark.parametrize(
    ("quantization", "height", "width", "shape"),
    [
        (BLOCK, 48, 32, (3, 3)),
        (compressed("block", PER_TOKEN, block_structure=[48, 32]), 48, 32, (3, 3)),
        (compressed("channel", None), 1, 70, (100, 1)),
        (compressed("tensor", STATIC), 100, 70, (1,)),
        (compressed("tensor", STATIC), 100, 70, ()),
    ],
    ids=["fp8", "block", "channel", "tensor", "scalar"],
)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_products_with_their_scales(
    tmp_path: Path, quantization: dict[str, Any], height: int, width: int, shape: Any, scale_dtype: torch.dtype
) -> None:
    values, scales = to_fp8(matrix(), height, width)
    scales = scales.to(scale_dtype)
    suffix = "_inv" if quantization["quant_method"] == "fp8" else ""
    tensors = {NAME: values, SCALES + suffix: scales.reshape(shape), "norm.weight": torch.ones(4)}
    if quantization["quant_method"] != "fp8":
        tensors["model.layers.0.mlp.down_proj.input_scale"] = torch.ones(1)
    read = dequantized(checkpoint(tmp_path, quantization, tensors), torch.float32)
    expected = from_fp8(values, scales, height, width)
    assert read.names() == [NAME, "norm.weight"]
    assert "quantization_config" not in read.config
    assert (read.shape(NAME), read.dtype(NAME), read.nbytes(NAME)) == ((100, 70), torch.float32, 28000)
    assert torch.equal(read.tensor(NAME), expected.float())
    assert format_of(read.config) is None
    assert read_schemes({"quantization_config": quantization}).distinct() == ()


@pytest.mark.parametrize("declared", [{"torch_dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "float32"}, {}])
def test_the_dtype_is_that_of_the_model(tmp_path: Path, declared: dict[str, str]) -> None:
    values, scales = to_fp8(matrix(), 48, 32)
    read = dequantized(checkpoint(tmp_path, BLOCK, {NAME: values, BLOCK_SCALES: scales}, **declared))
    dtype = getattr(torch, next(iter(declared.values()), "bfloat16"))
    assert read.dtype(NAME) == dtype
    assert torch.equal(read.tensor(NAME), from_fp8(values, scales, 48, 32).float().to(dtype))


def test_chunks_are_the_bytes_of_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpbus.formats.stored._ELEMENTS_AT_ONCE", 7 * 70)  # bands that end within a block
    values, scales = to_fp8(matrix(), 48, 32)
    read = dequantized(checkpoint(tmp_path, BLOCK, {NAME: values, BLOCK_SCALES: scales}))
    chunks = [bytes(chunk) for chunk in read.chunks(NAME)]
    assert len(chunks) == 15
    whole = read.tensor(NAME)
    assert b"".join(chunks) == whole.view(torch.uint8).numpy().tobytes()
    assert torch.equal(whole, from_fp8(values, scales, 48, 32).float().bfloat16())


def test_other_checkpoints_are_returned_unchanged(tmp_path: Path) -> None:
    plain = Checkpoint(write_fp8(tmp_path, {}, {NAME: matrix()}))
    assert dequantized(plain) is plain
    packed = {"quantization_config": compressed("channel", None, type="int", num_bits=4)}
    other = Checkpoint(write_fp8(tmp_path, packed, {NAME: matrix()}))
    assert dequantized(other) is other


def test_channels_with_activations_per_token_stay_a_scheme() -> None:
    config = {"quantization_config": compressed("channel", PER_TOKEN)}
    format = format_of(config)
    assert format is not None
    assert format.name == "compressed-tensors"
    assert str(read_schemes(config)) == "w8a8-fp8"


VALUES, OWN_SCALES = to_fp8(matrix(), 48, 32)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({NAME: VALUES}, rf"{BLOCK_SCALES} is missing"),
        ({BLOCK_SCALES: OWN_SCALES}, rf"{NAME}: expected torch.float8_e4m3fn.*no such tensor"),
        ({NAME: matrix(), BLOCK_SCALES: OWN_SCALES}, rf"{NAME}: expected torch.float8_e4m3fn.*found torch.float32"),
        (
            {NAME: matrix().to(torch.float8_e5m2), BLOCK_SCALES: OWN_SCALES},
            rf"{NAME}: expected torch.float8_e4m3fn.*e5m2",
        ),
        ({NAME: VALUES, BLOCK_SCALES: OWN_SCALES.int()}, rf"{BLOCK_SCALES}: expected floating point.*int32"),
        ({NAME: VALUES, BLOCK_SCALES: VALUES[:3, :3].contiguous()}, rf"{BLOCK_SCALES}: expected floating point.*e4m3"),
        ({NAME: VALUES, BLOCK_SCALES: OWN_SCALES[:2]}, rf"{BLOCK_SCALES}: expected shape \[3, 3\].*found \[2, 3\]"),
        ({NAME: VALUES, BLOCK_SCALES: OWN_SCALES.flatten()}, r"expected shape \[3, 3\].*found \[9\]"),
        ({NAME: VALUES[0].contiguous(), BLOCK_SCALES: OWN_SCALES}, rf"{NAME}: expected a matrix"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, tensors: dict[str, Tensor], match: str) -> None:
    with pytest.raises(TensorError, match=match) as caught:
        dequantized(checkpoint(tmp_path, BLOCK, tensors))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("quantization", "match"),
    [
        (BLOCK | {"weight_block_size": size}, r"weight_block_size is .*, expected two positive integers")
        for size in (None, 128, [128], [128, 0], [128, -1], [128.0, 128], [True, 128], "128", [1, 2, 3])
    ]
    + [
        (BLOCK | {"fmt": "e5m2"}, r"fmt is 'e5m2', expected 'e4m3'"),
        (BLOCK | {"activation_scheme": "static"}, r"activation_scheme is 'static'"),
        (compressed("group", None), r"group_0\.weights\.strategy is 'group'"),
        (compressed("tensor", None, symmetric=False), r"group_0\.weights\.symmetric is False"),
        (compressed("tensor", None, dynamic=True), r"group_0\.weights\.dynamic is True"),
        (compressed("block", None), r"block_structure is None, expected two positive integers"),
        (compressed("tensor", None) | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ],
)
def test_configs_that_are_not_supported(tmp_path: Path, quantization: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        dequantized(checkpoint(tmp_path, quantization, {NAME: VALUES, BLOCK_SCALES: OWN_SCALES}))
    with pytest.raises(CheckpointError, match=match):
        format_of({"quantization_config": quantization})


def test_groups_of_different_strategies_are_refused(tmp_path: Path) -> None:
    quantization = compressed("tensor", None)
    quantization["config_groups"]["group_1"] = compressed("channel", None)["config_groups"]["group_0"]
    with pytest.raises(CheckpointError, match=r"group_1\.weights\.strategy is 'channel', expected the same"):
        dequantized(checkpoint(tmp_path, quantization, {NAME: VALUES, SCALES: OWN_SCALES}))
