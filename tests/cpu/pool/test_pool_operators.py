"""PyTorch's database of operators on a CPU pool: right, or refused by a sentence of the table in docs/remote_gpu.md.

Each operator is computed in one of its dtypes here; `benchmarks/pool_operators.py` computes all samples in all dtypes.
"""

import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from pool_direct import connected
from pool_operator_database import DTYPES, REMOTE, check, documented_refusals, entries, expected, title
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from warpbus.pool.client.program import recorded
from warpbus.pool.client.session import current

SEED = int(os.environ.get("POOL_OPERATORS_SEED", "0"))
PARTS = 8
MOST_REFUSALS = 15
REFUSALS = documented_refusals()


@pytest.fixture
def pool() -> Iterator[None]:
    with connected(1 << 30):
        yield


def is_refusal(message: str) -> bool:
    return any(each in message for each in REFUSALS)


def chosen(part: int) -> list[tuple[object, torch.dtype]]:
    """A part of the operators, each with the dtype that the seed chooses for it."""
    by_title: dict[str, list[tuple[object, torch.dtype]]] = {}
    for dtype in DTYPES:
        for entry in entries(dtype):
            by_title.setdefault(title(entry), []).append((entry, dtype))
    numbered = enumerate(sorted(by_title))
    return [
        by_title[name][(zlib.crc32(name.encode()) + SEED) % len(by_title[name])]
        for index, name in numbered
        if index % PARTS == part
    ]


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_are_right_or_refused(pool: None, part: int) -> None:
    bad: list[str] = []
    counts: Counter[str] = Counter()
    for entry, dtype in chosen(part):
        for direction, outcome in check(entry, dtype, is_refusal, [SEED % 5]).items():
            counts[outcome.verdict] += 1
            if outcome.verdict in ("wrong", "failed"):
                bad.append(f"{title(entry)} {dtype} {direction}: {outcome.messages[outcome.verdict]}")
    assert not bad, f"seed {SEED}:\n" + "\n".join(bad)
    assert counts["right"] > 100
    assert counts["refused"] <= 6


def test_a_comparison_sees_a_difference(pool: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are a hundredth off are wrong, and an error that only the remote side raises is a failure."""
    (entry,) = (each for each in entries(torch.float32) if title(each) == "sin")

    def off(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        return y if x.device.type == "cpu" else y + y.abs().amax() * 1e-2

    def failing(x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            raise RuntimeError("something else")
        return torch.sin(x)

    for operator, verdict in ((off, "wrong"), (failing, "failed")):
        monkeypatch.setattr(entry, "op", operator)
        assert check(entry, torch.float32, is_refusal, [0])["forward"].verdict == verdict


def test_samples_with_dropout_alone_are_not_compared(pool: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the pool draws the dropout of attention otherwise than PyTorch: only their shapes are compared."""
    (entry,) = (each for each in entries(torch.float32) if title(each) == "nn.functional.scaled_dot_product_attention")
    attend, indices = entry.op, range(25)
    right = expected(entry, torch.float32, indices)
    monkeypatch.setattr(entry, "op", lambda x, *args, **kwargs: attend(x, *args, **kwargs) + (x.device.type != "cpu"))
    outcome = check(entry, torch.float32, is_refusal, indices, right, "cuda")["forward"]
    assert outcome.counts["wrong"]
    assert outcome.counts["skipped"]
    assert outcome.counts.total() == outcome.counts["wrong"] + outcome.counts["skipped"]
    assert outcome.messages["skipped"] == "dropout is drawn by another kernel"


def _distributed() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(REMOTE))
    finally:
        torch.distributed.destroy_process_group()


def _in_child(work: Callable[[], object]) -> None:
    """Raise as a RuntimeError what a forked child gets."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            work()
        except Exception as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        message = pipe.read().decode()
    os.waitpid(child, 0)
    raise RuntimeError(message)


def _recorded() -> None:

    with recorded(current()):
        torch.ones(2, device=REMOTE).sum().item()


def _to_another_process() -> None:
    data = io.BytesIO()
    ForkingPickler(data).dump(torch.ones(2, device=REMOTE))
    ForkingPickler.loads(data.getvalue())


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=REMOTE)


PROGRAMS: dict[str, Callable[[], object]] = {
    "of sparse tensors does not run": lambda: _ones(2, 3).to_sparse_csr(),
    "of nested tensors does not run": lambda: torch.nested.nested_tensor([_ones(2), _ones(3)]) * 2,
    "of quantized tensors does not run": lambda: torch.quantize_per_tensor(_ones(2), 0.1, 0, torch.qint8),
    "is not among the operators that a pool runs": lambda: _ones(2).to_mkldnn(),
    "does not run on a CPU of a pool": lambda: torch.ops.aten.slow_conv_dilated2d(
        _ones(1, 1, 3, 3), _ones(1, 1, 2, 2), [2, 2]
    ).cpu(),
    "FlexAttention is only supported on": lambda: flex_attention(*[_ones(1, 1, 2, 4)] * 3),
    "compiles CUDA code for GPUs of this machine": lambda: torch.cuda.jiterator._create_jit_fn(
        "template <typename T> T f(T x) { return x; }"
    )(_ones(2)),
    "getPinnedMemoryAllocator": lambda: torch.ones(2, pin_memory=True),
    "a tensor that it writes another size": lambda: torch.add(_ones(2), 1, out=_ones(3)),
    "Expected all tensors to be on the same device": lambda: _ones(2) + torch.ones(2),
    "No backend type associated with device type warpbus": _distributed,
    "cannot draw on a remote GPU": lambda: torch.randn(2, device=REMOTE, generator=torch.Generator()),
    "was sent to another process": _to_another_process,
    "forked child of one with a remote GPU": lambda: _in_child(lambda: _ones(2)),
    "values cannot be read while a program is recorded": _recorded,
}


def test_each_row_of_the_table_has_a_program() -> None:
    assert set(PROGRAMS) == set(REFUSALS)
    assert len(REFUSALS) <= MOST_REFUSALS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("refusal", PROGRAMS)
def test_each_row_of_the_table_is_refused(pool: None, refusal: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError, ValueError), match=re.escape(refusal)):
        PROGRAMS[refusal]()
