"""A client whose tenant is in the same process: no sockets, so that a test sees both sides."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from warpbus.pool.client.device import let_gradients_flow, register
from warpbus.pool.client.session import Session, leave, use
from warpbus.pool.protocol.failures import PoisonedError
from warpbus.pool.protocol.wire import Value, decode, encode
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor


class Direct:
    """In place of a `Connection`; what it hands over are bytes, as there."""

    def __init__(self, memory: int, device: str) -> None:
        self.executor = Executor(torch.device(device), Quota(memory, 1.0))
        self.sent = 0
        self._random = torch.default_generator.get_state()

    def send(self, payload: bytearray, *, more: bool = False) -> None:
        self.sent += 1
        with self._own_generator():
            failures = self.executor.execute(self.sent, memoryview(bytes(payload)))
        if failures:
            raise failures[0].exception()

    def ask(self, question: list[Value]) -> Value:
        asked = decode(encode(question))
        assert isinstance(asked, list)
        try:
            with self._own_generator():
                (answer,) = self.executor.answer(asked)
        except PoisonedError as error:
            raise error.failure.exception() from None
        assert not isinstance(answer, memoryview)
        return decode(encode(answer))

    def read(self, handle: int, offset: int, into: memoryview) -> None:
        filled = 0
        try:
            for part in self.executor.answer(["read", handle, offset, len(into)]):
                assert isinstance(part, memoryview)
                into[filled : filled + len(part)] = part
                filled += len(part)
        except PoisonedError as error:
            raise error.failure.exception() from None
        assert filled == len(into)

    def read_little(self, handle: int, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.ask_for(handle, offset, nbytes))

    def ask_for(self, handle: int, offset: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        self.read(handle, offset, memoryview(data))
        return data

    @contextmanager
    def _own_generator(self) -> Iterator[None]:
        """The executor draws from the process's generator; a tenant's process has one of its own."""
        of_client = torch.default_generator.get_state()
        torch.default_generator.set_state(self._random)
        try:
            yield
        finally:
            self._random = torch.default_generator.get_state()
            torch.default_generator.set_state(of_client)

    def abandon(self, why: str) -> None:
        """A forked child has an executor of its own: nothing is shared."""

    def wait_for(self, reading: bytearray) -> bytearray:
        return reading


@contextmanager
def connected(
    memory: int = 1 << 28, device: str = "cpu", capability: tuple[int, int] | None = None
) -> Iterator[tuple[Session, Executor]]:
    """A session with a tenant of its own, for the time of a block.

    With a `capability` the client believes that a GPU is behind, whatever the tenant has.
    """
    register()
    connection = Direct(memory, device)
    session = Session(connection, memory, device, capability)  # type: ignore[arg-type]
    use(session)
    try:
        let_gradients_flow(session.device)
        yield session, connection.executor
    finally:
        leave(session)
