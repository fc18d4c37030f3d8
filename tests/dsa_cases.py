"""Problems of the indexer of sparse attention for tests on CPU and GPU, and what is expected in float64."""

import torch
from latent_cases import NOWHERE


def index_problem(positions, *, heads=32, size=128, block=32, dtype=torch.float32, device="cpu", limit=None):
    """Arguments of index_scores; whatever no row scores is NaN, or an entry that may not be used."""
    used = [position // block + 1 for position in positions]
    limit = limit or max(positions, default=0) + 1
    # A layer of a cache of three.
    keys = torch.full((sum(used) + 2, 3, 1, block, size), float("nan"), dtype=dtype, device=device)[:, 1]
    table = torch.full((len(positions), max([-(-limit // block), *used]) + 1), NOWHERE, dtype=torch.int32)
    free = torch.randperm(sum(used)) + 1
    for row, (position, own) in enumerate(zip(positions, free.split(used), strict=True)):
        table[row, : used[row]] = own
        tokens = torch.full((used[row] * block, size), float("nan"), dtype=dtype, device=device)
        tokens[: position + 1] = torch.randn(position + 1, size, device=device).to(dtype)
        keys[own.to(device), 0] = tokens.view(used[row], block, size)
    return {
        "q": torch.randn(len(positions), heads, size, device=device).to(dtype),
        "weights": torch.randn(len(positions), heads, device=device) * (heads * size) ** -0.5,
        "positions": torch.tensor(positions, dtype=torch.int32, device=device),
        "blocks": table.to(device),
        "keys": keys,
        "limit": limit,
    }


def exact_scores(asked):
    """Of each row the scores up to its position in float64, and bounds of the errors of float32 sums."""
    block, found = asked["keys"].shape[2], []
    for row, position in enumerate(asked["positions"].tolist()):
        named = asked["blocks"][row, : position // block + 1].long()
        keys = asked["keys"][named, 0].flatten(0, 1)[: position + 1].double()
        q, weights = asked["q"][row].double(), asked["weights"][row].double()
        scores = weights @ (q @ keys.T).clamp(min=0)
        # As many additions as features and heads, each of which loses a bit of the sum of all magnitudes at most.
        additions = sum(asked["q"].shape[1:])
        found.append((scores, additions * 2.0**-22 * (weights.abs() @ (q.abs() @ keys.abs().T))))
    return found


def chosen_tokens(scores, top_k):
    """The selected tokens of one row's scores: a list in the order of the tokens."""
    values = scores.tolist()
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    return sorted(order[:top_k])


def exact_slots(scores, positions, blocks, top_k, block):
    """What index_select gives, row by row, int32 on the CPU."""
    found = torch.zeros(len(scores), top_k, dtype=torch.int32)
    for row, position in enumerate(positions.tolist()):
        tokens = torch.tensor(chosen_tokens(scores[row, : position + 1], top_k))
        named = blocks[row].cpu().long()[tokens // block]
        found[row, : len(tokens)] = (named * block + tokens % block).int()
    return found


def features_problem(tokens, *, heads=32, size=128, rotary=64, block=32, dtype=torch.float32, device="cpu"):
    """Arguments of index_rope_and_cache but for `interleaved`; what is not written is NaN."""
    angles = torch.rand(64, rotary // 2, device=device) * 6
    return {
        "q": torch.randn(tokens, heads, size, device=device).to(dtype),
        "k": torch.randn(tokens, size, device=device).to(dtype),
        "table": torch.cat((angles.cos(), angles.sin()), dim=1),
        "positions": torch.randint(64, (tokens,), dtype=torch.int32, device=device),
        "slots": torch.randperm(block * (tokens + 1), device=device)[:tokens] + block,
        "keys": torch.full((tokens + 2, 3, 1, block, size), float("nan"), dtype=dtype, device=device)[:, 1],
    }


def exact_features(asked, interleaved):
    """Rotated queries and keys in float64."""
    cos, sin = asked["table"][asked["positions"].long()].double().chunk(2, dim=-1)

    def turned(x, cos, sin):
        own, rest = x.double().split((asked["table"].shape[1], x.shape[-1] - asked["table"].shape[1]), dim=-1)
        first, second = (own[..., 0::2], own[..., 1::2]) if interleaved else own.chunk(2, dim=-1)
        parts = first * cos - second * sin, second * cos + first * sin
        own = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
        return torch.cat((own, rest), dim=-1)

    return turned(asked["q"], cos[:, None], sin[:, None]), turned(asked["k"], cos, sin)
