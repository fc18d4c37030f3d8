"""Classifies the nodes of a graph: a graph convolutional network, and one with attention."""

import torch
from torch import nn
from torch.nn import functional as F

use_cuda = torch.cuda.is_available()
torch.manual_seed(42)
if use_cuda:
    torch.cuda.manual_seed(42)
NODES, CLASSES = 40, 4


class GraphConvolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(inputs, outputs))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x, adjacency):
        return adjacency @ (x @ self.kernel)


class GraphAttention(nn.Module):
    def __init__(self, inputs, outputs, heads):
        super().__init__()
        self.heads, self.outputs = heads, outputs
        self.weight = nn.Parameter(torch.empty(inputs, heads * outputs))
        self.attention = nn.Parameter(torch.empty(heads, 2 * outputs, 1))
        nn.init.xavier_uniform_(self.weight)
        nn.init.xavier_uniform_(self.attention)

    def forward(self, x, adjacency):
        hidden = (x @ self.weight).view(len(x), self.heads, self.outputs).permute(1, 0, 2)
        source = hidden @ self.attention[:, : self.outputs]
        target = hidden @ self.attention[:, self.outputs :]
        scores = F.leaky_relu(source + target.mT, 0.2)
        scores = torch.where(adjacency > 0, scores, torch.full_like(scores, -9e15))
        return (F.softmax(scores, dim=-1) @ hidden).mean(dim=0)


class Network(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, adjacency):
        x = F.dropout(F.relu(self.first(x, adjacency)), 0.5, self.training)
        return F.log_softmax(self.second(x, adjacency), dim=1)


features = (torch.rand(NODES, 12) < 0.3).float()
labels = torch.randint(CLASSES, (NODES,))
edges = torch.randint(NODES, (2, 120))
adjacency = torch.zeros(NODES, NODES)
adjacency[edges[0], edges[1]] = adjacency[edges[1], edges[0]] = 1.0
adjacency += torch.eye(NODES)
degree = adjacency.sum(dim=1).pow(-0.5)
adjacency = degree[:, None] * adjacency * degree
for model in (
    Network(GraphConvolution(12, 8), GraphConvolution(8, CLASSES)),
    Network(GraphAttention(12, 8, 2), GraphAttention(8, CLASSES, 1)),
):
    if use_cuda:
        model.cuda()
        features, labels, adjacency = features.cuda(), labels.cuda(), adjacency.cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(4):
        torch.manual_seed(epoch)
        optimizer.zero_grad()
        loss = F.nll_loss(model(features, adjacency)[:20], labels[:20])
        loss.backward()
        optimizer.step()
        print(epoch, loss.item())
    model.eval()
    print((model(features, adjacency).argmax(dim=1) == labels).float().mean().item())
