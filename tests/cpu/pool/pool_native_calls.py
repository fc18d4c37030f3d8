"""Calls that `execution.cpp` does without Python, and what two leases have to have in common after them."""

import torch


def lease(executor):
    """Everything that the client, the quota or a migration can see of a lease."""
    storages = executor.storages
    contents = {}
    for number, storage in storages.live.items():
        failure = storage.failure and storage.failure.plain()
        data = b"" if storage.base is None else bytes(storages.raw(number).cpu().numpy())
        contents[number] = (storage.nbytes, storage.version, failure, storage.value, data)
    failures = [each.plain() for each in executor.failures]
    counts = storages.used, storages.peak, storages.clock, executor.calls, executor.executed
    return contents, dict(storages.sizes()), failures, counts


def same(hands, work):
    """Do some work on both leases, which are the same afterwards. Returns the failures of its last batch."""
    found = [(work(hand), hand.send())[1] for hand in hands]
    native, python = (lease(hand.executor) for hand in hands)
    assert native == python
    return found[0]


def values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


CALLS = {
    "one result": lambda hand, a, b: hand.call("aten::add.Tensor", a, b),
    "a number": lambda hand, a, b: hand.call("aten::mul.Scalar", a, 2.5),
    "a number in place of a tensor": lambda hand, a, b: hand.call("aten::mul.Tensor", a, 2.5),
    "a number that is a keyword": lambda hand, a, b: hand.call("aten::add.Tensor", a, b, alpha=0.5),
    "a number of the type float": lambda hand, a, b: hand.call("aten::leaky_relu", a, 0.5),
    "the same tensor twice": lambda hand, a, b: hand.call("aten::mul.Tensor", a, a),
    "several results": lambda hand, a, b: hand.call("aten::max.dim", a, 1, False),
    "three results": lambda hand, a, b: hand.call("aten::native_layer_norm", a, [4], None, None, 1e-5),
    "in place": lambda hand, a, b: hand.call("aten::add_.Tensor", a, b, alpha=0.5),
    "in place of a view": lambda hand, a, b: hand.call("aten::mul_.Scalar", hand.view(a, (2, 2), (4, 1), 5), 3.0),
    "views": lambda hand, a, b: hand.call("aten::mm", a, hand.view(b, (4, 3), (1, 4))),
    "a list": lambda hand, a, b: hand.call("aten::cat", [a, b], 1),
    "lists": lambda hand, a, b: hand.call("aten::_foreach_mul.List", [a, b], [b, b]),
    "a list of numbers": lambda hand, a, b: hand.call("aten::_foreach_mul.ScalarList", [a, b], [0.5, 2.0]),
    "a list in place": lambda hand, a, b: hand.call("aten::_foreach_add_.Scalar", [a, b], 2.0),
    "dtypes": lambda hand, a, b: hand.call("aten::_to_copy", a, dtype=torch.float64),
    "strides": lambda hand, a, b: hand.call("aten::relu", hand.view(a, (4, 3), (1, 4))),
    "no elements": lambda hand, a, b: hand.call("aten::neg", hand.view(a, (0, 4), (4, 1))),
    "text": lambda hand, a, b: hand.call("aten::gelu", a, approximate="tanh"),
}
