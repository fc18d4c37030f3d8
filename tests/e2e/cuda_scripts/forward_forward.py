"""Hinton's forward-forward algorithm: each layer has an optimizer of its own, made before the layer moves."""

import torch
from torch import nn
from torch.optim import Adam

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1234)


class Layer(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.optimizer = Adam(self.parameters(), lr=0.03)

    def forward(self, x):
        direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return torch.relu(torch.mm(direction, self.weight.T) + self.bias.unsqueeze(0))

    def train_layer(self, positive, negative):
        for _ in range(4):
            good = self(positive).pow(2).mean(1)
            bad = self(negative).pow(2).mean(1)
            loss = torch.log(1 + torch.exp(torch.cat([2.0 - good, bad - 2.0]))).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            print(loss.item())
        return self(positive).detach(), self(negative).detach()


def overlay(x, y):
    x = x.clone()
    x[:, :10] = 0.0
    x[range(x.shape[0]), y] = x.max()
    return x


layers = nn.ModuleList([Layer(64, 32), Layer(32, 32)]).to(device)
data, labels = torch.rand(24, 64).to(device), torch.randint(10, (24,))
wrong = (labels + torch.randint(1, 10, (24,))) % 10
positive, negative = overlay(data, labels.to(device)), overlay(data, wrong.to(device))
for layer in layers:
    positive, negative = layer.train_layer(positive, negative)
goodness = []
for label in range(10):
    hidden = overlay(data, label)
    total = torch.zeros(24, device=device)
    for layer in layers:
        hidden = layer(hidden)
        total = total + hidden.pow(2).mean(1)
    goodness.append(total.unsqueeze(1))
print(torch.cat(goodness, 1).argmax(1).tolist())
