"""The command `furlong`. Heavy imports stay inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import typer

from furlong.cli import weights
from furlong.cli.demo import demo
from furlong.cli.serve import serve
from furlong.cli.services import down, status, ui

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
for command in (demo, serve, ui, status, down):
    app.command()(command)
app.add_typer(weights.app, name="weights")
