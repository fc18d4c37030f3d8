"""`warpbus pool`: shares of GPUs, GPUs of other machines, and running work that moves between them."""

import typer

from warpbus.cli import pool_processes

pool = typer.Typer(no_args_is_help=True, help="Share GPUs, reach those of other machines, and move what runs on them.")
pool.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(pool_processes.run)
pool.command()(pool_processes.processes)
pool.command()(pool_processes.move)
pool.command()(pool_processes.suspend)
pool.command()(pool_processes.resume)
