"""The formats behind their common interface: any matrix goes in and comes out, whatever the format."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from warpbus.errors import CheckpointError, SchemeError, UsageError, WarpbusError
from warpbus.formats import Checkpoint, CheckpointWriter, format_named, format_of, read_schemes
from warpbus.formats.format import FORMATS, WRITABLE
from warpbus.qtensor import QTensor, Scheme

INTEGER = [name for name in WRITABLE if name not in ("modelopt", "warpbus")]
"""The formats of integer codes."""

SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(directory: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    with CheckpointWriter(directory, overwrite=True) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.write_json("config.json", {})
        return Checkpoint(writer.finish())


@st.composite
def matrices(draw: st.DrawFn) -> QTensor:
    """Matrices of every scheme of weights, of rows that fill whole words and some that do not."""
    scheme = Scheme(
        draw(st.sampled_from([2, 3, 4, 5, 6, 8])), draw(st.sampled_from([None, 32, 64, 128])), draw(st.booleans())
    )
    out = draw(st.integers(1, 12)) * draw(st.sampled_from([1, 8, 32]))
    columns = draw(st.integers(1, 3)) * (scheme.group_size or draw(st.sampled_from([1, 8, 32])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    groups = scheme.groups(columns)
    codes = torch.randint(0, scheme.max_code + 1, (out, columns), generator=generator)
    scales = torch.randn(out, groups, generator=generator).half()
    zeros = None if scheme.symmetric else torch.randint(0, scheme.max_code + 1, (out, groups), generator=generator)
    return QTensor.from_codes(scheme, codes, scales, zeros)


@pytest.mark.parametrize("name", WRITABLE)
@SETTINGS
@given(weight=matrices())
def test_what_is_written_is_read_or_refused(name: str, weight: QTensor, tmp_path: Path) -> None:
    format = format_named(name)
    try:
        format.check(weight.scheme, weight.shape, "p")
        if weight.zeros is not None:
            format.check_zeros(weight.zeros, "p")
    except SchemeError:
        if name != "compressed-tensors":
            with pytest.raises(SchemeError, match=r"^p: "):
                format.to_tensors("p", weight)
        return
    tensors = format.to_tensors("p", weight)
    assert {name.removeprefix("p") for name in tensors} <= set(format.parts)
    checkpoint = write(tmp_path / "model", tensors)
    assert format.is_quantized(checkpoint, "p")
    assert sorted(format.stored(checkpoint, "p")) == checkpoint.names()
    read = format.from_tensors(checkpoint, "p", weight.scheme)
    assert torch.equal(read.codes(), weight.codes())
    assert torch.equal(read.scales, weight.scales)
    assert weight.zeros is None if read.zeros is None else torch.equal(read.zeros, weight.zeros)
    again = format.to_tensors("p", read)
    assert all(torch.equal(again[part], tensor) for part, tensor in tensors.items())


@pytest.mark.parametrize("name", INTEGER)
@SETTINGS
@given(data=st.data())
def test_shapes_that_do_not_fit_end_in_one_line(name: str, data: st.DataObject, tmp_path: Path) -> None:
    """Each tensor of a small file may have lost an edge, gained a row, or be of another type."""
    scheme = Scheme(4, 32, symmetric=False)
    weight = QTensor.from_codes(
        scheme, torch.full((16, 64), 3), torch.ones(16, 2).half(), torch.full((16, 2), 5, dtype=torch.uint8)
    )
    format = format_named(name)
    tensors = format.to_tensors("p", weight)
    part = data.draw(st.sampled_from(sorted(tensors)))
    tensor = tensors[part]
    change = data.draw(st.sampled_from(["cut", "grow", "type", "flat", "none"]))
    if change == "none":
        del tensors[part]
        if part.endswith("g_idx"):
            return
    else:
        tensors[part] = {
            "cut": tensor[:-1],
            "grow": torch.cat([tensor, tensor]),
            "type": tensor.to(torch.int16),
            "flat": tensor.reshape(1, -1, 1),
        }[change]
    with pytest.raises(WarpbusError) as caught:
        format.from_tensors(write(tmp_path / "model", tensors), "p", scheme)
    assert "p" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_names() -> None:
    assert [format.name for format in FORMATS] == [*INTEGER, "modelopt", "warpbus", "thudm"]
    assert INTEGER == ["compressed-tensors", "gptq", "gptq-v2", "awq"]
    with pytest.raises(
        UsageError,
        match=r"^format 'gguf': expected one of compressed-tensors, .*, warpbus; GGUF is written by warpbus convert$",
    ):
        format_named("gguf")


@pytest.mark.parametrize("name", INTEGER)
@pytest.mark.parametrize("scheme", ["w4a16-g128", "w4a16-asym"])
def test_each_format_knows_its_own_configurations(name: str, scheme: str) -> None:
    config = {"quantization_config": format_named(name).quantization_config(Scheme.parse(scheme), ["lm_head"])}
    assert [format.name for format in FORMATS if format.detect(config)] == [name]
    assert read_schemes(config).of("model.layers.0.mlp.up_proj") == Scheme.parse(scheme)


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_bit": 0}])
def test_a_plain_model(config: dict[str, Any]) -> None:
    assert format_of(config) is None
    assert read_schemes(config).distinct() == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": "w4a16"}, "quantization_config is 'w4a16', expected an object"),
        ({"quantization_config": {}}, "quant_method is None, expected 'compressed-tensors', 'gptq', 'awq' or 'fp8'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method is 'bitsandbytes', expected"),
    ],
)
def test_formats_that_are_not_understood(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: .*{message}.* this kind of quantization is not"):
        format_of(config)
