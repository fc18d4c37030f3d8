"""Small random models of every family, and LoRA files for them whose names and shapes are written out by hand."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.models import Decoder, load_model
from warpbus.models.families import family_of
from warpbus.models.saving import named_tensors

_SIZES = {"hidden_size": 64, "num_attention_heads": 4}
_NATIVE: dict[str, Any] = _SIZES | {
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
VALUES: dict[str, dict[str, Any]] = {
    "chatglm": _SIZES
    | {
        "model_type": "chatglm",
        "vocab_size": 48,
        "num_layers": 2,
        "inner_hidden_size": 96,
        "layernorm_epsilon": 1e-5,
        "max_sequence_length": 64,
        "position_encoding_2d": True,
        "bos_token_id": 40,
        "eos_token_id": 41,
    },
    "chatglm2": _SIZES
    | {
        "model_type": "chatglm",
        "_name_or_path": "THUDM/chatglm2-6b",
        "ffn_hidden_size": 96,
        "num_layers": 2,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "kv_channels": 32,
        "layernorm_epsilon": 1e-5,
        "padded_vocab_size": 48,
        "seq_length": 64,
        "add_qkv_bias": True,
    },
    **{kind: _NATIVE | {"model_type": kind} for kind in ("glm", "glm4", "llama", "qwen2", "qwen3")},
}

_HEADS = {"self_attn.q_proj": (128, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64)}
_GLM = _HEADS | {"self_attn.o_proj": (64, 128), "mlp.gate_up_proj": (192, 64), "mlp.down_proj": (64, 96)}
_LLAMA = _HEADS | {
    "self_attn.o_proj": (64, 128),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
_LAYERS: dict[str, tuple[str, dict[str, tuple[int, int]]]] = {
    "chatglm": (
        "transformer.layers.",
        {
            "attention.query_key_value": (192, 64),
            "attention.dense": (64, 64),
            "mlp.dense_h_to_4h": (96, 64),
            "mlp.dense_4h_to_h": (64, 96),
        },
    ),
    "chatglm2": (
        "transformer.encoder.layers.",
        {
            "self_attention.query_key_value": (256, 64),
            "self_attention.dense": (64, 128),
            "mlp.dense_h_to_4h": (192, 64),
            "mlp.dense_4h_to_h": (64, 96),
        },
    ),
    "glm": ("model.layers.", _GLM),
    "glm4": ("model.layers.", _GLM),
    "llama": ("model.layers.", _LLAMA),
    "qwen2": ("model.layers.", _LLAMA),
    "qwen3": ("model.layers.", _LLAMA),
}


def modules_of(family: str) -> dict[str, tuple[int, int]]:
    """The linear layers of both layers, `(out, in)` of each."""
    start, layer = _LAYERS[family]
    return {f"{start}{index}.{name}": shape for index in range(2) for name, shape in layer.items()}


def targets_of(family: str) -> list[str]:
    return [name.rpartition(".")[2] for name in _LAYERS[family][1]]


def write_model(directory: Path, family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A model whose logits differ clearly, everything in it being random."""
    config = family_of(VALUES[family]).config(VALUES[family])
    model, generator = Decoder(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            spread = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(noise * spread + name.endswith("norm.weight"))
    with CheckpointWriter(directory) as writer:
        for name, tensor in named_tensors(model, dtype):
            writer.add(name, tensor)
        writer.write_json("config.json", VALUES[family])
        writer.write_json("tokenizer_config.json", {})
        return writer.finish()


def lora_tensors(
    shapes: dict[str, tuple[int, int]], ranks: int | dict[str, int] = 4, start: str = "base_model.model."
) -> dict[str, Tensor]:
    """Random matrices of these modules, A and B, by the names in the file."""
    generator, tensors = torch.Generator().manual_seed(17), {}
    for module, (out, width) in shapes.items():
        rank = ranks if isinstance(ranks, int) else ranks[module]
        tensors[f"{start}{module}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * width**-0.5
        tensors[f"{start}{module}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * rank**-0.5
    return tensors


def write_lora(directory: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    """An adapter's directory of these tensors; by default rank 4, alpha 6."""
    directory.mkdir(parents=True, exist_ok=True)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere/model",
        "r": 4,
        "lora_alpha": 6,
        "lora_dropout": 0.05,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
    } | settings
    (directory / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "adapter_model.safetensors")
    return directory


def with_lora(
    model: Path, output: Path, tensors: dict[str, Tensor], scaling: float | dict[str, float], strip: str
) -> Path:
    """The model that has `W + scaling B A` for each W of the file that has an A and a B: the reference."""
    weights = load_file(model / "model.safetensors")
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removesuffix(".lora_A.weight")
        b, target = tensors[f"{module}.lora_B.weight"], module.removeprefix(strip)
        factor = scaling if isinstance(scaling, float) else scaling[target]
        delta = torch.zeros(b.shape[0], a.shape[1])
        for column in range(a.shape[0]):
            delta += factor * torch.outer(b[:, column], a[column])
        weights[f"{target}.weight"] = weights[f"{target}.weight"] + delta
    output.mkdir()
    save_file(weights, output / "model.safetensors")
    (output / "config.json").write_bytes((model / "config.json").read_bytes())
    return output


def loaded(directory: Path) -> Decoder:
    return load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)


def tokens_of(family: str) -> Tensor:
    """Two rows; those of a model that tells prompts from answers have its mark at different places."""
    tokens = torch.randint(0, 40, (2, 10), generator=torch.Generator().manual_seed(3))
    if family == "chatglm":
        tokens[0, 4], tokens[1, 7] = 40, 40
    return tokens


@torch.no_grad()
def logits(model: Decoder, family: str) -> Tensor:
    return model(tokens_of(family))


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
