"""The file of tokens: what it may say, who may read it, and what is said of its mistakes."""

import pytest

from warpbus.errors import UsageError
from warpbus.pool.broker.leases import Limits
from warpbus.pool.daemon.tokens import LOCAL, Tenant, Tokens, new_token, read_token

A, B, C = "a" * 20, "b" * 20, "c" * 20


def write(tmp_path, text, mode=0o600):
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_names_tenants_and_their_limits(tmp_path):
    path = write(
        tmp_path, f"# who\n\n{A} ann memory=16GB share=0.5 leases=4 priority=-5\n{B} ops admin\n{C} page viewer\n"
    )
    tokens = Tokens.read(path)
    assert tokens.tenant(A) == Tenant("ann", limits=Limits(memory=16 * 10**9, share=0.5, leases=4, priority=-5))
    assert tokens.tenant(B) == Tenant("ops", "admin")
    assert tokens.tenant(C) == Tenant("page", "viewer")
    assert [tokens.tenant(token).admin for token in (A, B, C)] == [False, True, False]
    assert tokens.limits()["ann"].leases == 4
    for unknown in (None, "", A[:-1], A + "a", "ä" * 20, "\udcff"):
        assert tokens.tenant(unknown) is None


def test_without_tokens_everybody_is_local():
    assert Tokens().tenant(None) is LOCAL
    assert Tokens().tenant("anything") is LOCAL


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "it has no token"),
        ("# nobody", "it has no token"),
        ("short ann", "16 or more characters"),
        (A, "the tenant is missing"),
        (f"{A} an/n", "the tenant is missing or not a name"),
        (f"{A} ann boss", "'boss' is not understood"),
        (f"{A} ann viewer admin", "'admin' is not understood"),
        (f"{A} ann memory=lots", "'memory=lots' is not understood"),
        (f"{A} ann share=-1", "'share=-1' is not understood"),
        (f"{A} ann share=nan", "'share=nan' is not understood"),
        (f"{A} ann leases=0", "'leases=0' is not understood"),
        (f"{A} ann priority=101", "'priority=101' is not understood"),
        (f"{A} ann\n{A} bob", "line 2: an earlier line has the same token"),
        (f"{A} ann leases=1\n{B} ann leases=2", "line 2: ann has other limits"),
    ],
)
def test_mistakes_are_named_without_the_token(tmp_path, text, what):
    with pytest.raises(UsageError, match=what) as caught:
        Tokens.read(write(tmp_path, text))
    assert A not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_file_that_others_read_is_refused(tmp_path, mode):
    with pytest.raises(UsageError, match="chmod 600"):
        Tokens.read(write(tmp_path, f"{A} ann", mode))


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        Tokens.read(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(tmp_path / "none")


def test_tokens_are_new_and_long(tmp_path):
    made = {new_token() for _ in range(50)}
    assert len(made) == 50
    assert {len(token) for token in made} == {43}
    assert read_token(write(tmp_path, f"{A} ann\n")) == A
    with pytest.raises(UsageError, match="empty"):
        read_token(write(tmp_path, " \n"))
