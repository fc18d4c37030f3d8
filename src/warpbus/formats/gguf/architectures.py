"""The architectures of GGUF files: their keys and tensors in terms of Hugging Face's `config.json` and tensor names.

| architecture | model_type | remarks |
|---|---|---|
| llama | llama | rows of q and k are permuted per head: pairs that rotate together are neighbours |
| qwen2, qwen3 | the same | |
| chatglm | glm | ChatGLM2, ChatGLM3, GLM-4-9B: gate and up are one tensor, q, k and v may be |
| glm4 | glm4 | GLM-4-0414: with norms of the outputs |
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import CheckpointError, UnknownArchitectureError
from warpbus.formats.gguf.file import GGUFHeader, GGUFTensor, Value

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED = {**_LAYER, "ffn_up": "mlp.gate_up_proj"}
_OUTPUT_NORMS = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
_QKV = "attn_qkv"

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of Llama 3.1's frequency scaling: what the wavelength of each pair is multiplied by."""

_LLAMA3_SCALINGS = tuple((factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0, 16.0, 4.0))
"""factor, low and high frequency factors and original context of published models; the file has only their result."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF.

    Attributes:
        model_type: of `config.json`.
        layer: the names of a layer's tensors, GGUF's to Hugging Face's, without suffixes.
        permuted: whether rows of q and k are permuted.
        rotary_part: the rotating share of a head.
    """

    model_type: str
    layer: Mapping[str, str]
    permuted: bool = False
    rotary_part: float = 1.0


ARCHITECTURES = {
    "llama": Architecture("llama", _LAYER, permuted=True),
    "qwen2": Architecture("qwen2", _LAYER),
    "qwen3": Architecture("qwen3", _LAYER),
    "chatglm": Architecture("glm", _FUSED, rotary_part=0.5),
    "glm4": Architecture("glm4", {**_FUSED, **_OUTPUT_NORMS}, rotary_part=0.5),
}


@dataclass(frozen=True)
class SourceRows:
    """A tensor of Hugging Face's layout in a GGUF file.

    Attributes:
        tensor: that holds it.
        start, stop: its rows, or its elements if it is a vector.
        head_rows: rows of a head if they are permuted, otherwise 0.
    """

    tensor: GGUFTensor
    start: int
    stop: int
    head_rows: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in Hugging Face's layout."""
        return self.stop - self.start, *self.tensor.shape[1:]

    def in_order(self, rows: Tensor) -> Tensor:
        """The rows in Hugging Face's order: for each head first its even rows, then its odd ones."""
        return permuted(rows, self.head_rows, to_file=False) if self.head_rows else rows


def permuted(rows: Tensor, head_rows: int, *, to_file: bool) -> Tensor:
    """Permute the rows of q or k of Llama: pairs (i, i + head_rows / 2) become neighbours, or the reverse."""
    sizes = (-1, 2, head_rows // 2) if to_file else (-1, head_rows // 2, 2)
    return rows.unflatten(0, sizes).transpose(1, 2).flatten(0, 2).contiguous()


class Keys:
    """The metadata of a GGUF file, each value checked.

    Every method raises CheckpointError for a key that is missing or has a value of the wrong type.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.name = ""
        architecture = self.text("general.architecture")
        if architecture not in ARCHITECTURES:
            raise UnknownArchitectureError(
                f"{header.file}: general.architecture: {architecture!a:.80} is not supported: expected one of "
                f"{', '.join(ARCHITECTURES)}"
            )
        self.name = architecture
        self.architecture = ARCHITECTURES[architecture]

    def get(self, key: str) -> Value | None:
        """A value; `{}` in the key stands for the architecture."""
        return self.header.metadata.get(key.format(self.name))

    def text(self, key: str) -> str:
        found = self.get(key)
        if not isinstance(found, str):
            raise self.wrong(key, "a text")
        return found

    def size(self, key: str, default: int | None = None) -> int:
        found = self.get(key)
        found = default if found is None else found
        if type(found) is not int or not 0 <= found < 2**31:
            raise self.wrong(key, "an integer")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.get(key)
        found = default if found is None else found
        if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
            raise self.wrong(key, "a number")
        return float(found)

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The error that says what a key should have been."""
        found = self.get(key)
        shown = "it is missing" if found is None else f"found {found!a:.80}"
        return CheckpointError(f"{self.header.file}: {key.format(self.name)}: expected {expected}, but {shown}")


def source_tensors(keys: Keys) -> dict[str, SourceRows]:
    """The tensors of a GGUF file by their names in Hugging Face's layout.

    Raises:
        CheckpointError: a tensor does not belong to the architecture, or has an impossible shape.
    """
    found: dict[str, SourceRows] = {}
    for name, tensor in keys.header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        stem, _, suffix = name.rpartition(".")
        top = _TOP.get(stem)
        if top is not None and suffix == "weight":
            found[f"{top}.weight"] = _whole(tensor)
            continue
        index, part = _layer_part(stem)
        prefix = f"model.layers.{index}."
        if index is not None and suffix in ("weight", "bias"):
            if part == _QKV:
                for each, rows in zip("qkv", _qkv_rows(keys, tensor), strict=True):
                    found[f"{prefix}self_attn.{each}_proj.{suffix}"] = rows
                continue
            if part in keys.architecture.layer:
                permuted_rows = keys.architecture.permuted and part in ("attn_q", "attn_k")
                head = _head_size(keys) if permuted_rows else 0
                if head and (head % 2 or tensor.shape[0] % head):
                    raise CheckpointError(f"{keys.header.file}: {name}: its rows are no whole heads of {head}")
                found[f"{prefix}{keys.architecture.layer[part]}.{suffix}"] = _whole(tensor, head)
                continue
        raise CheckpointError(
            f"{keys.header.file}: tensor {name!a:.80} is not known in the architecture {keys.name}: this kind of model "
            "is not supported"
        )
    return found


def _layer_part(stem: str) -> tuple[int | None, str]:
    block, _, rest = stem.partition(".")
    index, _, part = rest.partition(".")
    return (int(index) if block == "blk" and index.isascii() and index.isdecimal() else None), part


def _whole(tensor: GGUFTensor, head_rows: int = 0) -> SourceRows:
    return SourceRows(tensor, 0, tensor.shape[0], head_rows)


def _qkv_rows(keys: Keys, tensor: GGUFTensor) -> list[SourceRows]:
    """Queries, keys and values of a fused tensor."""
    head = _head_size(keys)
    counts = [keys.size("{}.attention.head_count"), *[keys.size("{}.attention.head_count_kv")] * 2]
    if sum(counts) * head != tensor.shape[0]:
        raise CheckpointError(
            f"{keys.header.file}: {tensor.name} has {tensor.shape[0]} rows, expected {sum(counts) * head} of "
            f"{sum(counts)} heads: the file is damaged"
        )
    found, start = [], 0
    for count in counts:
        found.append(SourceRows(tensor, start, start + count * head))
        start += count * head
    return found


def _head_size(keys: Keys) -> int:
    heads = keys.size("{}.attention.head_count")
    if heads < 1:
        raise keys.wrong("{}.attention.head_count", "a positive number")
    return keys.size("{}.attention.key_length", keys.size("{}.embedding_length") // heads)


def config_of(keys: Keys, tensors: Mapping[str, SourceRows]) -> dict[str, Any]:
    """A `config.json` of Hugging Face's keys, without the quantization.

    Raises:
        CheckpointError: a key is missing, or says something that is not supported.
    """
    head = _head_size(keys)
    if keys.size("{}.attention.value_length", head) != head:
        raise keys.wrong("{}.attention.value_length", f"{head}, as the keys have")
    if keys.get("{}.attention.sliding_window"):
        raise keys.wrong("{}.attention.sliding_window", "none: windows are not supported")
    if keys.size("split.count", 1) > 1:
        raise keys.wrong("split.count", "1: merge the shards with llama.cpp's llama-gguf-split")
    if keys.get("{}.expert_count"):
        raise keys.wrong("{}.expert_count", "none: mixtures of experts are not read from GGUF")
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{keys.header.file}: token_embd.weight is missing, or no matrix: the file is damaged")
    part = keys.architecture.rotary_part
    rotating = keys.size("{}.rope.dimension_count", int(head * part))
    if rotating != int(head * part):
        raise keys.wrong("{}.rope.dimension_count", f"{int(head * part)} for heads of {head}")
    values: dict[str, Any] = {
        "model_type": keys.architecture.model_type,
        "hidden_act": "silu",
        "hidden_size": keys.size("{}.embedding_length"),
        "intermediate_size": keys.size("{}.feed_forward_length"),
        "num_hidden_layers": keys.size("{}.block_count"),
        "num_attention_heads": keys.size("{}.attention.head_count"),
        "num_key_value_heads": keys.size("{}.attention.head_count_kv", keys.size("{}.attention.head_count")),
        "head_dim": head,
        "rms_norm_eps": float(f"{keys.number('{}.attention.layer_norm_rms_epsilon'):.6g}"),
        "max_position_embeddings": keys.size("{}.context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "rope_theta": keys.number("{}.rope.freq_base", 10000.0),
        "dtype": "bfloat16",
    }
    if part != 1.0:
        values["partial_rotary_factor"] = part
    if keys.name != "qwen2":
        values["attention_bias"] = any(name.endswith("q_proj.bias") for name in tensors)
    scaling = _scaling(keys, values["rope_theta"], rotating)
    return values | ({"rope_scaling": scaling} if scaling else {})


def _scaling(keys: Keys, theta: float, rotating: int) -> dict[str, Any] | None:
    kind = keys.get("{}.rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise keys.wrong("{}.rope.scaling.type", "none or linear")
    factors = keys.header.tensors.get(ROPE_FACTORS)
    if factors is not None:
        return _llama3(keys, factors, theta, rotating)
    return {"rope_type": "linear", "factor": keys.number("{}.rope.scaling.factor")} if kind == "linear" else None


def _llama3(keys: Keys, factors: GGUFTensor, theta: float, rotating: int) -> dict[str, Any]:
    """The scaling whose factors a file has."""
    if factors.kind.dtype != torch.float32 or factors.shape != (rotating // 2,):
        raise CheckpointError(f"{keys.header.file}: {ROPE_FACTORS}: expected {rotating // 2} numbers of F32")
    found = factors.read_rows(0, 1).view(torch.float32).flatten()
    for factor, low, high, original in _LLAMA3_SCALINGS:
        if torch.allclose(found, llama3_factors(theta, rotating, factor, low, high, original), rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(
        f"{keys.header.file}: {ROPE_FACTORS}: these factors are not those of Llama 3's scaling with a known factor, "
        "and others are not supported"
    )


def llama3_factors(theta: float, rotating: int, factor: float, low: float, high: float, original: int) -> Tensor:
    """The factor by which Llama 3's scaling multiplies each wavelength, float32 `[rotating / 2]`."""
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, rotating, 2, dtype=torch.float64) / rotating)
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    longest, shortest = original / low, original / high
    scaled = torch.where(wavelengths < shortest, torch.ones_like(between), between)
    return torch.where(wavelengths > longest, torch.full_like(between, factor), scaled).float()
