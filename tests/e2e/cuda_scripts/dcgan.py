"""A generative adversarial network of convolutions: two models, two optimizers, batch norm in training."""

import torch
from torch import nn, optim

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.manual_seed(3)
NOISE = 8


def weights(module):
    name = module.__class__.__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


generator = nn.Sequential(
    nn.ConvTranspose2d(NOISE, 8, 4, 1, 0, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(True),
    nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False),
    nn.BatchNorm2d(4),
    nn.ReLU(True),
    nn.ConvTranspose2d(4, 3, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
discriminator = nn.Sequential(
    nn.Conv2d(3, 4, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(4, 8, 4, 2, 1, bias=False),
    nn.BatchNorm2d(8),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(8, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
).to(device)
torch.manual_seed(4)
for model in (generator, discriminator):
    model.cpu().apply(weights).to(device)
criterion = nn.BCELoss()
optimizer_d = optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
images = torch.rand(4, 8, 3, 16, 16) * 2 - 1
for step, real in enumerate(images):
    torch.manual_seed(step)
    real = real.to(device)
    discriminator.zero_grad()
    label = torch.full((real.size(0),), 1.0, dtype=real.dtype, device=device)
    error_real = criterion(discriminator(real).view(-1), label)
    error_real.backward()
    fake = generator(torch.randn(real.size(0), NOISE, 1, 1, device=device))
    error_fake = criterion(discriminator(fake.detach()).view(-1), label.fill_(0.0))
    error_fake.backward()
    optimizer_d.step()
    generator.zero_grad()
    error_g = criterion(discriminator(fake).view(-1), label.fill_(1.0))
    error_g.backward()
    optimizer_g.step()
    print(step, (error_real + error_fake).item(), error_g.item())
