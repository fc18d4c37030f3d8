"""The fused cross-entropy against torch's own, in values, gradients and what it keeps."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.errors import TensorError, UsageError
from warpbus.models.layers import QuantizedLinear
from warpbus.qtensor import QTensor, Scheme
from warpbus.train.dataset import IGNORED
from warpbus.train.loss import piece_rows, summed_cross_entropy

TOKENS, HIDDEN, VOCABULARY = 11, 6, 17


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def targets_of(*shape: int) -> Tensor:
    """Every third one is to be ignored."""
    drawn = torch.randint(VOCABULARY, shape)
    drawn.view(-1)[::3] = IGNORED
    return drawn


def plain(hidden: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
    scores = head(hidden).flatten(0, -2)
    return F.cross_entropy(
        scores.to(torch.promote_types(scores.dtype, torch.float32)), targets.flatten(), reduction="sum"
    )


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_parity_in_float64(rows: int, bias: bool) -> None:
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=torch.float64)
    hidden = torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    targets = targets_of(2, TOKENS)
    inputs = (hidden, *head.parameters())
    ours, theirs = summed_cross_entropy(hidden, head, targets, rows=rows), plain(hidden, head, targets)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients(ours * 3, *inputs), gradients(theirs * 3, *inputs), rtol=1e-11, atol=1e-12)


def test_bfloat16_is_as_near_as_its_rounding() -> None:
    head = nn.Linear(64, 1000, bias=False)
    hidden, targets = torch.randn(200, 64), torch.randint(1000, (200,))
    wide = hidden.clone().requires_grad_()
    expected = plain(wide, head, targets)
    expected_gradients = gradients(expected, wide, head.weight)
    narrow = hidden.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = summed_cross_entropy(narrow, head, targets, rows=64)
    assert loss.dtype == torch.float32
    assert abs(float(loss.detach()) / float(expected.detach()) - 1) < 1e-3
    for ours, theirs in zip(gradients(loss, narrow, head.weight), expected_gradients, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2


def test_in_bfloat16_tokens_that_are_nearly_known_still_teach() -> None:
    """Likelihoods of about 0.999, which bfloat16 rounds to 1."""
    head = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.copy_(torch.eye(16))
    hidden = (9.5 * torch.eye(16, dtype=torch.bfloat16)).requires_grad_()
    found = gradients(summed_cross_entropy(hidden, head, torch.arange(16)), hidden, head.weight)
    wide, wide_head = hidden.detach().double().requires_grad_(), nn.Linear(16, 16, bias=False, dtype=torch.float64)
    with torch.no_grad():
        wide_head.weight.copy_(head.weight)
    expected = gradients(plain(wide, wide_head, torch.arange(16)), wide, wide_head.weight)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-2


def test_frozen_head_gives_a_gradient_to_the_hidden_states_alone() -> None:
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
    hidden, targets = torch.randn(TOKENS, HIDDEN, requires_grad=True), targets_of(TOKENS)
    loss = summed_cross_entropy(hidden, head, targets, rows=4)
    loss.backward()
    assert head.weight.grad is None
    torch.testing.assert_close(hidden.grad, gradients(plain(hidden, head, targets), hidden)[0])


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a16", "w8a8-int8"])
def test_quantized_head(scheme: str) -> None:
    parsed = Scheme.parse(scheme)
    codes = torch.randint(1, 200 if parsed.bits == 8 else 16, (VOCABULARY, 64), dtype=torch.uint8)
    weight = QTensor.from_codes(parsed, codes, torch.rand(VOCABULARY, parsed.groups(64)) * 0.02)
    hidden, targets = torch.randn(TOKENS, 64, requires_grad=True), targets_of(TOKENS)
    loss = summed_cross_entropy(hidden, QuantizedLinear(weight), targets, rows=4)
    dense = nn.Linear(64, VOCABULARY, bias=False)
    dense.weight = nn.Parameter(weight.dequantize(torch.float32))
    expected = plain(hidden, dense, targets)
    near = 2e-2 if parsed.activations else 1e-5
    torch.testing.assert_close(loss, expected, rtol=near, atol=near)
    ours, theirs = gradients(loss, hidden)[0], gradients(expected, hidden)[0]
    assert float((ours - theirs).norm() / theirs.norm()) < near


def test_tied_embedding_gets_one_gradient() -> None:
    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    head.weight = embedding.weight
    tokens, targets = torch.randint(VOCABULARY, (TOKENS,)), targets_of(TOKENS)
    expected = gradients(plain(embedding(tokens), head, targets), embedding.weight)[0]
    fired: list[Tensor] = []
    embedding.weight.register_post_accumulate_grad_hook(fired.append)
    summed_cross_entropy(embedding(tokens), head, targets, rows=2).backward()
    assert len(fired) == 1  # what DDP waits for
    torch.testing.assert_close(embedding.weight.grad, expected)


def test_no_targets_no_loss() -> None:
    head = nn.Linear(HIDDEN, VOCABULARY)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    loss = summed_cross_entropy(hidden, head, torch.full((TOKENS,), IGNORED))
    loss.backward()
    assert float(loss.detach()) == 0
    for tensor in (hidden, head.weight, head.bias):
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_only_tokens_with_a_target_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    linear = F.linear

    def counting(x: Tensor, *others: Tensor | None) -> Tensor:
        scored.append(len(x))
        return linear(x, *others)

    monkeypatch.setattr("warpbus.train.loss.F.linear", counting)
    targets = torch.full((TOKENS,), IGNORED)
    targets[[2, 5, 7]] = 1
    summed_cross_entropy(torch.randn(TOKENS, HIDDEN), nn.Linear(HIDDEN, VOCABULARY), targets, rows=2)
    assert scored == [2, 1]


def test_scores_are_not_kept() -> None:
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    head = nn.Linear(HIDDEN, 500, bias=False)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        summed_cross_entropy(torch.randn(300, HIDDEN, requires_grad=True), head, torch.randint(500, (300,)))
    assert max(kept, default=0) < 300 * 500


def test_without_gradients_nothing_is_differentiated() -> None:
    head, hidden, targets = nn.Linear(HIDDEN, VOCABULARY), torch.randn(TOKENS, HIDDEN), targets_of(TOKENS)
    with torch.no_grad():
        loss = summed_cross_entropy(hidden, head, targets, rows=3)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(hidden, head, targets).detach())


def test_a_second_derivative_is_refused() -> None:
    head, hidden = nn.Linear(HIDDEN, VOCABULARY), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    loss = summed_cross_entropy(hidden, head, targets_of(TOKENS))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_compiled_around() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return summed_cross_entropy(torch.relu(self.layer(x)), self.head, targets)

    model, x, targets = Model(), torch.randn(TOKENS, HIDDEN), targets_of(TOKENS)
    expected = gradients(model(x, targets), *model.parameters())
    ours = gradients(torch.compile(model, backend="aot_eager")(x, targets), *model.parameters())
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("vocabulary", "itemsize", "rows"),
    [(65024, 2, 2048), (65024, 4, 1024), (151552, 2, 768), (100, 4, 671088 // 128 * 128), (10**9, 2, 1)],
)
def test_pieces_are_bounded(vocabulary: int, itemsize: int, rows: int) -> None:
    assert piece_rows(vocabulary, itemsize) == rows


def test_bad_arguments() -> None:
    head, hidden = nn.Linear(HIDDEN, VOCABULARY), torch.randn(2, TOKENS, HIDDEN)
    with pytest.raises(TensorError, match=r"targets have shape \[11\], expected \[2, 11\]"):
        summed_cross_entropy(hidden, head, targets_of(TOKENS))
    with pytest.raises(UsageError, match="the head is Identity"):
        summed_cross_entropy(hidden, nn.Identity(), targets_of(2, TOKENS))
