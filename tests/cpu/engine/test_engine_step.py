from hypothesis import given
from hypothesis import strategies as st

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
