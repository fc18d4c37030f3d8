"""The true shapes of well-known models, for benchmarks and tests that need no checkpoint."""

from warpbus.models.config import ModelConfig, RopeConfig
from warpbus.models.latent_spec import LatentAttentionSpec
from warpbus.models.layer_spec import AttentionSpec, LayerSpec, MLPSpec, MoESpec, NormSpec, RouterSpec


def _layers(
    hidden_size: int,
    attention: AttentionSpec | LatentAttentionSpec,
    eps: float,
    *kinds: tuple[int, MLPSpec | MoESpec],
) -> tuple[LayerSpec, ...]:
    """Layers that differ in their MLPs: how many have each, in order."""
    norm = NormSpec(eps)
    return tuple(layer for count, mlp in kinds for layer in (LayerSpec(hidden_size, attention, mlp, norm),) * count)


SHAPES = {
    "chatglm-6b": ModelConfig(
        family="chatglm",
        vocab_size=130528,
        layers=(
            LayerSpec(
                hidden_size=4096,
                attention=AttentionSpec(32, 32, 128, qkv_bias=True, output_bias=True),
                mlp=MLPSpec(16384, gated=False, bias=True, output_bias=True),
                norm=NormSpec(1e-5, "layer"),
                normed_residual=56**0.5,
            ),
        )
        * 28,
        rope=RopeConfig(theta=1e4, rotary_dim=64, interleaved=False, two_dimensional=True),
        max_context=2048,
        tie_embeddings=True,
        stop_ids=(130005,),
        prompt_end=130004,
    ),
    "chatglm2-6b": ModelConfig(
        family="chatglm2",
        vocab_size=65024,
        layers=(
            LayerSpec(
                hidden_size=4096,
                attention=AttentionSpec(32, 2, 128, qkv_bias=True),
                mlp=MLPSpec(13696),
                norm=NormSpec(1e-5),
            ),
        )
        * 28,
        rope=RopeConfig(theta=1e4, rotary_dim=64, interleaved=True),
        max_context=32768,
        stop_ids=(2,),
    ),
    "glm-4-9b": ModelConfig(
        family="chatglm2",
        vocab_size=151552,
        layers=(
            LayerSpec(
                hidden_size=4096,
                attention=AttentionSpec(32, 2, 128, qkv_bias=True),
                mlp=MLPSpec(13696),
                norm=NormSpec(1.5625e-7),
            ),
        )
        * 40,
        rope=RopeConfig(theta=5e6, rotary_dim=64, interleaved=True),
        max_context=131072,
        stop_ids=(151329, 151336, 151338),
    ),
    "llama-3-8b": ModelConfig(
        family="llama",
        vocab_size=128256,
        layers=(
            LayerSpec(
                hidden_size=4096,
                attention=AttentionSpec(32, 8, 128),
                mlp=MLPSpec(14336),
                norm=NormSpec(1e-5),
            ),
        )
        * 32,
        rope=RopeConfig(theta=5e5, rotary_dim=128, interleaved=False),
        max_context=8192,
        stop_ids=(128001, 128009),
    ),
    "glm-4.5-air": ModelConfig(
        family="glm4_moe",
        vocab_size=151552,
        layers=_layers(
            4096,
            AttentionSpec(96, 8, 128, qkv_bias=True),
            1e-5,
            (1, MLPSpec(10944)),
            (45, MoESpec(RouterSpec(128, 8, "sigmoid", bias=True), MLPSpec(1408), MLPSpec(1408))),
        ),
        rope=RopeConfig(theta=1e6, rotary_dim=64, interleaved=False),
        max_context=131072,
        stop_ids=(151329, 151336, 151338),
    ),
    "glm-4.7-flash": ModelConfig(
        family="glm4_moe_lite",
        vocab_size=154880,
        layers=_layers(
            2048,
            LatentAttentionSpec(
                20, query_rank=768, kv_rank=512, nope_dim=192, rope_dim=64, value_dim=256, norm_eps=1e-6
            ),
            1e-5,
            (1, MLPSpec(10240)),
            (46, MoESpec(RouterSpec(64, 4, "sigmoid", scale=1.8, bias=True), MLPSpec(1536), MLPSpec(1536))),
        ),
        rope=RopeConfig(theta=1e6, rotary_dim=64, interleaved=True),
        max_context=202752,
        stop_ids=(154820, 154827, 154829),
    ),
    "qwen3-30b-a3b": ModelConfig(
        family="qwen3_moe",
        vocab_size=151936,
        layers=_layers(
            2048,
            AttentionSpec(32, 4, 128, qk_norm=True),
            1e-6,
            (48, MoESpec(RouterSpec(128, 8, "softmax"), MLPSpec(768))),
        ),
        rope=RopeConfig(theta=1e6, rotary_dim=128, interleaved=False),
        max_context=40960,
        stop_ids=(151643, 151645),
    ),
}
