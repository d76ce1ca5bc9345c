"""A run's engines in their actors, as a driver finds them that comes after another."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from publish_samples import make_model

from furlong.ops.protocols import GenerateRequest
from furlong.ops.spec import Placement
from furlong.resources.actor_host import BANNER
from furlong.resources.actors import end_actors, live_actors
from furlong.resources.engines.step_gate import EngineError
from furlong.resources.remote_engine import RemoteEngine, end_superfluous, start_engine
from furlong.resources.run_lock import run_lock

SPEC = SimpleNamespace(model=SimpleNamespace(dtype="bfloat16"))
REQUESTS = [GenerateRequest("r", (5, 9, 11), 3, 4, 0.0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def split(placement: Placement) -> Iterator[Placement]:
    yield placement.model_copy(update={"engine_tp": 2})
    end_actors(placement, lambda name: not name.role.startswith("engine"))


def start(folder: str, placement: Placement, run: str = "split", number: int = 0) -> RemoteEngine:
    end_superfluous(run, placement)
    return start_engine(run, SPEC, SimpleNamespace(path=Path(folder), stop_token_ids=(7,)), placement, number)


def further_rank(placement: Placement) -> psutil.Process:
    """The second process of the run's newest engine, whose first one says in its log which it is."""
    log = (placement.folder / "logs" / "engine-split.log").read_text()
    leader = int(re.findall(rf"^{BANNER} .* process (\d+),", log, re.MULTILINE)[-1])
    return psutil.Process(leader).children()[0]


def until_it_fails(call: Callable[[], object]) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        call()
        time.sleep(0.05)


def test_a_split_engine_that_lost_a_rank_between_two_drivers_is_replaced(split: Placement, folder: str) -> None:
    first = start(folder, split)
    drawn = first.generate(REQUESTS)[0].tokens
    rank = further_rank(split)
    rank.kill()
    with pytest.raises(EngineError, match="lost its other ranks"):
        until_it_fails(first.health)
    second = start(folder, split)
    assert (second.health()["version"], second.health()["tp"]) == (0, 2)
    assert second.generate(REQUESTS)[0].tokens == drawn


def test_another_number_of_ranks_makes_another_engine(split: Placement, folder: str) -> None:
    assert start(folder, split).health()["tp"] == 2
    one = start(folder, split.model_copy(update={"engine_tp": 1}))
    assert one.health()["tp"] == 1
    assert [name.role for name in live_actors(split)].count("engine") == 1


def test_engines_that_nobody_needs_are_ended(split: Placement, folder: str) -> None:
    several = split.model_copy(update={"engine_tp": 1, "engines": 2})
    for run in ("done", "driven"):
        with run_lock(split.folder, "done"):
            for number in range(2):
                start(folder, several, run, number)
    with run_lock(split.folder, "driven"):
        start(folder, several.model_copy(update={"engines": 1}), "new")
        left = {(name.run, name.role) for name in live_actors(split) if name.role.startswith("engine")}
    assert left == {("driven", "engine"), ("driven", "engine-1"), ("new", "engine")}
