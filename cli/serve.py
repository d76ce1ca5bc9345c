"""`furlong serve`: a run's policy behind an OpenAI-compatible URL, to talk to it or to point a program at it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Annotated

import typer
from rich.console import Console

console = Console(highlight=False, soft_wrap=True)


def serve(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    version: Annotated[str, typer.Option(help="A weights version's number or tag; empty for the newest.")] = "",
    port: Annotated[int, typer.Option(help="Port on this machine; 0 for any free one.")] = 8000,
) -> None:
    """Serve a weights version of a run until Ctrl-C; nothing that is drawn here is trained on."""
    from furlong.ops.sessions.template import ChatTemplate
    from furlong.ops.spec import Placement, SpecError
    from furlong.ops.stages.chain import newest_live
    from furlong.ops.stages.context import StageError
    from furlong.resources.run_lock import LockHeld
    from furlong.resources.serving.endpoint import Defaults, Endpoint
    from furlong.resources.serving.server import Server, ServerError
    from furlong.resources.system import System
    from furlong.resources.weights.tags import TagError, tagged_version

    try:
        placement = Placement.from_env()
        with System(placement).holding(run) as lent:
            at = tagged_version(lent.lake, run, version) if version else newest_live(lent.lake, run)
            engines = lent.engines_at(at)
            sampling, deadline = lent.spec.sampling, placement.reply_deadline
            defaults = Defaults(sampling.temperature, sampling.max_new_tokens, deadline, lent.context_length)
            template = ChatTemplate(lent.tokenizer)
            journal = lent.folder / "served"
            given = os.environ.get("FURLONG_SERVE_KEY", "")
            endpoint = Endpoint(template, lambda requests, _: engines.generate(requests), defaults, journal, key=given)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # after Ray, which sets one of its own
            with Server(endpoint, port):
                console.print(f"version {at} of run {run}: {endpoint.address}/v1   (Ctrl-C ends it)")
                console.print(f"API key: {'that of FURLONG_SERVE_KEY' if given else endpoint.keys.master}")
                threading.Event().wait()
    except KeyboardInterrupt:
        console.print("ended")
    except (SpecError, StageError, TagError, LockHeld, ServerError) as err:
        console.print(str(err), style="red", markup=False)
        raise typer.Exit(1) from err
