"""Multi-head latent attention over the cache of latents, in plain PyTorch."""

from torch import Tensor
from torch.nn import functional as F

from warpbus.kernels.reference.attention import visible
from warpbus.kernels.reference.cache import gather


def mla_attention(
    q: Tensor,
    positions: Tensor,
    blocks: Tensor,
    latents: Tensor,
    value_dim: int,
    scale: float,
    limit: int,
    selected: Tensor | None,
) -> Tensor:
    """Each row attends to the latents up to its position. See `ops.mla`."""
    if len(q) == 0:
        return q.new_empty(0, q.shape[1], value_dim)
    named, seen, begin = visible(positions, blocks, latents.shape[2], limit)
    keys = gather(latents, None, named, q.dtype)
    keys[:, :, begin:].masked_fill_(~seen[:, None, begin:, None], 0.0)
    if selected is not None:
        seen = seen & selected[:, : seen.shape[1]]
    # The heads stand where torch has the tokens of one sequence: latents are read once for all.
    attended = F.scaled_dot_product_attention(
        q[:, None], keys, keys[..., :value_dim], attn_mask=seen[:, None, None], scale=scale
    )
    return attended[:, 0]
