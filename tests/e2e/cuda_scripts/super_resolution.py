"""Enlarges images by sub-pixel convolution; the whole model is saved and loaded."""

import io
from math import log10

import torch
from torch import nn, optim

torch.manual_seed(123)
device = torch.device("cuda", 0) if torch.cuda.device_count() else torch.device("cpu")
torch.backends.cudnn.benchmark = True


class Net(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(8, 8, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(8, factor**2, (3, 3), (1, 1), (1, 1))
        self.shuffle = nn.PixelShuffle(factor)
        for layer in (self.conv1, self.conv2):
            nn.init.orthogonal_(layer.weight, nn.init.calculate_gain("relu"))
        nn.init.orthogonal_(self.conv3.weight)

    def forward(self, x):
        return self.shuffle(self.conv3(torch.relu(self.conv2(torch.relu(self.conv1(x))))))


targets = torch.rand(6, 2, 1, 24, 24)
inputs = nn.functional.avg_pool2d(targets.view(12, 1, 24, 24), 3).view(6, 2, 1, 8, 8)
model = Net(3).to(device)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=0.01)
for step, (low, high) in enumerate(zip(inputs, targets, strict=True)):
    low, high = low.to(device), high.to(device)
    optimizer.zero_grad()
    loss = criterion(model(low), high)
    loss.backward()
    optimizer.step()
    print(step, loss.item())
file = io.BytesIO()
torch.save(model, file)
file.seek(0)
restored = torch.load(file, weights_only=False)
print(next(restored.parameters()).device.type == device.type)
with torch.no_grad():
    error = criterion(restored(inputs[0].to(device)), targets[0].to(device))
print(10 * log10(1 / error.item()))
