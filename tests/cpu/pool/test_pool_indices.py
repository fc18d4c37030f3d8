"""Index tensors that point outside their tensors do not get operators of a CPU to leave them."""

import pytest
import torch
import torch.nn.functional as F
from pool_hand import Hand

from warpbus.pool.protocol.operators import operator
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.indices import guarded


def pooled(axes, adaptive):
    """The operator of a pooling's backward, its arguments before the indices, the indices, and its result."""
    x = torch.randn(2, 3, *[4] * axes, requires_grad=True)
    pool = getattr(F, f"{'adaptive_' if adaptive else ''}max_pool{axes}d")
    y, indices = pool(x, 2, return_indices=True)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    name = f"aten::{'adaptive_' if adaptive else ''}max_pool{axes}d_{'' if adaptive else 'with_indices_'}backward"
    shape = [] if adaptive else [[2] * axes, [2] * axes, [0] * axes, [1] * axes, False]
    return name, [gradient, x.detach(), *shape], indices, x.grad


def outcome(name, arguments):
    """What an executor gives: the result, or the failure."""
    hand = Hand(Executor(torch.device("cpu"), Quota(1 << 20, 1.0)))
    result = hand.call(name, *(hand.put(each) if isinstance(each, torch.Tensor) else each for each in arguments))
    failures = hand.send()
    return failures[0] if failures else hand.get(result)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("axes", [2, 3])
def test_pooling(axes, adaptive):
    name, arguments, indices, expected = pooled(axes, adaptive)
    assert torch.equal(outcome(name, [*arguments, indices]), expected)
    for outside in (-1, 4**axes, 10**12):
        wrong = indices.clone()
        wrong.view(-1)[5] = outside
        failure = outcome(name, [*arguments, wrong])
        assert failure.type == "IndexError"
        assert f"expected 0 to {4**axes - 1}" in failure.message


def test_classes():
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    target = torch.randint(0, 3, (2, 4, 4))
    target[0, 0] = -100
    F.nll_loss(x, target).backward()
    count = (target != -100).sum().float()

    def backward(target):
        arguments = [torch.ones(()), x.detach(), target, None, 1, -100, count]
        return outcome("aten::nll_loss2d_backward", arguments)

    assert torch.equal(backward(target), x.grad)
    for outside in (-1, 3, 10**12):
        wrong = target.clone()
        wrong[1, 2, 3] = outside
        assert backward(wrong).type == "IndexError"


def test_operators_that_nobody_looks_after():
    failure = outcome("aten::_ctc_loss", [torch.randn(4, 1, 3).log_softmax(2), torch.tensor([[1, 2]]), [4], [2]])
    assert failure.type == "NotImplementedError"
    assert "use a GPU" in failure.message


def test_others_are_called_as_they_are():
    call = operator("aten::add.Tensor")
    assert guarded(call) is call._op
