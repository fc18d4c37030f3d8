"""Small random models, quantized, in the files of any format."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from warpbus.formats import Checkpoint, format_named
from warpbus.models import Decoder, tensor_map
from warpbus.models.families import family_of
from warpbus.models.loading import part_rows
from warpbus.qtensor import QTensor, Scheme

SIZES = {"hidden_size": 64, "num_attention_heads": 4}
HF: dict[str, Any] = SIZES | {
    "model_type": "glm",
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}
CHATGLM: dict[str, Any] = SIZES | {
    "model_type": "chatglm",
    "_name_or_path": "THUDM/chatglm2-6b",
    "ffn_hidden_size": 160,
    "num_layers": 2,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "kv_channels": 32,
    "layernorm_epsilon": 1e-5,
    "padded_vocab_size": 48,
    "seq_length": 64,
    "add_qkv_bias": True,
    "torch_dtype": "float16",
}
CHATGLM6B: dict[str, Any] = SIZES | {
    "model_type": "chatglm",
    "inner_hidden_size": 160,
    "num_layers": 2,
    "layernorm_epsilon": 1e-5,
    "vocab_size": 48,
    "max_sequence_length": 64,
    "position_encoding_2d": True,
    "bos_token_id": 40,
    "eos_token_id": 41,
    "torch_dtype": "float16",
}


def plain_tensors(values: dict[str, Any], dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """Random weights for a config.json, by the checkpoint's names."""
    config = family_of(values).config(values)
    generator = torch.Generator().manual_seed(5)
    parameters = dict(Decoder(config).named_parameters())
    tensors = {}
    for parameter, names in tensor_map(config).items():
        shape = parameters[parameter].shape
        fused = torch.randn(shape, generator=generator) * 64**-0.5 + parameter.endswith("norm.weight")
        parts = fused.to(dtype).split(part_rows(config, parameter, len(names), shape[0]))
        tensors.update({name: part.clone() for name, part in zip(names, parts, strict=True)})
    return tensors


def random_matrix(shape: tuple[int, int], scheme: Scheme, seed: int, dtype: torch.dtype) -> QTensor:
    """Scales of both signs; zero points from 1 on, which every format can hold."""
    generator = torch.Generator().manual_seed(seed)
    groups = scheme.groups(shape[1])
    if scheme.is_trellis:
        words = torch.randint(-(2**31), 2**31, (shape[0], shape[1] * scheme.bits // 32), generator=generator)
        scales = torch.rand(shape[0], 1, generator=generator) * 0.1 + 0.1
        return QTensor(scheme, words.to(torch.int32), scales.to(dtype), None, shape)
    if not scheme.has_codes:
        values = torch.randn(shape, generator=generator).to(scheme.dtype)
        return QTensor.from_values(scheme, values, torch.full((shape[0],), 0.1, dtype=dtype))
    codes = torch.randint(0, scheme.max_code + 1, shape, generator=generator)
    sizes = (torch.rand(shape[0], groups, generator=generator) * 0.4 + 0.1) / scheme.max_code
    signs = torch.randint(0, 2, sizes.shape, generator=generator) * 2 - 1
    zeros = None
    if not scheme.symmetric:
        zeros = torch.randint(1, scheme.max_code + 1, sizes.shape, generator=generator)
    return QTensor.from_codes(scheme, codes, (sizes * signs).to(dtype), zeros)


def is_linear(name: str) -> bool:
    """Whether a tensor is a linear layer's of a decoder layer; a router is none."""
    return (
        ".layers." in name and name.endswith(".weight") and "norm" not in name and not name.endswith("mlp.gate.weight")
    )


def write_quantized(
    directory: Path,
    values: dict[str, Any],
    form: str,
    scheme: str | dict[str, str],
    *,
    keep: str = "nothing",
    scale_dtype: torch.dtype = torch.float16,
) -> tuple[Path, dict[str, Tensor]]:
    """Write a quantized model.

    Args:
        form: the format.
        scheme: of all matrices, or of those whose names contain a key.
        keep: what the names of layers contain that are not quantized.

    Returns:
        the directory, and the plain tensors that mean the same, in float32.
    """
    format = format_named(form)
    schemes, tensors, plain = {}, {}, {}
    for seed, (name, tensor) in enumerate(plain_tensors(values).items()):
        prefix = name.removesuffix(".weight")
        plain[name] = tensor.float()
        if not is_linear(name) or keep in name:
            tensors[name] = tensor
            continue
        text = scheme if isinstance(scheme, str) else next(scheme[key] for key in scheme if key in name)
        schemes[prefix] = Scheme.parse(text)
        matrix = random_matrix((tensor.shape[0], tensor.shape[1]), schemes[prefix], seed, scale_dtype)
        tensors.update(format.to_tensors(prefix, matrix))
        plain[name] = matrix.dequantize(torch.float32)
    head = "transformer.output_layer" if "padded_vocab_size" in values else "lm_head"
    kept = [name.removesuffix(".weight") for name in tensors if is_linear(name) and keep in name]
    described = format.quantization_config(schemes, [head, *kept])
    return write_files(directory, values | {"quantization_config": described}, tensors), plain


def write_thudm(directory: Path, bits: int, values: dict[str, Any] = CHATGLM) -> tuple[Path, dict[str, Tensor]]:
    """A ChatGLM2 or ChatGLM-6B of THUDM's int4 or int8, and the plain tensors that mean the same, in float32."""
    tensors, plain = {}, {}
    for seed, (name, tensor) in enumerate(plain_tensors(values).items()):
        tensors[name], plain[name] = tensor, tensor.float()
        if not is_linear(name):
            continue
        generator = torch.Generator().manual_seed(seed)
        largest = 2 ** (bits - 1) - 1
        numbers = torch.randint(-largest, largest + 1, tensor.shape, generator=generator)
        scales = (torch.rand(tensor.shape[0], generator=generator) * 0.2 / largest + 0.01 / bits).half()
        plain[name] = numbers * scales.float()[:, None]
        if bits == 4:
            numbers = (numbers[:, 0::2] << 4) | (numbers[:, 1::2] & 15)
        tensors[name] = numbers.to(torch.uint8).view(torch.int8)
        tensors[f"{name}_scale"] = scales
    return write_files(directory, values | {"quantization_bit": bits}, tensors), plain


def write_files(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A model directory of these tensors, and a tokenizer's file that goes along."""
    directory.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def all_tensors(directory: Path) -> dict[str, Tensor]:
    """Everything that a model's files hold."""
    checkpoint = Checkpoint(directory)
    return {name: checkpoint.tensor(name) for name in checkpoint.names()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """The same names, types and bits."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )
