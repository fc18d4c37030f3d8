"""Trains a network to repaint images in a style: losses of features and of their Gram matrices."""

import torch
from torch import nn
from torch.optim import Adam

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(42)


class Convolution(nn.Module):
    def __init__(self, inputs, outputs, kernel, stride=1, upsample=None):
        super().__init__()
        self.upsample = upsample
        self.pad = nn.ReflectionPad2d(kernel // 2)
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride)

    def forward(self, x):
        if self.upsample:
            x = nn.functional.interpolate(x, mode="nearest", scale_factor=self.upsample)
        return self.conv(self.pad(x))


class Painter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.norm1 = Convolution(3, 8, 5), nn.InstanceNorm2d(8, affine=True)
        self.down2, self.norm2 = Convolution(8, 12, 3, 2), nn.InstanceNorm2d(12, affine=True)
        self.middle, self.norm3 = Convolution(12, 12, 3), nn.InstanceNorm2d(12, affine=True)
        self.up, self.norm4 = Convolution(12, 8, 3, upsample=2), nn.InstanceNorm2d(8, affine=True)
        self.out = Convolution(8, 3, 5)

    def forward(self, x):
        x = torch.relu(self.norm2(self.down2(torch.relu(self.norm1(self.down1(x))))))
        x = torch.relu(self.norm3(self.middle(x))) + x
        return self.out(torch.relu(self.norm4(self.up(x))))


def gram(y):
    batch, channels, height, width = y.size()
    features = y.view(batch, channels, width * height)
    return features.bmm(features.transpose(1, 2)) / (channels * height * width)


features = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1))
features.requires_grad_(False).to(device)
painter = Painter().to(device)
optimizer = Adam(painter.parameters(), 1e-3)
style = gram(features(torch.rand(1, 3, 16, 16).to(device))).expand(2, -1, -1)
for step, images in enumerate(torch.rand(4, 2, 3, 16, 16)):
    images = images.to(device)
    optimizer.zero_grad()
    painted = painter(images)
    mine, theirs = features(painted), features(images)
    loss = 1e2 * nn.functional.mse_loss(mine, theirs) + 1e4 * nn.functional.mse_loss(gram(mine), style)
    loss.backward()
    optimizer.step()
    print(step, loss.item())
painter.eval()
torch.cuda.synchronize() if torch.cuda.is_available() else None
print(painter(images).clamp(0, 1).detach().cpu().mean().item())
