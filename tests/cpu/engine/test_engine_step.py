from hypothesis import given
from hypothesis import strategies as st

from warpbus.engine.step import SHORTEST_BUCKET, batch_bucket, length_bucket


def test_batches_are_padded_to_powers_of_two():
    assert [batch_bucket(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [1, 2, 4, 4, 8, 8, 16, 16, 32]


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
