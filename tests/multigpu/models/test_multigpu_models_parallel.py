"""Parts of a decoder on several GPUs compute what the whole one does on one, within the rounding of 16 bits."""

import json
from pathlib import Path

import pytest
import torch
from dense_configs import with_traits
from safetensors.torch import save_file
from torch import Tensor

from warpbus.dist import Group, Send, launch
from warpbus.formats import Checkpoint, to_tensors
from warpbus.formats.compressed_tensors import quantization_config
from warpbus.models import SHAPES, Decoder, load_model, random_model, tensor_map
from warpbus.models.families import family_of
from warpbus.models.loading import part_rows
from warpbus.qtensor import QTensor, Scheme

pytestmark = pytest.mark.multigpu

VALUES = {
    "model_type": "glm4",  # with norms of the outputs
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 11 * 128,
    "num_hidden_layers": 3,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 1001,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}
CHATGLM6B = {
    "model_type": "chatglm",
    "hidden_size": 512,
    "num_attention_heads": 4,
    "inner_hidden_size": 11 * 128,
    "num_layers": 3,
    "layernorm_epsilon": 1e-5,
    "vocab_size": 1001,
    "max_sequence_length": 512,
    "position_encoding_2d": True,
    "bos_token_id": 990,
    "eos_token_id": 991,
}
TOKENS = torch.randint(0, 1000, (2, 33), generator=torch.Generator().manual_seed(1))
TOKENS[:, 20] = 990


def devices(count: int) -> list[torch.device]:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return [torch.device("cuda", index) for index in range(count)]


def write(directory: Path, family: str, scheme: Scheme | None) -> Path:
    """A model of random weights; its matrices quantized where there is a scheme."""
    values = CHATGLM6B if family == "chatglm" else VALUES | {"model_type": family}
    config = family_of(values).config(values)
    generator = torch.Generator().manual_seed(5)
    parameters = dict(Decoder(config).named_parameters())
    tensors: dict[str, Tensor] = {}
    for parameter, names in tensor_map(config).items():
        shape = parameters[parameter].shape
        fused = torch.randn(shape, generator=generator) * 512**-0.5 + parameter.endswith("norm.weight")
        parts = fused.half().split(part_rows(config, parameter, len(names), shape[0]))
        for name, part in zip(names, parts, strict=True):
            if scheme is None or not name.endswith(".weight") or "norm" in name or ".layers." not in name:
                tensors[name] = part.clone()
            else:
                tensors |= to_tensors(name.removesuffix(".weight"), quantized(part, scheme, generator))
    if scheme is not None:
        values = values | {"quantization_config": quantization_config(scheme, ["lm_head"])}
    directory.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def quantized(like: Tensor, scheme: Scheme, generator: torch.Generator) -> QTensor:
    """Random codes of a matrix's shape and size of weights."""
    rows, columns = like.shape
    shape = rows, scheme.groups(columns)
    if scheme.activations is not None:
        values = torch.randint(-127, 128, (rows, columns), generator=generator)
        return QTensor.from_values(scheme, values.float().to(scheme.dtype), torch.full((rows,), 1e-3).half())
    codes = torch.randint(0, scheme.max_code + 1, (rows, columns), generator=generator)
    scales = (torch.rand(shape, generator=generator) + 0.5) * 0.15 / scheme.max_code
    zeros = None if scheme.symmetric else torch.randint(1, scheme.max_code + 1, shape, generator=generator)
    return QTensor.from_codes(scheme, codes, scales.half(), zeros)


@torch.no_grad()
def job(group: Group, send: Send, directory: Path, dtype: torch.dtype) -> None:
    model = load_model(Checkpoint(directory), device=group.device, dtype=dtype, group=group)
    assert model.group is not None
    long, short = model(TOKENS.to(group.device)), model(TOKENS[:1, :3].to(group.device))
    for logits in (long, short):
        assert all(torch.equal(other, logits) for other in model.group.all_gather(logits))
    send((group.rank, long.float().cpu(), short.float().cpu()))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    ("family", "scheme", "dtype", "tolerance"),
    [
        ("glm4", None, torch.bfloat16, 0.05),
        ("qwen3", None, torch.float16, 0.01),
        ("glm4", "w4a16-g128", torch.float16, 0.01),
        ("chatglm", None, torch.bfloat16, 0.05),
        ("chatglm", "w4a16-g128", torch.float16, 0.01),
        ("glm", "w8a16-g64-asym", torch.bfloat16, 0.05),
        ("llama", "w3a16", torch.float16, 0.01),
        ("glm4", "w8a8-int8", torch.float16, 0.08),
        ("glm", "w8a8-fp8", torch.bfloat16, 0.2),
    ],
)
def test_logits(
    tmp_path: Path, family: str, scheme: str | None, dtype: torch.dtype, tolerance: float, count: int
) -> None:
    directory = write(tmp_path / "model", family, scheme and Scheme.parse(scheme))
    (first, *_) = places = devices(count)
    whole = load_model(Checkpoint(directory), device=first, dtype=dtype)
    with torch.no_grad():
        expected = [whole(tokens.to(first)).float().cpu() for tokens in (TOKENS, TOKENS[:1, :3])]
    said: list[tuple[int, Tensor, Tensor]] = []

    def receive(message: tuple[int, Tensor, Tensor]) -> None:
        said.append((message[0], message[1].clone(), message[2].clone()))

    launch(job, (directory, dtype), devices=places, receive=receive)
    assert {rank for rank, _, _ in said} == set(range(count))
    for _, *logits in said:
        for got, wanted in zip(logits, expected, strict=True):
            assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()


@torch.no_grad()
def big(group: Group, send: Send) -> None:
    config = with_traits(SHAPES["glm-4-9b"], num_layers=2)
    scheme = Scheme.parse("w4a16-g128")
    model = random_model(config, scheme, group.device, torch.float16, group=group)
    for tokens in (1, 700):
        logits = model(torch.arange(tokens, device=group.device)[None])
        assert bool(logits.isfinite().all())
        assert model.group is not None
        assert all(torch.equal(other, logits) for other in model.group.all_gather(logits))
    held = sum(tensor.nbytes for layer in model.layers for tensor in (*layer.parameters(), *layer.buffers()))
    send((group.rank, held))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_model_of_true_widths(count: int) -> None:
    said: list[tuple[int, int]] = []
    launch(big, (), devices=devices(count), receive=said.append)
    config = with_traits(SHAPES["glm-4-9b"], num_layers=2)
    whole = 2 * (4096 * (4608 + 4096) + 3 * 4096 * config.layers[0].mlp.ffn_size) * 4.125 / 8
    for _, held in said:
        assert held <= whole / count * 1.2
