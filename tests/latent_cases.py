"""Problems of multi-head latent attention for tests on CPU and GPU, and what is expected in float64."""

import torch

from warpbus.kernels.reference.latent_cache import LATENT_CODES, quantize, token_bytes

NOWHERE = 2**31 - 1  # an entry of a block table that may not be used


def latent_problem(
    positions,
    *,
    heads=20,
    nope=192,
    rope=64,
    rank=512,
    value=256,
    block=16,
    dtype=torch.float32,
    device="cpu",
    limit=None,
    coded=False,
):
    """Arguments of mla_attention; whatever no row attends to is NaN, or an entry that may not be used.

    `coded`: with an FP8 cache.
    """
    used = [position // block + 1 for position in positions]
    latents = _poisoned(sum(used) + 2, block, rank, rope, dtype, device, coded)
    limit = limit or max(positions, default=0) + 1
    table = torch.full((len(positions), max([-(-limit // block), *used]) + 1), NOWHERE, dtype=torch.int32)
    free = (torch.randperm(sum(used)) + 1).tolist()
    for row, position in enumerate(positions):
        own = torch.tensor([free.pop() for _ in range(used[row])])
        table[row, : used[row]] = own
        tokens = torch.full((used[row] * block, rank + rope), float("nan"), dtype=dtype, device=device)
        tokens[: position + 1] = torch.randn(position + 1, rank + rope, device=device).to(dtype)
        if coded:
            found = torch.full((len(tokens), latents.shape[3]), 0xFF, dtype=torch.uint8, device=device)
            found[: position + 1] = quantize(tokens[: position + 1], rank)
            latents.view(torch.uint8)[own.to(device), 0] = found.unflatten(0, (used[row], block))
        else:
            latents[own.to(device), 0] = tokens.view(used[row], block, rank + rope)
    return {
        "q": torch.randn(len(positions), heads, rank + rope, device=device).to(dtype),
        "positions": torch.tensor(positions, dtype=torch.int32, device=device),
        "blocks": table.to(device),
        "latents": latents,
        "kv_b": (torch.randn(heads, nope + value, rank, device=device) / rank**0.5).to(dtype),
        "value_dim": value,
        "scale": 2 * (rank + rope) ** -0.5,
        "limit": limit,
    }


def _poisoned(count, block, rank, rope, dtype, device, coded):
    """A layer of a cache of three, all NaN: elements, or codes, scales and rotary keys."""
    if coded:
        size = token_bytes(rank, rope, dtype)
        whole = torch.full((count, 3, 1, 1, block, size), 0xFF, dtype=torch.uint8, device=device).view(LATENT_CODES)
    else:
        whole = torch.full((count, 3, 1, 1, block, rank + rope), float("nan"), dtype=dtype, device=device)
    return whole[:, 1, 0]


def exact_latents(latents, rank, rope, dtype):
    """A cache in float64, `[..., rank + rope]`, by the layout of FP8 rows."""
    if latents.dtype != LATENT_CODES:
        return latents.double()
    found, groups = latents.view(torch.uint8), -(-rank // 128)
    scales_at = -(-rank // 16) * 16
    rotary_at = scales_at + -(-4 * groups // 16) * 16
    codes = found[..., :rank].contiguous().view(LATENT_CODES).double()
    scales = found[..., scales_at : scales_at + 4 * groups].contiguous().view(torch.float32).double()
    rotary = found[..., rotary_at : rotary_at + rope * dtype.itemsize].contiguous().view(dtype).double()
    return torch.cat((codes * scales.repeat_interleave(128, dim=-1)[..., :rank], rotary), dim=-1)


def exact_attention(asked):
    """Row by row in float64."""
    block, size = asked["latents"].shape[2], asked["q"].shape[2]
    latents = exact_latents(asked["latents"], asked["kv_b"].shape[2], size - asked["kv_b"].shape[2], asked["q"].dtype)
    rank, found = asked["kv_b"].shape[2], []
    of_values = asked["kv_b"][:, -asked["value_dim"] :].double()
    for row, position in enumerate(asked["positions"].tolist()):
        if asked.get("listed"):
            slots = asked["blocks"][row, : position + 1].long()
            keys = latents[slots // block, 0, slots % block].double()
        else:
            named = asked["blocks"][row, : position // block + 1].long()
            keys = latents[named, 0].flatten(0, 1)[: position + 1].double()
        scores = asked["q"][row].double() @ keys.T * asked["scale"]
        found.append(torch.einsum("hr,hvr->hv", scores.softmax(-1) @ keys[:, :rank], of_values))
    return torch.stack(found)


def listed(asked, counts):
    """The same problem where each row attends to so many tokens of its own, by their slots; others are NOWHERE."""
    block, device = asked["latents"].shape[2], asked["q"].device
    slots = torch.full((len(counts), max(counts) + 3), NOWHERE, dtype=torch.int32)
    for row, count in enumerate(counts):
        tokens = torch.randperm(int(asked["positions"][row]) + 1)[:count].sort().values
        assert len(tokens) == count
        slots[row, :count] = asked["blocks"][row].cpu()[tokens // block] * block + tokens % block
    last = torch.tensor([count - 1 for count in counts], dtype=torch.int32, device=device)
    return {**asked, "positions": last, "blocks": slots.to(device), "limit": max(counts), "listed": True}


def queries_problem(
    rows,
    *,
    heads=20,
    nope=192,
    rope=64,
    rank=512,
    value=256,
    block=16,
    dtype=torch.float32,
    device="cpu",
    interleaved=True,
    coded=False,
):
    """Arguments of mla_queries; latents are a slice of a wider projection, and what is not written is NaN.

    `coded`: with an FP8 cache.
    """
    slots = torch.randperm(block * (rows + 1), device=device)[:rows] + block
    angles = torch.rand(64, rope // 2, device=device) * 6
    return {
        "q": torch.randn(rows, heads, nope + rope, device=device).to(dtype),
        "latent": (3 * torch.randn(rows, rank + rope + 8, device=device)).to(dtype)[:, 8:],
        "norm": (1 + 0.1 * torch.randn(rank, device=device)).to(dtype),
        "kv_b": (torch.randn(heads, nope + value, rank, device=device) / nope**0.5).to(dtype),
        "table": torch.cat((angles.cos(), angles.sin()), dim=1),
        "positions": torch.randint(64, (rows,), dtype=torch.int32, device=device),
        "slots": slots,
        "latents": _poisoned(rows + 2, block, rank, rope, dtype, device, coded),
        "eps": 1e-5,
        "interleaved": interleaved,
    }


def exact_queries(asked):
    """The queries and the stored latents in float64."""
    rank, rope = asked["kv_b"].shape[2], asked["table"].shape[1]
    cos, sin = asked["table"][asked["positions"].long()].double().chunk(2, dim=-1)

    def turned(x, cos, sin):
        if asked["interleaved"]:
            first, second = x[..., 0::2], x[..., 1::2]
            return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    q, latent = asked["q"].double(), asked["latent"].double()
    nope = q.shape[2] - rope
    absorbed = torch.einsum("thn,hnr->thr", q[..., :nope], asked["kv_b"][:, :nope].double())
    queries = torch.cat((absorbed, turned(q[..., nope:], cos[:, None], sin[:, None])), dim=-1)
    compressed = latent[:, :rank]
    normed = compressed * (compressed.square().mean(-1, keepdim=True) + asked["eps"]).rsqrt() * asked["norm"].double()
    return queries, torch.cat((normed, turned(latent[:, rank:], cos, sin)), dim=-1)
