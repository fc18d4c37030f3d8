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


def failures(operator, arguments, position, wrong_values):
    """The kinds of failures with each of these values in place of the last element of an integer tensor; none with the
    tensor as it is."""
    found = []
    for value in (None, *wrong_values):
        changed = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
        if value is not None:
            changed[position].view(-1)[-1] = value
        hand = Hand(Executor(torch.device("cpu"), Quota(1 << 20, 1.0)))
        hand.call(operator, *(hand.put(each) if isinstance(each, torch.Tensor) else each for each in changed))
        found.append([failure.type for failure in hand.send()])
    assert found[0] == []
    return found[1:]


OUTSIDE = [["IndexError"]] * 2


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_gradients_of_bags(mode):
    indices, bags, sizes = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])
    most = torch.tensor([[0, 1], [2, 1]])
    arguments = [torch.rand(2, 2), indices, bags, sizes, most, 3, False, mode, None]
    assert failures("aten::_embedding_bag_dense_backward", arguments, 1, [-1, 3]) == OUTSIDE
    assert failures("aten::_embedding_bag_dense_backward", arguments, 2, [-1, 2]) == OUTSIDE
    if mode == 2:
        assert failures("aten::_embedding_bag_dense_backward", arguments, 4, [-1, 3]) == OUTSIDE


def test_gradients_of_the_weights_of_bags():
    indices, bags = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 0, 1, 1])
    arguments = [torch.rand(2, 2), torch.rand(3, 2), indices, torch.tensor([0, 2]), bags, 0]
    assert failures("aten::_embedding_bag_per_sample_weights_backward", arguments, 2, [-1, 3]) == OUTSIDE
    assert failures("aten::_embedding_bag_per_sample_weights_backward", arguments, 4, [-1, 2]) == OUTSIDE


def test_labels():
    scores = torch.rand(6, 2, 4).log_softmax(2)
    padded = torch.tensor([[1, 2, -100], [3, 1, 2]])  # the first has two labels: padding may be anything
    for targets in (padded, torch.tensor([1, 2, 3, 1, 2])):
        arguments = [scores, targets, (6, 5), (2, 3)]
        assert failures("aten::_ctc_loss", arguments, 1, [-1, 4]) == OUTSIDE
        saved = torch.ops.aten._ctc_loss(*arguments)
        backward = [torch.rand(2), *arguments, *saved, 0]
        assert failures("aten::_ctc_loss_backward", backward, 2, [-1, 4]) == OUTSIDE


def test_segments():
    def call(values, name):
        hand = Hand(Executor(torch.device("cpu"), Quota(1 << 20, 1.0)))
        hand.call("aten::segment_reduce", hand.put(torch.rand(4)), "sum", **{name: hand.put(torch.tensor(values))})
        return [failure.type for failure in hand.send()]

    assert call([3, 1], "lengths") == call([0, 3, 4], "offsets") == []
    for lengths in ([5, -1], [3, 2], [1, 1]):
        assert call(lengths, "lengths") == ["IndexError"]
    for offsets in ([0, 3, 5], [-1, 3, 4], [0, 4, 3]):
        assert call(offsets, "offsets") == ["IndexError"]


def test_pivots_of_blocks():
    factors, pivots = torch.linalg.ldl_factor(torch.tensor([[0.0, 1, 2], [1, 0, 3], [2, 3, 0]]))
    assert sorted(pivots.tolist())[1] < 0  # a block of two rows
    arguments = [factors, pivots, torch.ones(3, 1)]
    assert failures("aten::linalg_ldl_solve", arguments, 1, [0, 4, -3 if pivots[-1] > 0 else 3]) == [["IndexError"]] * 3


def test_kernels_behind_convolution_are_refused():
    with pytest.raises(NotImplementedError, match="call convolution, which does"):
        guarded(operator("aten::slow_conv_dilated2d"))()


def test_others_are_called_as_they_are():
    call = operator("aten::add.Tensor")
    assert guarded(call) is call._op
