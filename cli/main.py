"""The command `furlong`. Heavy imports stay inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import typer

from furlong.cli import checks, lineage, weights
from furlong.cli.ablations import compare, grid, rescore
from furlong.cli.demo import demo
from furlong.cli.promote import promote, rollback
from furlong.cli.replay import replay
from furlong.cli.serve import serve
from furlong.cli.services import down, status, ui
from furlong.cli.stop import resume, stop

RUNS = (grid, compare, rescore, promote, rollback)
"""Commands about finished steps: what differs, what it was worth, and which weights to keep."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
for command in (demo, serve, ui, status, stop, resume, replay, lineage.sql, *RUNS, down):
    app.command()(command)
app.add_typer(weights.app, name="weights")
app.add_typer(lineage.app, name="lineage")
app.add_typer(checks.app, name="checks")
