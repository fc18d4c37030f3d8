"""Multi-head latent attention as Hugging Face names it: its tensors, and the keys that size it."""

from warpbus.models.families.family import Fields
from warpbus.models.latent_spec import LatentAttentionSpec

ATTENTION = {
    "attention.q.weight": ("self_attn.q_proj.weight",),
    "attention.kv_a.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "attention.kv_a.bias": ("self_attn.kv_a_proj_with_mqa.bias",),
    "attention.qkv_a.weight": ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    "attention.qkv_a.bias": ("self_attn.q_a_proj.bias", "self_attn.kv_a_proj_with_mqa.bias"),
    "attention.q_a_norm.weight": ("self_attn.q_a_layernorm.weight",),
    "attention.q_b.weight": ("self_attn.q_b_proj.weight",),
    "attention.kv_a_norm.weight": ("self_attn.kv_a_layernorm.weight",),
    "attention.kv_b.weight": ("self_attn.kv_b_proj.weight",),
}

_NORM_EPS = 1e-6
"""Of the norms of the latents: transformers does not give them the file's rms_norm_eps."""


def attention(fields: Fields) -> LatentAttentionSpec:
    """The attention of a config.json. Raises CheckpointError naming the key that is wrong."""
    heads, bias = fields.size("num_attention_heads"), fields.flag("attention_bias", default=False)
    fields.insist("num_key_value_heads", heads, "every head has keys and values of its own")
    rope_dim = fields.size("qk_rope_head_dim")
    if rope_dim % 2:
        raise fields.wrong("qk_rope_head_dim", "an even size")
    return LatentAttentionSpec(
        num_heads=heads,
        query_rank=fields.size("q_lora_rank") if "q_lora_rank" in fields else None,
        kv_rank=fields.size("kv_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=fields.size("v_head_dim"),
        norm_eps=_NORM_EPS,
        bias=bias,
        output_bias=bias,
    )
