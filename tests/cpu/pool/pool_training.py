"""Models to train here and on the pool, and how both are compared: bit for bit."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def residual_network() -> nn.Module:
    """A small network like ResNet, with dropout, for `[b, 3, 16, 16]` pictures and 10 classes."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1),
        ResidualBlock(8, 8, 1),
        nn.MaxPool2d(2),
        ResidualBlock(8, 16, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16, 10),
    )


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.network_norm(x))))


class Gpt(nn.Module):
    """A small GPT over 65 characters and up to 32 positions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(65, width), nn.Embedding(32, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 65, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).flatten(0, 1)


def pictures(step: int) -> tuple[Tensor, Tensor]:
    """The step's pictures and classes."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 16, 16, generator=generator), torch.randint(0, 10, (4,), generator=generator)


def texts(step: int) -> tuple[Tensor, Tensor]:
    """The step's tokens and those that follow."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(0, 65, (4, 17), generator=generator)
    return drawn[:, :-1], drawn[:, 1:].flatten()


MODELS: dict[str, tuple[Any, Any]] = {"residual network": (residual_network, pictures), "gpt": (Gpt, texts)}


class Training:
    """A model in training on a device, the same at every run; `step` returns the loss as it is on the device."""

    def __init__(self, name: str, device: torch.device | str, **adam: Any) -> None:
        make, self.data = MODELS[name]
        torch.manual_seed(7)
        self.model = copy.deepcopy(make()).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, **adam)
        self.device = device
        self.steps = 0
        torch.manual_seed(8)

    def step(self) -> Tensor:
        inputs, expected = (each.to(self.device) for each in self.data(self.steps))
        self.steps += 1
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(inputs), expected)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, steps: int) -> list[float]:
        return [self.step().item() for _ in range(steps)]

    def weights(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self.model.state_dict().items()}


def assert_equal_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert different == []
