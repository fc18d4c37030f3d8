"""A variational autoencoder: its noise is drawn on the device."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(64, 32)
        self.mu, self.logvar = nn.Linear(32, 4), nn.Linear(32, 4)
        self.hidden, self.decode = nn.Linear(4, 32), nn.Linear(32, 64)

    def forward(self, x):
        hidden = F.relu(self.encode(x.view(-1, 64)))
        mu, logvar = self.mu(hidden), self.logvar(hidden)
        std = torch.exp(0.5 * logvar)
        z = mu + torch.randn_like(std) * std
        return torch.sigmoid(self.decode(F.relu(self.hidden(z)))), mu, logvar


data = torch.rand(6, 16, 1, 8, 8)
model = VAE().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step, batch in enumerate(data):
    torch.manual_seed(step)
    batch = batch.to(device)
    optimizer.zero_grad()
    reconstructed, mu, logvar = model(batch)
    likelihood = F.binary_cross_entropy(reconstructed, batch.view(-1, 64), reduction="sum")
    loss = likelihood - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    loss.backward()
    optimizer.step()
    print(step, loss.item())
torch.manual_seed(7)
with torch.no_grad():
    sample = torch.randn(2, 4).to(device)
    print(torch.sigmoid(model.decode(F.relu(model.hidden(sample)))).cpu().sum(dim=1).tolist())
