"""A checkpoint of a given shape with random weights, written tensor by tensor: for benchmarks of what reads files.

It is meant to give a quantizer work like that of a trained model, as far as random numbers can.

What is like a trained model: norm weights differ by a factor of about 10 from channel to channel, and a part of every
matrix has a low rank. So the inputs of a linear layer have channels of different size and directions in which they
vary more than in others; their moments are far from a multiple of the identity, and rounding errors can be made up for.
Activations stay finite, as each sublayer norms its input and has outputs of a variance of about 1.

What is not: there is no meaning in the weights, so that attention is spread nearly evenly, perplexity is that of
guessing, no channel is hundreds of times as large as the others, and the layers are all alike. Times and memory carry
over to a model of the shape, errors do not.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.devices import resolve_device
from warpbus.cuda.dtype_names import short_name
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.models.config import ModelConfig
from warpbus.models.decoder import Decoder
from warpbus.models.latent_spec import LatentAttentionSpec
from warpbus.models.layer_spec import AttentionSpec, MLPSpec, MoESpec
from warpbus.models.loading import part_rows, read_config
from warpbus.models.parameter_source import tensor_map
from warpbus.models.shapes import SHAPES

_SHARD_BYTES = 2 * 10**9
_RANK = 64
_LOW_RANK_SHARE = 0.5  # of a matrix' variance
_NORM_SPREAD = 0.58  # of a norm weight's logarithm: 95 % of the channels lie within a factor of 10
_BIAS_STD = 0.1


@torch.no_grad()
def write_random_checkpoint(
    directory: str | Path,
    shape: str | ModelConfig,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    *,
    layers: int | None = None,
    device: str | torch.device = "auto",
) -> ModelConfig:
    """Write a model with random weights and a config.json in the form its family is published in; no tokenizer.

    One tensor of the decoder is made at a time, and at most a shard of 2 GB is held.

    Args:
        directory: where the model is to be.
        shape: one of `SHAPES`, or a config of the family chatglm, chatglm2, glm4_moe, glm4_moe_lite, llama or
            qwen3_moe; with a layer of multi-token prediction if the config has one.
        dtype: of all tensors, float16, bfloat16 or float32.
        seed: the same one draws the same model on the same kind of device.
        layers: decoder layers, in place of the shape's.
        device: where the numbers are drawn, "auto" for a GPU if there is one.

    Returns:
        the config of the model that was written.

    Raises:
        UsageError: if there is no such shape, or the family's config.json cannot say what the config does.
        StorageError: if the directory exists or cannot be written, or the disk has too little space.
    """
    config = _config(shape, layers)
    described = _described(config)
    draw = _RandomParameters(resolve_device(device), seed)
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in Decoder(config).named_parameters()}
    expected = config.num_parameters * dtype.itemsize

    def check(written: Path) -> None:
        found = read_config(Checkpoint(written), mtp="stored")
        if found != config:
            raise UsageError(f"{directory}: config.json of {config.family} cannot say {config}: it would say {found}")

    with CheckpointWriter(directory, shard_bytes=_SHARD_BYTES, expected_bytes=expected) as writer:
        for parameter, names in tensor_map(config).items():
            whole = draw.parameter(parameter, shapes[parameter]).to(dtype).cpu()
            rows = part_rows(config, parameter, len(names), len(whole))
            for name, piece in zip(names, whole.split(rows), strict=True):
                writer.add(name, piece)
        writer.write_json("config.json", described | {"torch_dtype": short_name(dtype)})
        writer.finish(check)
    return config


def _config(shape: str | ModelConfig, layers: int | None) -> ModelConfig:
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise UsageError(f"shape {shape}: there is no such shape: choose among {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    if layers is None:
        return shape
    if layers < 1:
        raise UsageError(f"layers is {layers}: it has to be at least 1")
    return shape.resized(num_layers=layers)


class _RandomParameters:
    """The parameters of a decoder, drawn in float32 one after the other."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def parameter(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            # The mean of the squares is 1, so that the normed activations have a variance of 1.
            return self._normal(*shape).mul_(_NORM_SPREAD).sub_(_NORM_SPREAD**2).exp_()
        if name.endswith("router.bias"):
            return torch.zeros(shape, device=self._device)  # of a balanced router, as a trained one is
        if name.endswith("bias"):
            return self._normal(*shape).mul_(_BIAS_STD)
        columns = 1 if name == "embedding.weight" else shape[1]
        return self._matrix(*shape).mul_(columns**-0.5)

    def _matrix(self, rows: int, columns: int) -> Tensor:
        """Elements of variance 1, of which a part is a matrix of low rank."""
        left, right = self._normal(rows, _RANK), self._normal(_RANK, columns)
        full, low = (1 - _LOW_RANK_SHARE) ** 0.5, (_LOW_RANK_SHARE / _RANK) ** 0.5
        return self._normal(rows, columns).addmm_(left, right, beta=full, alpha=low)

    def _normal(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self._device).normal_(generator=self._generator)


def _described(config: ModelConfig) -> dict[str, Any]:
    """The config.json that `read_config` reads as `config`."""
    if config.family not in _NATIVE:
        raise UsageError(f"a random checkpoint of family {config.family}: choose among {', '.join(_NATIVE)}")
    return _NATIVE[config.family](config)


def _chatglm(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "chatglm",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_attention_heads": config.attention.num_heads,
        "inner_hidden_size": config.dense_mlp.ffn_size,
        "layernorm_epsilon": config.norm.eps,
        "max_sequence_length": config.max_context,
        "position_encoding_2d": True,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.prompt_end,
        "eos_token_id": list(config.stop_ids),
    }


def _chatglm2(config: ModelConfig) -> dict[str, Any]:
    # The vocabulary tells generation 4 from the earlier ones; generation 2 is known by its name.
    described = {
        "model_type": "chatglm",
        "_name_or_path": "THUDM/chatglm2-6b",
        "padded_vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_attention_heads": config.attention.num_heads,
        "multi_query_attention": True,
        "multi_query_group_num": config.attention.num_kv_heads,
        "kv_channels": config.attention.head_dim,
        "ffn_hidden_size": config.dense_mlp.ffn_size,
        "layernorm_epsilon": config.norm.eps,
        "seq_length": config.max_context,
        "add_qkv_bias": config.grouped_attention.qkv_bias,
        "add_bias_linear": False,
        "rmsnorm": True,
        "post_layer_norm": True,
        "original_rope": config.rope.interleaved,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.stop_ids),
    }
    ratio = config.rope.theta / 1e4
    return described | ({} if ratio == 1 else {"rope_ratio": ratio})


def _llama(config: ModelConfig) -> dict[str, Any]:
    return _huggingface(config) | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": config.dense_mlp.ffn_size,
        "mlp_bias": False,
        **_grouped(config.grouped_attention),
    }


def _glm4_moe(config: ModelConfig) -> dict[str, Any]:
    attention = config.grouped_attention
    return {
        **_huggingface(config),
        **_experts(config),
        **_grouped(attention),
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "partial_rotary_factor": config.rope.rotary_dim / attention.head_dim,
        "use_qk_norm": attention.qk_norm,
    }


def _glm4_moe_lite(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    assert isinstance(attention, LatentAttentionSpec)
    return {
        **_huggingface(config),
        **_experts(config),
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "num_key_value_heads": attention.num_heads,
        "q_lora_rank": attention.query_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "attention_bias": attention.bias,
        "rope_interleave": config.rope.interleaved,
    }


def _qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    experts = _experts(config)
    return {
        **_huggingface(config),
        **_grouped(config.grouped_attention),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": experts["n_routed_experts"],
        "intermediate_size": experts["intermediate_size"],
        **{key: experts[key] for key in ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")},
    }


def _huggingface(config: ModelConfig) -> dict[str, Any]:
    """The keys that all models in Hugging Face's format share."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.attention.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm.eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.stop_ids),
    }


def _grouped(attention: AttentionSpec) -> dict[str, Any]:
    """The keys of attention with grouped queries."""
    return {
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.qkv_bias,
    }


def _experts(config: ModelConfig) -> dict[str, Any]:
    """The keys of layers with experts after dense ones; a model that has no layer of a kind gets sizes of 1."""
    dense = [layer.mlp for layer in config.layers if isinstance(layer.mlp, MLPSpec)]
    mixtures = [layer.mlp for layer in config.layers if isinstance(layer.mlp, MoESpec)]
    found = {
        "intermediate_size": dense[0].ffn_size if dense else 1,
        "first_k_dense_replace": len(dense),
        "num_nextn_predict_layers": 0 if config.mtp is None else 1,
    }
    if not mixtures:
        return found | {"n_routed_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 1}
    router, expert, shared = mixtures[0].router, mixtures[0].expert, mixtures[0].shared
    return found | {
        "n_routed_experts": router.experts,
        "num_experts_per_tok": router.top_k,
        "moe_intermediate_size": expert.ffn_size,
        "n_shared_experts": 0 if shared is None else shared.ffn_size // expert.ffn_size,
        "norm_topk_prob": router.normalized,
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.top_groups,
    }


_NATIVE: Mapping[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "chatglm": _chatglm,
    "chatglm2": _chatglm2,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "llama": _llama,
    "qwen3_moe": _qwen3_moe,
}
