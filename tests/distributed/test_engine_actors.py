"""A run's engines in their actors, as a driver finds them that comes after another."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from publish_samples import make_model

from furlong.ops.protocols import GenerateRequest
from furlong.ops.spec import Placement, SpecError
from furlong.resources.actor_host import BANNER
from furlong.resources.actors import end_actors, live_actors
from furlong.resources.engines.step_gate import EngineError
from furlong.resources.remote_engine import RemoteEngine, end_superfluous, engine_count, start_engine
from furlong.resources.run_lock import run_lock

SPEC = SimpleNamespace(engine="local", model=SimpleNamespace(dtype="bfloat16"), draft={})
SGLANG = SimpleNamespace(engine="sglang", model=SPEC.model, draft={})
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


def test_replies_that_a_driver_left_go_on_and_the_next_one_gets_them(placement: Placement, folder: str) -> None:
    long = [GenerateRequest(f"long-{n}", (5, 9, n), n, 100, 1.0) for n in range(3)]
    try:
        first = start(folder, placement, "left")
        alone = [first.generate([request])[0].tokens for request in long]
        again = [dataclasses.replace(request, request_id=f"{request.request_id}:again") for request in long]
        first.submit(again)
        second = start(folder, placement, "left")
        drawn = second.generate(again)
        assert [sample.tokens for sample in drawn] == alone
        assert {sample.finish_reason for sample in drawn} <= {"stop", "length"}, "nobody ended them"
    finally:
        end_actors(placement, lambda name: not name.role.startswith("engine"))


@pytest.mark.parametrize(
    ("spec", "change", "told"),
    [
        (SPEC, {"engine_urls": "http://one"}, "FURLONG_ENGINE_URLS is set, but the run's engine is `local`"),
        (SGLANG, {"engine_tp": 2}, "FURLONG_ENGINE_TP=2 splits the embedded engine"),
        (SGLANG, {"engine_urls": "http://one,http://one"}, "names one server twice"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(spec, change, told) -> None:
    with pytest.raises(SpecError, match=re.escape(told)):
        start_engine("odd", spec, SimpleNamespace(path="", stop_token_ids=()), Placement(**change), 0)


def test_engines_are_as_many_as_addresses() -> None:
    assert engine_count(Placement(engines=3)) == 3
    assert engine_count(Placement(engines=3, engine_urls="http://one, http://two,")) == 2
