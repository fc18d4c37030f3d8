"""Multi-head latent attention over the cache of latents, in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.kernels.reference.attention import visible
from warpbus.kernels.reference.latent_cache import read_latents, read_slots, write_latents
from warpbus.kernels.reference.norm import rms_norm
from warpbus.kernels.reference.rope import rotate


def mla_queries(
    q: Tensor,
    latent: Tensor,
    norm: Tensor,
    kv_b: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    latents: Tensor,
    eps: float,
    interleaved: bool,
) -> Tensor:
    """The queries of the absorbed form; the new latents are written into the cache. See `ops.mla`."""
    nope_dim = q.shape[2] - table.shape[1]
    q = q.clone(memory_format=torch.contiguous_format)
    mla_rope_and_cache(q, latent, norm, table, positions, slots, latents, eps, interleaved)
    nope, of_query = q.split((nope_dim, table.shape[1]), dim=-1)
    absorbed = torch.einsum("thn,hnr->thr", nope, kv_b[:, :nope_dim])
    return torch.cat((absorbed, of_query), dim=-1)


def mla_keys(expanded: Tensor, rotary: Tensor, nope: int) -> Tensor:
    """See `warpbus.kernels.ops.mla_keys.mla_keys`."""
    shared = rotary[:, None].expand(-1, expanded.shape[1], -1)
    return torch.cat((expanded[..., :nope], shared), dim=-1)


def mla_rope_and_cache(
    q: Tensor,
    latent: Tensor,
    norm: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    latents: Tensor,
    eps: float,
    interleaved: bool,
) -> Tensor:
    """Rotate queries in place; the new latents, as they are read from the cache. See `ops.mla`."""
    rank, angles = norm.numel(), table.index_select(0, positions)
    of_query = q[..., q.shape[2] - table.shape[1] :]
    of_query.copy_(rotate(of_query, angles, interleaved))
    rotated = rotate(latent[:, None, rank:], angles, interleaved)[:, 0]
    return write_latents(torch.cat((rms_norm(latent[:, :rank], norm, eps), rotated), dim=-1), rank, slots, latents)


def mla_attention(
    q: Tensor,
    positions: Tensor,
    blocks: Tensor,
    latents: Tensor,
    kv_b: Tensor,
    value_dim: int,
    scale: float,
    limit: int,
    listed: bool,
) -> Tensor:
    """Each row attends to the latents up to its position, or to those in its list of slots. See `ops.mla`."""
    if len(q) == 0:
        return q.new_empty(0, q.shape[1], value_dim)
    named, seen, begin = visible(positions, blocks, 1 if listed else latents.shape[2], limit)
    rank, read = kv_b.shape[2], read_slots if listed else read_latents
    keys = read(latents, named, rank, q.shape[2] - rank, q.dtype)
    keys[:, :, begin:].masked_fill_(~seen[:, None, begin:, None], 0.0)
    # The heads stand where torch has the tokens of one sequence: latents are read once for all.
    attended = F.scaled_dot_product_attention(
        q[:, None], keys, keys[..., :rank], attn_mask=seen[:, None, None], scale=scale
    )
    return torch.einsum("thr,hvr->thv", attended[:, 0], kv_b[:, -value_dim:]).contiguous()
