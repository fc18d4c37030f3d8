"""Errors as a client gets to know them."""

import pytest
import torch

from warpbus import errors
from warpbus.errors import (
    DeviceError,
    LeaseLostError,
    PoolError,
    ProtocolError,
    QueueFullError,
    StateError,
    TensorError,
    TokenError,
    WarpbusError,
)
from warpbus.pool.protocol import wire
from warpbus.pool.protocol.failures import CallFailure, sent_error


class OddError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ValueError("no"), "ValueError"),
        (IndexError("no"), "IndexError"),
        (NotImplementedError("no"), "NotImplementedError"),
        (torch.OutOfMemoryError("no"), "OutOfMemoryError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "OutOfMemoryError"),
        (torch.linalg.LinAlgError("no"), "_LinAlgError"),
        (KeyError("no"), "RuntimeError"),
        (OddError("no"), "RuntimeError"),
        (DeviceError("no"), "DeviceError"),
        (TensorError("no"), "TensorError"),
    ],
)
def test_the_kind_of_an_error_goes_over(error, name):
    failure = CallFailure.of(error, "aten::add", 4)
    assert failure == CallFailure(name, str(error), "aten::add", 4)
    assert CallFailure.read(wire.decode(wire.encode(failure.plain()))) == failure


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("IndexError", IndexError),
        ("_LinAlgError", torch.linalg.LinAlgError),
        ("OutOfMemoryError", torch.OutOfMemoryError),
        ("LeaseLostError", LeaseLostError),
        ("QueueFullError", QueueFullError),
        ("StateError", StateError),
        ("TokenError", TokenError),
        ("RequestError", RuntimeError),  # of the server, which the pool does not know
        ("SystemExit", RuntimeError),
        ("__doc__", RuntimeError),
    ],
)
def test_a_client_raises_it_again(name, kind):
    error = CallFailure(name, "no", "aten::add", 4).exception()
    assert (type(error), str(error)) == (kind, "no")
    own = issubclass(kind, WarpbusError)
    assert type(sent_error({"type": name, "message": "no"})) is (kind if own else PoolError)


@pytest.mark.parametrize("name", ["ConnectionLostError", "FrameError"])
def test_a_connection_that_the_pool_has_lost_is_not_the_clients(name):
    assert type(CallFailure(name, "no", "", 0).exception()) is PoolError


def test_messages_end_somewhere():
    assert len(CallFailure.of(ValueError("x" * 10**6), "", 0).message) < 20_000


@pytest.mark.parametrize(
    "value", [None, {}, {"type": "ValueError"}, {"type": 1, "message": "", "operator": "", "batch": 0}]
)
def test_what_is_no_failure(value):
    with pytest.raises(ProtocolError):
        CallFailure.read(value)


def test_no_error_of_ours_hides_another_name():
    assert not {"RuntimeError", "ValueError", "OutOfMemoryError"} & set(vars(errors))
