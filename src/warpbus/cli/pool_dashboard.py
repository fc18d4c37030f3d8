"""`warpbus pool dashboard`: the pool in a browser."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from warpbus.cli.language import Console
from warpbus.cli.options import FieldOption, options_of
from warpbus.cli.pool_leases import Address, TokenFile, daemon_of
from warpbus.cli.serve import KEY_VARIABLE, keys_of, serve_extra
from warpbus.server.options import ServerOptions

if TYPE_CHECKING:
    from warpbus.pool.protocol.address import Address as Where
    from warpbus.pool.protocol.control_channel import ControlChannel

_SECONDS = 10.0


@options_of(
    {"server": ServerOptions},
    address=...,
    token_file=...,
    host="address to listen at",
    port=...,
    api_key=...,
    api_key_file=...,
    ssl_certfile="PEM certificate; the page then comes over TLS",
    ssl_keyfile="its PEM key",
    insecure="let other machines look without a key or without TLS",
    allowed_host=FieldOption("further name of this machine, on loopback", field="allowed_hosts"),
)
def dashboard(
    server: dict[str, Any],
    address: Address = None,
    token_file: TokenFile = None,
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 7780,
    api_key: Annotated[
        list[str] | None, typer.Option(help=f"one that browsers may look with; also {KEY_VARIABLE}")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="a file with an accepted key a line")] = None,
) -> None:
    """Show the pool in a browser: its GPUs, leases, queue and events, and the last hour. It only shows.

    It answers this machine alone. For others: --host, --api-key, --ssl-certfile and --ssl-keyfile.
    """
    with serve_extra("the dashboard"):
        from warpbus.server.pool_page import serve_pool_page

    where, token = daemon_of(address, token_file)
    options = ServerOptions(**server, port=port, api_keys=keys_of(api_key or [], api_key_file))
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    asker = _StatusClient(where, token)
    asker.ask()  # a wrong address or token ends it here
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    serve_pool_page(
        asker.status, options, ready=lambda url: console.print(f"[bold]ready[/] at {escape(url)}: look there")
    )


class _StatusClient:
    """Asks a daemon for the pool's status over one connection, which it makes again where it was lost."""

    def __init__(self, where: Where, token: str | None) -> None:
        self._where = where
        self._token = token
        self._control: ControlChannel | None = None

    async def status(self) -> dict[str, Any]:
        """The pool's status, from a thread; the server asks once at a time."""
        return await asyncio.to_thread(self.ask)

    def ask(self) -> dict[str, Any]:
        """The pool's status. WarpbusError where it does not answer."""
        from warpbus.errors import WarpbusError
        from warpbus.pool.protocol.control_channel import ControlChannel

        try:
            if self._control is None:
                self._control = ControlChannel(self._where, self._token)
            return self._control.ask("status", timeout=_SECONDS)
        except WarpbusError:
            if self._control is not None:
                self._control.close()
                self._control = None
            raise
