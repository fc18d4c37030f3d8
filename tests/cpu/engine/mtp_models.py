"""Small models whose layer of multi-token prediction is right for a part of the tokens."""

from dataclasses import replace

import torch
from engine_models import FAMILIES, SPARSE
from torch import nn

from warpbus.models import random_model

EXACT = {name: FAMILIES[name].with_mtp() for name in ("glm", "latent", "qwen3")}
EXACT["sparse"] = replace(SPARSE, mtp=replace(SPARSE.layers[0], predicts=True))  # with an indexer of its own
MTP = EXACT["glm"]


@torch.no_grad()
def predictable(config=MTP, scheme=None, seed=0, share=0.3):
    """A random model in which the embedding of a token says most about the next one, and its MTP layer sees that.

    Args:
        share: of what the layers say: with less, more drafts are right.
    """
    model = random_model(config, scheme, "cpu", torch.float32, seed)
    model.embedding.weight *= 50
    for name, module in model.named_modules():
        if name.endswith((".o", ".down")) and isinstance(module, nn.Linear):
            module.weight *= share
    size = config.hidden_size
    model.layers[config.num_layers].projection.weight.copy_(torch.cat((torch.eye(size), torch.zeros(size, size)), 1))
    return model


@torch.no_grad()
def reference_drafts(model, tokens, count):
    """The drafts after a sequence, by passes over all of it without a cache."""
    hidden, drafts = model.hidden(torch.tensor([tokens[:-1]])), []
    for _ in range(count):
        predicted = model.predict(torch.tensor([[*tokens[1:], *drafts]]), hidden)
        drafts.append(int(model.logits(predicted[0, -1]).argmax()))
        hidden = torch.cat((hidden, predicted[:, -1:]), 1)
    return drafts
