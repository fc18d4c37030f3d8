"""A GPT as in nanoGPT: the token embedding is the output layer, dropout everywhere, two groups for weight decay."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LAYERS, POSITIONS, TOKENS = 32, 4, 2, 16, 65
STEPS = 6


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (each.view(b, t, HEADS, d // HEADS).transpose(1, 2) for each in self.qkv(x).split(d, dim=2))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(b, t, d)
        return F.dropout(self.out(y), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(dropout)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class TiedGpt(nn.Module):
    """Logits for [b, t] tokens. With `recompute` each block is checkpointed with these options."""

    def __init__(self, dropout: float, recompute: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(TOKENS, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.token.weight
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, **self.recompute)
        return self.head(self.norm(x))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with weight decay for matrices alone."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), foreach=False)


def train(
    make: Callable[[], nn.Module], device: Any, *, optimizer_first: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """Train a model that gives logits for [b, t] tokens.

    Args:
        make: makes the model on the CPU.
        device: that it is moved to by `Module.to`.
        optimizer_first: the optimizer is made before the move.

    Returns:
        The losses, and the parameters by name, on the CPU; tied ones once.
    """
    torch.manual_seed(7)
    model = make()
    optimizer = adamw(model) if optimizer_first else None
    model.to(device)
    optimizer = optimizer or adamw(model)
    torch.manual_seed(8)
    losses = []
    for step in range(STEPS):
        drawn = torch.randint(0, TOKENS, (4, POSITIONS + 1), generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        output = model(drawn[:, :-1])
        logits = output if isinstance(output, Tensor) else output.logits
        loss = F.cross_entropy(logits.flatten(0, 1), drawn[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().cpu() for name, value in model.named_parameters()}
