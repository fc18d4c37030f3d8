"""Classifies drawn digits by a small convolutional network, with Adadelta, a scheduler and a checkpoint."""

import io

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(16 * 12 * 12, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout(x), 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def main():
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    torch.manual_seed(1)
    labels = torch.randint(10, (96,))
    images = torch.rand(96, 1, 28, 28) * 0.2
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, 2 * label : 2 * label + 6, 4:24] = 1.0
    options = {"num_workers": 1, "pin_memory": True} if use_cuda else {}
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, **options)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(2):
        for step, (data, target) in enumerate(loader):
            torch.manual_seed(100 * epoch + step)
            data, target = data.to(device, non_blocking=True), target.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            print(epoch, step, loss.item())
        scheduler.step()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    restored = Net().to(device)
    restored.load_state_dict(torch.load(file, map_location=device))
    restored.eval()
    with torch.no_grad():
        output = restored(images.to(device))
    print(F.nll_loss(output, labels.to(device), reduction="sum").item())
    print(output.argmax(dim=1, keepdim=True).eq(labels.to(device).view(-1, 1)).sum().item())


if __name__ == "__main__":
    main()
