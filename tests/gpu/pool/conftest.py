"""Leases of these tests do calls in C++, as those of a daemon do."""

import pytest

from warpbus.pool.tenant.native_calls import compile_native_calls, load_native_calls


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    compile_native_calls()
    load_native_calls.cache_clear()
    assert load_native_calls() is not None
