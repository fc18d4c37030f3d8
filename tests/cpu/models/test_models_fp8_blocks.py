"""Models written in FP8 with a scale per block: they are read as what was rounded."""

import json
import shutil

import pytest
import torch
from quantized_files import HF, all_tensors, plain_tensors, write_files, write_quantized

from warpbus.errors import NumericError, UsageError
from warpbus.formats import Checkpoint
from warpbus.formats.dequantizing import dequantized
from warpbus.formats.fp8 import fp8_matrices
from warpbus.models import load_model
from warpbus.models.convert import convert
from warpbus.models.fp8_blocks import to_blocks

TOKENS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("shape", [(128, 256), (130, 300), (1, 1), (127, 129)])
def test_each_block_has_its_own_scale(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.1
    values, scales = to_blocks(weight, "p")
    assert tuple(scales.shape) == (-(-shape[0] // 128), -(-shape[1] // 128))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
            assert float(scales[row, column]) == pytest.approx(float(weight[block].abs().max()) / 448)
            found = values[block].float() * scales[row, column]
            # Four significant bits, and the smallest numbers in steps of 2^-9.
            torch.testing.assert_close(found, weight[block], rtol=2**-4, atol=float(scales[row, column]) * 2**-10)


def test_zeros_stay_zeros_and_nan_is_refused():
    values, scales = to_blocks(torch.zeros(3, 3), "p")
    assert not values.float().any()
    assert float(scales) == 1
    with pytest.raises(NumericError, match="p: NaN or infinity"):
        to_blocks(torch.tensor([[float("nan")]]), "p")


def test_a_model_is_written_read_and_converted_back(tmp_path):
    values = HF | {"vocab_size": 48, "hidden_size": 192, "intermediate_size": 320}
    source = write_files(tmp_path / "model", values, plain_tensors(values))
    done = convert(source, tmp_path / "out", to="fp8-block")
    found = Checkpoint(tmp_path / "out")
    assert (done.matrices, done.bytes_after) == (len(fp8_matrices(found)), found.total_bytes)
    quantization = found.config["quantization_config"]
    assert quantization["weight_block_size"] == [128, 128]
    assert quantization["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]
    read, before = dequantized(found, torch.float32), all_tensors(source)
    assert read.names() == sorted(before)
    for name, expected in before.items():
        error = (read.tensor(name) - expected.float()).norm()
        assert error <= (0.03 if name in fp8_matrices(found) else 0) * expected.float().norm(), name
    model = load_model(found, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        assert model(TOKENS).isfinite().all()
    convert(tmp_path / "out", tmp_path / "again", to="float16")
    again = convert(tmp_path / "again", tmp_path / "twice", to="fp8-block")
    assert again.matrices == done.matrices
    for name in fp8_matrices(found):
        difference = found.tensor(name).float() - Checkpoint(tmp_path / "twice").tensor(name).float()
        assert difference.abs().max() <= 32  # one step at 448: the scales of float16 weights differ a little


def test_what_has_no_such_form_is_refused(tmp_path):
    quantized, _ = write_quantized(tmp_path / "q", HF, "compressed-tensors", "w4a16-g32")
    with pytest.raises(UsageError, match="is quantized to integers: convert it to bfloat16 first"):
        convert(quantized, tmp_path / "out", to="fp8-block")
    source = write_files(tmp_path / "model", HF, plain_tensors(HF))
    with pytest.raises(UsageError, match="replacing it would delete"):
        convert(source, source, to="fp8-block", overwrite=True)
    within = shutil.copytree(source, tmp_path / "q" / "within")
    with pytest.raises(UsageError, match="replacing it would delete"):
        convert(within, quantized, to="fp8-block", overwrite=True)
    with pytest.raises(UsageError, match="not widened in FP8"):
        convert(source, tmp_path / "out", to="fp8-block", pad_ffn="auto")
    assert json.loads((source / "config.json").read_text())["model_type"] == "glm"
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_the_same_weights(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers needs for FP8")
    transformers = pytest.importorskip("transformers")
    # Its dequantizer wants sizes that the number of blocks divides.
    values = HF | {"hidden_size": 256, "intermediate_size": 384, "architectures": ["GlmForCausalLM"], "pad_token_id": 0}
    convert(write_files(tmp_path / "model", values, plain_tensors(values)), tmp_path / "out", to="fp8-block")
    options = transformers.FineGrainedFP8Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=options
    )
    expected = dequantized(Checkpoint(tmp_path / "out"), torch.bfloat16)
    names = fp8_matrices(Checkpoint(tmp_path / "out"))
    assert names
    parameters = dict(model.named_parameters())
    for name in names:
        assert torch.equal(parameters[name].detach(), expected.tensor(name)), name
