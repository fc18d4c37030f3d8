"""Parts of a decoder on several GPUs compute what the whole one does on one, within the rounding of 16 bits."""

import json
from pathlib import Path

import pytest
import torch
from dense_configs import with_traits
from safetensors.torch import save_file
from torch import Tensor

from warpbus.dist import Group, Send, launch
from warpbus.engine.engine import Engine
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
MOE = {
    "model_type": "glm4_moe",
    "moe_intermediate_size": 256,
    "n_routed_experts": 11,
    "num_experts_per_tok": 3,
    "num_nextn_predict_layers": 0,
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
    values = CHATGLM6B if family == "chatglm" else VALUES | (MOE if family == "glm4_moe" else {"model_type": family})
    config = family_of(values).config(values)
    generator = torch.Generator().manual_seed(5)
    parameters = dict(Decoder(config).named_parameters())
    tensors: dict[str, Tensor] = {}
    for parameter, names in tensor_map(config).items():
        shape = parameters[parameter].shape
        fused = torch.randn(shape, generator=generator) * 512**-0.5 + parameter.endswith("norm.weight")
        parts = fused.half().split(part_rows(config, parameter, len(names), shape[0]))
        for name, part in zip(names, parts, strict=True):
            linear = name.endswith(".weight") and "norm" not in name and ".layers." in name
            if scheme is None or not linear or name.endswith(".mlp.gate.weight"):  # the router is never quantized
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
def job(group: Group, send: Send, directory: Path, dtype: torch.dtype, expert_parallel: bool = False) -> None:
    model = load_model(
        Checkpoint(directory), device=group.device, dtype=dtype, group=group, expert_parallel=expert_parallel
    )
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


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("scheme", [None, "w4a16-g128", "w8a16-g64-asym"])
def test_logits_of_experts(tmp_path: Path, scheme: str | None, expert_parallel: bool, count: int) -> None:
    """Rounding may let a token choose another expert of nearly the same score: few tokens may differ."""
    directory = write(tmp_path / "model", "glm4_moe", scheme and Scheme.parse(scheme))
    (first, *_) = places = devices(count)
    whole = load_model(Checkpoint(directory), device=first, dtype=torch.float16)
    with torch.no_grad():
        expected = [whole(tokens.to(first)).float().cpu() for tokens in (TOKENS, TOKENS[:1, :3])]
    said: list[tuple[int, Tensor, Tensor]] = []
    launch(job, (directory, torch.float16, expert_parallel), devices=places, receive=said.append)
    assert {rank for rank, _, _ in said} == set(range(count))
    for _, long, _ in said:
        away = (long - expected[0]).abs().amax(-1) / expected[0].abs().max()
        assert away.median() <= 0.01
        assert (away > 0.02).float().mean() <= 0.2


def decode(group: Group, send: Send, scheme: str) -> None:
    config = SHAPES["glm-4.5-air"].resized(num_layers=3)
    model = random_model(config, Scheme.parse(scheme), group.device, torch.bfloat16, group=group, expert_parallel=True)
    assert not model.waits_for_gpu
    held = sum(tensor.nbytes for layer in model.layers for tensor in (*layer.parameters(), *layer.buffers()))
    prompts = [[7 * token % 1000 for token in range(length)] for length in (3, 40, 300)]
    engine = Engine(model, max_model_len=512, max_num_seqs=4)
    engine.warm()
    alone = [engine.decode([prompt], 8)[0] for prompt in prompts]
    send((group.rank, held, alone, engine.decode(prompts, 8)))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_an_engine_with_experts_of_true_widths(count: int) -> None:
    """In graphs, with one row and with many; every process samples the same tokens and holds its share."""
    said: list[tuple[int, int, list[list[int]], list[list[int]]]] = []
    launch(decode, ("w4a16-g128",), devices=devices(count), receive=said.append)
    assert len(said) == count
    whole = sum(layer.num_weights for layer in SHAPES["glm-4.5-air"].resized(num_layers=3).layers) * 4.125 / 8
    for _, held, alone, together in said:
        assert (alone, together) == said[0][2:]
        assert held <= whole / count * 1.3


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
