"""`QuantizedEmbedding`: forms, devices and dtypes; in an engine, and with its numbers in a plan's file."""

import pytest
import torch

import warpbus
from warpbus.errors import CheckpointError, TensorError
from warpbus.formats import Checkpoint
from warpbus.kernels.ops.packed import PackedWeight, pack
from warpbus.kernels.ops.rounding import round_to_nearest
from warpbus.models import load_model, quantized_parameters, read_config
from warpbus.models.layers import QuantizedEmbedding
from warpbus.models.stored_schemes import dtype_of_weights
from warpbus.qtensor import QTensor, Scheme

TOKENS = torch.tensor([[3, 0, 59], [59, 1, 1]])


def matrix(scheme="w8a16-g32", dtype=torch.float32):
    torch.manual_seed(0)
    return round_to_nearest(torch.randn(60, 64), Scheme.parse(scheme), scale_dtype=dtype)


@pytest.mark.parametrize("scheme", ["w8a16-g32", "w8a16", "w4a16-g64", "w8a16-g32-asym", "w3a16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lookup_gives_rows_of_the_dequantized_matrix(scheme, dtype):
    weight = matrix(scheme)
    embedding = QuantizedEmbedding(weight, dtype=dtype)
    assert torch.equal(embedding(TOKENS), weight.dequantize(dtype)[TOKENS])
    assert torch.equal(embedding(TOKENS.int()), weight.dequantize(dtype)[TOKENS])
    assert not embedding(TOKENS).requires_grad
    assert (embedding.num_embeddings, embedding.embedding_dim, embedding.device.type) == (60, 64, "cpu")
    assert str(embedding) == f"QuantizedEmbedding(60, 64, {scheme})"


@pytest.mark.parametrize("scheme", ["w8a16-g32", "w8a16-g32-asym"])
def test_another_dtype_rounds_the_scales(scheme):
    weight = matrix(scheme)
    embedding = QuantizedEmbedding(weight, dtype=torch.float32).to(torch.float16)
    assert embedding(TOKENS).dtype == torch.float16
    assert torch.equal(embedding(TOKENS), weight.dequantize(torch.float16)[TOKENS])
    assert embedding.scales.dtype == torch.float16
    assert embedding.to("meta").device.type == "meta"


def test_a_packed_matrix_gives_the_same_rows_and_is_unpacked_to_move():
    packed = pack(matrix(), torch.float16)
    embedding = QuantizedEmbedding(packed, dtype=torch.float16)
    assert isinstance(embedding.form, PackedWeight)
    expected = matrix().dequantize(torch.float16)[TOKENS]
    assert torch.equal(embedding(TOKENS), expected)
    assert set(dict(embedding.named_buffers())) == {"codes", "scales"}
    moved = embedding.to("cpu")
    assert isinstance(moved.form, QTensor)  # no kernels here
    assert torch.equal(moved(TOKENS), expected)


def test_only_codes_can_be_looked_up():
    values = QTensor.from_values(Scheme.parse("w8a8-int8"), torch.ones(4, 8, dtype=torch.int8), torch.ones(4))
    with pytest.raises(TensorError, match="QuantizedEmbedding: the weight is w8a8-int8"):
        QuantizedEmbedding(values, dtype=torch.float32)


@pytest.fixture(scope="module")
def quantized(make_model, tmp_path_factory):
    base = tmp_path_factory.mktemp("quantized")
    model = make_model(base / "model", tie_word_embeddings=True)
    options = {"scheme": "w4a16-g32", "algorithm": "rtn", "device": "cpu"}
    warpbus.quantize(model, base / "plain", **options)
    warpbus.quantize(model, base / "out", embedding="w8a16-g32", **options)
    return base


def test_an_engine_generates_with_it(quantized):
    """On the CPU the head of a quantized model is rounded to 8 bits anyway: here it is that of the file."""
    llm = warpbus.LLM(str(quantized / "out"), device="cpu", dtype="float32")
    assert isinstance(llm.model.embedding, QuantizedEmbedding)
    assert str(llm.model.head.scheme) == "w8a16-g32"
    prompts = [[5, 6, 7, 8], [9]]
    answers = llm.generate(prompts, warpbus.SamplingParams(max_tokens=6, temperature=0))
    model = load_model(Checkpoint(quantized / "out"), device="cpu", dtype=torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = [*prompt, *answer.token_ids]
        with torch.no_grad():
            scores = model(torch.tensor([ids]))[0, len(prompt) - 1 : -1]
        chosen = scores.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (scores.amax(1) - chosen).max() < 0.05


def test_the_dtype_of_the_weights_is_that_of_the_scales(quantized):
    for name in ("plain", "out"):
        checkpoint = Checkpoint(quantized / name)
        assert dtype_of_weights(checkpoint, read_config(checkpoint)) == torch.float32
    assert str(quantized_parameters(checkpoint, read_config(checkpoint))["embedding.weight"]) == "w8a16-g32"


def test_another_format_with_a_quantized_embedding_is_refused(quantized, tmp_path):
    checkpoint = Checkpoint(quantized / "out")
    config = checkpoint.config
    config["quantization_config"]["config_groups"]["group_1"] |= {"format": "int-quantized"}
    described = config["quantization_config"]["config_groups"]["group_1"]
    described["weights"] |= {"strategy": "channel"}
    described["weights"].pop("group_size")
    described["input_activations"] = described["weights"] | {"strategy": "token", "dynamic": True}
    names = {name: checkpoint.stored(name) for name in checkpoint.names()}
    other = Checkpoint.of_tensors(checkpoint.directory, names, config)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight: only linear layers may be quantized, and in"):
        load_model(other, device="cpu", dtype=torch.float32)
