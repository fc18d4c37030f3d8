"""Small mixtures of experts in main memory whose experts are packed as for a GPU, some of them offloaded."""

from dataclasses import replace

import torch
from dense_configs import with_traits

from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.rounding import round_to_nearest
from warpbus.models import SHAPES, Decoder
from warpbus.models.layer_spec import MLPSpec, MoESpec, RouterSpec
from warpbus.models.layers import MoE, QuantizedLinear
from warpbus.qtensor import Scheme

SMALL = with_traits(
    SHAPES["qwen3-30b-a3b"], vocab_size=300, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16
)
SMALL = replace(SMALL, max_context=256, rope=replace(SMALL.rope, rotary_dim=16), stop_ids=())
W4 = Scheme.parse("w4a16-g32")


def config_of(experts, *, layers=2, shared=True):
    """Dense first, then layers of so many experts, of which a token has two."""
    first = SMALL.layers[0]
    moe = MoESpec(RouterSpec(experts, 2, "sigmoid"), MLPSpec(32), MLPSpec(32) if shared else None)
    return replace(SMALL, layers=(replace(first, mlp=MLPSpec(96)), *[replace(first, mlp=moe)] * layers))


@torch.no_grad()
def model_of(config, *, offloaded=0, schemes=(), seed=0):
    """A random decoder in float16; `schemes`: of the first experts of each layer, in place of w4a16-g32."""
    model = Decoder(config)
    model.initialize(torch.Generator().manual_seed(seed), std=0.1)
    model = model.half()
    for layer in model.layers:
        if not isinstance(layer.mlp, MoE):
            continue
        every = [*layer.mlp.experts.values(), *([layer.mlp.shared] if layer.mlp.shared is not None else [])]
        for number, expert in enumerate(every):
            scheme = schemes[number] if number < len(schemes) else W4
            for name in ("gate_up", "down"):
                rounded = round_to_nearest(getattr(expert, name).weight.float(), scheme, scale_dtype=torch.float16)
                setattr(expert, name, QuantizedLinear(pack(rounded, torch.float16)))
        layer.mlp.stack(offloaded)
    return model.eval()


def experts_of(model):
    """The experts of the layers that have some."""
    return [layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, MoE)]
