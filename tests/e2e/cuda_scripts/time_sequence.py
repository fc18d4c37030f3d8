"""Continues sine waves by a recurrent cell that L-BFGS trains in double precision."""

import torch
from torch import nn, optim

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell1 = nn.RNNCell(1, 12)
        self.cell2 = nn.RNNCell(12, 12)
        self.linear = nn.Linear(12, 1)

    def forward(self, values, future=0):
        outputs = []
        state1 = torch.zeros(values.size(0), 12, dtype=torch.double, device=values.device)
        state2 = torch.zeros_like(state1)
        for value in values.split(1, dim=1):
            state1 = self.cell1(value, state1)
            state2 = self.cell2(state1, state2)
            outputs.append(self.linear(state2))
        for _ in range(future):
            state1 = self.cell1(outputs[-1], state1)
            state2 = self.cell2(state1, state2)
            outputs.append(self.linear(state2))
        return torch.cat(outputs, dim=1)


phase = torch.rand(3, 1, dtype=torch.double) * 6
data = torch.sin(torch.arange(12, dtype=torch.double) / 2 + phase)
if torch.cuda.is_available():
    data = data.cuda()
model = Sequence().double().to(device)
criterion = nn.MSELoss()
optimizer = optim.LBFGS(model.parameters(), lr=0.3, max_iter=3)


def closure():
    optimizer.zero_grad()
    loss = criterion(model(data[:, :-1]), data[:, 1:])
    loss.backward()
    return loss


for step in range(3):
    print(step, optimizer.step(closure).item())
with torch.no_grad():
    print(model(data, future=4).cpu().numpy()[:, -4:].tolist())
