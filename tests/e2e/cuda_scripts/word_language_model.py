"""Two language models on words: a recurrent network with tied weights, and a Transformer with dropout."""

import math

import torch
from torch import nn
from torch.nn import functional as F

device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(1111)
WORDS, WIDTH, BPTT = 50, 16, 10


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.cells = nn.ModuleList([nn.RNNCell(WIDTH, WIDTH), nn.RNNCell(WIDTH, WIDTH)])
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, words, hidden):
        outputs, hidden = [], list(hidden)
        for word in self.drop(self.encoder(words)):
            hidden[0] = self.cells[0](word, hidden[0])
            hidden[1] = self.cells[1](self.drop(hidden[0]), hidden[1])
            outputs.append(hidden[1])
        output = self.decoder(self.drop(torch.stack(outputs)))
        return F.log_softmax(output.view(-1, WORDS), dim=1), torch.stack(hidden)

    def init_hidden(self, batch):
        return next(self.parameters()).new_zeros(2, batch, WIDTH)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        position = torch.arange(BPTT, dtype=torch.float).unsqueeze(1)
        divisor = torch.exp(torch.arange(0, WIDTH, 2).float() * (-math.log(10000.0) / WIDTH))
        table = torch.zeros(BPTT, WIDTH)
        table[:, 0::2], table[:, 1::2] = torch.sin(position * divisor), torch.cos(position * divisor)
        self.register_buffer("table", table.unsqueeze(1))
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.2)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, words, hidden):
        size = len(words)
        mask = torch.log(torch.tril(torch.ones(size, size))).to(words.device)
        output = self.encoder(self.embedding(words) * math.sqrt(WIDTH) + self.table[:size], mask=mask)
        return F.log_softmax(self.decoder(output), dim=-1).view(-1, WORDS), hidden

    def init_hidden(self, batch):
        return torch.zeros(1, device=next(self.parameters()).device)


corpus = torch.randint(WORDS, (4 * BPTT + 1, 5)).to(device)
for kind in (Recurrent, Transformer):
    torch.manual_seed(5)
    model = kind().to(device)
    hidden = model.init_hidden(5)
    for start in range(0, len(corpus) - 1, BPTT):
        torch.manual_seed(start)
        words, targets = corpus[start : start + BPTT], corpus[start + 1 : start + 1 + BPTT].view(-1)
        model.zero_grad()
        output, hidden = model(words, hidden.detach())
        loss = F.nll_loss(output, targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-5.0)
        print(kind.__name__, start, loss.item(), norm.item())
