"""Where documents of packed rows lie, for the kernel that attends to each by itself."""

import torch

from warpbus.models.layers.packed_attention import Extents, operators_are_known

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1], [0, 1, -1, -1, -1]])


def test_stretches_end_with_rows() -> None:
    found = Extents.of(DOCUMENTS)
    assert found.bounds.tolist() == [0, 3, 5, 6, 7, 10]
    assert (found.bounds.dtype, found.longest, found.tokens) == (torch.int32, 3, 10)


def test_torch_has_the_operators() -> None:
    """Where a new version of torch changed them, packed rows would be trained with a mask, and more slowly."""
    assert operators_are_known()


def test_each_document_has_the_prefix_in_front() -> None:
    extents = Extents.of(DOCUMENTS)
    tokens = torch.randn(10, 2, 3, dtype=torch.float64, requires_grad=True)
    prefix = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    prefixed = extents.behind(4)
    assert (prefixed.bounds.dtype, prefixed.longest) == (torch.int32, 7)
    joined = prefixed.join(prefix, tokens)
    for index in range(5):
        start, end = extents.bounds[index : index + 2].tolist()
        own = joined[prefixed.bounds[index] : prefixed.bounds[index + 1]]
        assert torch.equal(own, torch.cat((prefix, tokens[start:end])))
    assert torch.autograd.gradcheck(lambda *both: prefixed.join(*both), (prefix, tokens))
