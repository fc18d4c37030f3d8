"""The true shapes of well-known models, for benchmarks and tests that need no checkpoint."""

from warpbus.models.config import ModelConfig, RopeConfig
from warpbus.models.layer_spec import AttentionSpec, LayerSpec, MLPSpec, NormSpec

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
}
