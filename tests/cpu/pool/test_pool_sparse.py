"""Sparse COO tensors on a CPU pool: what the CPU computes, and what is refused."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pool_direct import connected
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

REMOTE = "warpbus"

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.fixture
def pool() -> Iterator[None]:
    with connected():
        yield


def matrix(device: str, shape: tuple[int, int] = (3, 4)) -> Tensor:
    """Five elements, two of them at the same place."""
    indices = torch.tensor([[0, 1, 1, 2, 1], [2, 0, 3, 1, 0]])
    return torch.sparse_coo_tensor(indices.to(device), torch.randn(5).to(device), shape)


def rows(device: str) -> Tensor:
    """One sparse axis and one dense."""
    return torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]).to(device), torch.randn(3, 4).to(device), (3, 4))


def graph_convolution(device: str) -> Any:
    adjacency = matrix(device).coalesce().requires_grad_()
    x = torch.randn(4, 2).to(device).requires_grad_()
    y = torch.sparse.mm(adjacency, x)
    y.square().sum().backward()
    return y, x.grad, adjacency.grad


def gradient_of_values(device: str) -> Any:
    values = torch.tensor([1.0, 2]).to(device).requires_grad_()
    torch.sparse_coo_tensor(
        torch.tensor([[0, 1], [1, 2]]).to(device), values, (3, 3)
    ).to_dense().square().sum().backward()
    return values.grad


def saved_and_loaded(device: str) -> Any:
    file = io.BytesIO()
    torch.save(matrix(device), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


PROGRAMS: dict[str, Callable[[str], Any]] = {
    "made and taken apart": lambda d: (matrix(d).coalesce().indices(), matrix(d).coalesce().values(), matrix(d)._nnz()),
    "moved": lambda d: (torch.eye(3).to_sparse().to(d), matrix(d).cpu(), matrix(d).to(torch.float64)),
    "from dense": lambda d: (torch.eye(3).to(d).to_sparse(), torch.eye(3).to(d).to_sparse(1)),
    "graph convolution": graph_convolution,
    "products": lambda d: (
        matrix(d) @ torch.ones(4, 2, device=d),
        torch.ones(2, 3, device=d) @ matrix(d),
        torch.sparse.mm(matrix(d), matrix(d, (4, 4))),
        torch.sparse.addmm(torch.ones(3, 2, device=d), matrix(d), torch.ones(4, 2, device=d), beta=2, alpha=3),
    ),
    "sums of tensors": lambda d: (
        matrix(d) + matrix(d),
        matrix(d) - matrix(d) * 2,
        torch.ones(3, 4, device=d) + rows(d),
        torch.ones(4, 3, device=d).t().add_(matrix(d), alpha=2),
    ),
    "by numbers and by elements": lambda d: (
        matrix(d) * 2,
        matrix(d) / 2,
        -matrix(d),
        matrix(d).mul_(3),
        matrix(d) * torch.ones(3, 4, device=d),
        matrix(d).coalesce() * matrix(d).coalesce(),
    ),
    "transposed": lambda d: (matrix(d).t(), matrix(d).transpose(0, 1), matrix(d).clone(), matrix(d).zero_()),
    "sums of elements": lambda d: (matrix(d).sum(), torch.sparse.sum(matrix(d), 1), torch.sparse.sum(rows(d), 0)),
    "one row": lambda d: matrix(d).coalesce()[1],
    "masked": lambda d: torch.randn(3, 4).to(d).sparse_mask(matrix(d).coalesce()),
    "without elements": lambda d: torch.zeros(3, 4).to(d).to_sparse().coalesce().to_dense(),
    "the gradient of values": gradient_of_values,
    "saved and loaded": saved_and_loaded,
}


def results(program: Callable[[str], Any], device: str) -> list[Any]:
    torch.manual_seed(0)
    found = [each.detach() if isinstance(each, Tensor) else each for each in tree_leaves(program(device))]
    return [each.cpu().to_dense() if isinstance(each, Tensor) else each for each in found]


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_on_the_cpu(pool: None, name: str) -> None:
    expected, found = results(PROGRAMS[name], "cpu"), results(PROGRAMS[name], REMOTE)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.SparseAdam, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
def test_embeddings_with_sparse_gradients(pool: None, kind: Any, options: dict[str, Any]) -> None:
    def program(device: str) -> Any:
        model = nn.Embedding(10, 3, sparse=True).to(device)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1, 2, 2, 5]).to(device)).square().sum().backward()
            assert model.weight.grad.is_sparse
            optimizer.step()
        return model.weight, model.weight.grad

    torch.testing.assert_close(results(program, REMOTE), results(program, "cpu"), rtol=1e-6, atol=1e-6)


def test_printing(pool: None) -> None:
    torch.manual_seed(0)
    shown = str(matrix(REMOTE))
    assert "indices=tensor([[0, 1, 1, 2, 1]" in shown
    assert "device='warpbus:0', size=(3, 4), nnz=5, layout=torch.sparse_coo" in shown


@pytest.mark.parametrize("wrong", [4, -1])
def test_an_index_outside_is_an_error(pool: None, wrong: int) -> None:
    made = torch.sparse_coo_tensor(torch.tensor([[0], [wrong]]).to(REMOTE), torch.ones(1, device=REMOTE), (3, 4))
    ones = torch.ones(4, 2, device=REMOTE)
    fields = torch.ones(3, 4, device=REMOTE)
    for use in (made.to_dense, lambda: made @ ones, lambda: made.t() @ ones[:3], lambda: made * fields):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            use().to_dense().cpu()


WRONG: dict[str, Callable[[str], Any]] = {
    "a product of other sizes": lambda d: matrix(d) @ torch.ones(5, 2, device=d),
    "a product of other dtypes": lambda d: matrix(d) @ torch.ones(4, 2, dtype=torch.float64, device=d),
    "a sum of other sizes": lambda d: matrix(d) + matrix(d, (4, 4)),
    "a dense sum of other sizes": lambda d: torch.ones(4, 4, device=d) + matrix(d),
    "a dense sum in place of integers": lambda d: torch.ones(3, 4, dtype=torch.int64, device=d).add_(matrix(d)),
    "a quotient by a matrix": lambda d: matrix(d) / torch.ones(3, 4, device=d),
    "a mask of another size": lambda d: torch.ones(4, 4, device=d).sparse_mask(matrix(d)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_cpu_refuses_too(pool: None, name: str) -> None:
    for device in ("cpu", REMOTE):
        with pytest.raises(RuntimeError):
            WRONG[name](device)


def test_a_product_without_its_base(pool: None) -> None:
    """Where beta is 0, a base that is no number does not count."""
    base = torch.full((3, 2), float("nan"))
    found = torch.sparse.addmm(base.to(REMOTE), matrix(REMOTE), torch.ones(4, 2, device=REMOTE), beta=0)
    assert found.cpu().isfinite().all()


REFUSED: dict[str, Callable[[], Any]] = {
    "an operator": lambda: matrix(REMOTE).relu(),
    "another layout": lambda: torch.eye(3, device=REMOTE).to_sparse(layout=torch.sparse_csr),
    "compressed rows": lambda: matrix(REMOTE).to_sparse_csr(),
    "compressed rows that are moved": lambda: torch.eye(3).to_sparse_csr().to(REMOTE) @ torch.ones(3, 2).to(REMOTE),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(pool: None, name: str) -> None:
    with pytest.raises(NotImplementedError, match="of sparse tensors does not run on a remote GPU"):
        REFUSED[name]()
