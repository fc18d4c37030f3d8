"""The fused cross-entropy on a GPU: real vocabularies, its memory, and what compiled models around it give."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from warpbus.train.dataset import IGNORED
from warpbus.train.loss import PIECE_BYTES, summed_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HIDDEN = 512


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def head_of(vocabulary, dtype, *, frozen=False):
    head = nn.Linear(HIDDEN, vocabulary, bias=False, device="cuda", dtype=dtype)
    return head.requires_grad_(not frozen)


def targets_of(tokens, vocabulary):
    drawn = torch.randint(vocabulary, (tokens,), device="cuda")
    drawn[::4] = IGNORED
    return drawn


@pytest.mark.parametrize("vocabulary", [65024, 151552])
@pytest.mark.parametrize("frozen", [False, True])
def test_bfloat16_against_float64(vocabulary, frozen):
    head, targets = head_of(vocabulary, torch.bfloat16, frozen=frozen), targets_of(1500, vocabulary)
    hidden = torch.randn(1500, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    inputs = [hidden] if frozen else [hidden, head.weight]
    loss = summed_cross_entropy(hidden, head, targets)
    found = torch.autograd.grad(loss, inputs)
    wide = [each.detach().double().requires_grad_() for each in (hidden, head.weight)]
    scores = wide[0] @ wide[1].T
    expected_loss = F.cross_entropy(scores, targets, reduction="sum", ignore_index=IGNORED)
    expected = torch.autograd.grad(expected_loss, wide[: len(inputs)])
    assert loss.dtype == torch.float32
    assert float(loss.detach() / expected_loss.detach()) == pytest.approx(1, abs=1e-3)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2


def test_scores_of_a_piece_are_all_that_there_is():
    tokens, vocabulary = 8192, 151552
    head, targets = head_of(vocabulary, torch.bfloat16, frozen=True), targets_of(tokens, vocabulary)
    hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    summed_cross_entropy(hidden, head, targets).backward()  # what libraries allocate once
    hidden.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = summed_cross_entropy(hidden, head, targets)
    loss.backward()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 1.25 * PIECE_BYTES  # all scores would be 2.5 GB in 16 bits
    assert hidden.grad is not None


def test_targets_on_the_cpu_let_nobody_wait():
    vocabulary = 1000
    head = head_of(vocabulary, torch.bfloat16)
    hidden = torch.randn(300, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = targets_of(300, vocabulary)
    expected = torch.autograd.grad(summed_cross_entropy(hidden, head, targets), [hidden, head.weight])
    here = targets.cpu().pin_memory()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = summed_cross_entropy(hidden, head, here)
        found = torch.autograd.grad(loss, [hidden, head.weight])
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.testing.assert_close(found, expected)


def test_autocast_with_float32_weights():
    head, targets = head_of(5000, torch.float32), targets_of(700, 5000)
    hidden = torch.randn(700, HIDDEN, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = summed_cross_entropy(hidden, head, targets, rows=200)
    found = torch.autograd.grad(loss, [hidden, head.weight])
    expected_loss = F.cross_entropy(head(hidden), targets, reduction="sum", ignore_index=IGNORED)
    expected = torch.autograd.grad(expected_loss, [hidden, head.weight])
    assert [each.dtype for each in found] == [torch.float32] * 2
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2


def test_compiled_around():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 3000, bias=False)

        def forward(self, x, targets):
            return summed_cross_entropy(F.silu(self.layer(x)), self.head, targets)

    model = Model().to("cuda", torch.bfloat16)
    x, targets = torch.randn(256, HIDDEN, device="cuda", dtype=torch.bfloat16), targets_of(256, 3000)
    expected = torch.autograd.grad(model(x, targets), list(model.parameters()))
    found = torch.autograd.grad(torch.compile(model)(x, targets), list(model.parameters()))
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).float().norm() / theirs.float().norm()) < 2e-2
