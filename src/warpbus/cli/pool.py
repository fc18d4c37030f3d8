"""`warpbus pool`: shares of GPUs, GPUs of other machines, and running work that moves between them."""

import typer

from warpbus.cli import pool_dashboard, pool_leases, pool_processes, pool_serving
from warpbus.cli.help import PlainGroup

pool = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    help="Share GPUs, reach those of other machines, and move what runs on them.",
)
pool.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(pool_processes.run)
pool.command()(pool_processes.processes)
pool.command()(pool_processes.move)
pool.command()(pool_processes.suspend)
pool.command()(pool_processes.resume)
pool.command()(pool_serving.serve)
pool.command()(pool_serving.token)
pool.command()(pool_leases.status)
pool.command()(pool_dashboard.dashboard)
pool.command()(pool_leases.migrate)
pool.command()(pool_leases.drain)
pool.command()(pool_leases.undrain)
pool.command()(pool_leases.release)
pool.command("suspend-lease")(pool_leases.suspend_lease)
pool.command("resume-lease")(pool_leases.resume_lease)
