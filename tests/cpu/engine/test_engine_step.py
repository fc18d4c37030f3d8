import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warpbus.engine import step
from warpbus.engine.step import SHORTEST_BUCKET, batch_bucket, length_bucket


def test_graphs_are_for_the_fewer_rows_the_closer_together():
    found = [batch_bucket(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 65, 97, 512, 513, 600)]
    assert found == [1, 2, 4, 4, 8, 8, 16, 16, 32, 48, 64, 96, 128, 512, 576, 640]


@given(st.integers(1, 3000))
def test_few_rows_of_a_graph_are_nobodys(rows):
    bucket = batch_bucket(rows)
    assert rows <= bucket < 2 * rows
    assert batch_bucket(bucket) == bucket
    assert batch_bucket(rows + 1) >= bucket


def test_lengths_share_graphs():
    found = [length_bucket(tokens, 5000) for tokens in (1, 512, 513, 1024, 1025, 4096, 4097, 5000)]
    assert found == [512, 512, 1024, 1024, 2048, 4096, 5000, 5000]
    assert length_bucket(7, 100) == 100


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_bucket_holds_the_row_and_fits_the_cache(tokens, spare):
    capacity = tokens + spare
    bucket = length_bucket(tokens, capacity)
    assert tokens <= bucket <= capacity
    assert bucket <= max(SHORTEST_BUCKET, 2 * tokens)


class Graph:
    """Stands for a CUDA graph."""

    def __init__(self, work):
        self.replay = work


@pytest.fixture
def graphs(monkeypatch):
    """Makes `_Graphs` that keep so many, and counts captures."""
    monkeypatch.setattr(step, "GraphMemory", lambda device: None)
    captured = []

    def made(most):
        graphs = step._GraphCache(torch.device("cpu"), most)
        monkeypatch.setattr(graphs, "_capture", lambda work: captured.append(1) or Graph(work))
        return graphs, captured

    return made


def keys(*rows):
    return [(row, 512, "decode") for row in rows]


def test_graphs_are_captured_once(graphs):
    made, captured = graphs(None)
    ran = []
    for key in keys(*range(50), *range(50)):
        made.run(key, lambda key=key: ran.append(key))
    assert len(captured) == 50
    assert ran == keys(*range(50), *range(50))


def test_the_graphs_that_were_used_last_are_kept(graphs):
    made, captured = graphs(3)
    ran = []
    for key in keys(1, 2, 3, 1, 4, 1, 3, 4, 2):
        made.run(key, lambda key=key: ran.append(key))
    # 4 took the place of 2, which then took that of 1.
    assert len(captured) == 5
    assert list(made._captured) == keys(3, 4, 2)
    assert ran == keys(1, 2, 3, 1, 4, 1, 3, 4, 2)


def test_a_graph_that_cannot_be_captured_leaves_the_others(graphs, monkeypatch):
    made, _ = graphs(3)
    for key in keys(1, 2):
        made.run(key, list)
    monkeypatch.setattr(made, "_capture", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.run((3, 512, "decode"), list)
    assert list(made._captured) == keys(1, 2)
