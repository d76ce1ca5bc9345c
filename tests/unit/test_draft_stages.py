"""What a run with a draft tells: on a real engine, trainer and lake in this process."""

import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from blank_rows import blank_row
from dagster import AssetCheckSeverity, DagsterInstance, materialize
from rich.console import Console
from test_stages import RUN, open_run, take

from furlong.cli.report_view import show_report
from furlong.ops import records
from furlong.ops.draft.settings import draft_of
from furlong.ops.history import draft_twins, load_series
from furlong.ops.report import build_report
from furlong.ops.rollouts.acceptance import WINDOW, added, counted
from furlong.ops.spec import load_spec
from furlong.ops.stages.context import StageReport, StepKey
from furlong.pipelines import assets
from furlong.pipelines.acceptance_check import CHECK, check_event, check_result
from furlong.pipelines.metadata import metadata
from furlong.pipelines.partitions import STEPS
from furlong.resources.engines.local import LocalEngine
from furlong.resources.lake import Lake
from furlong.resources.weights.fleet import Fleet

DRAFT = {"kind": "eagle3", "adaptive": False, "verify": "match", "shadow": 0.25, "learning_rate": 1e-3}


def drafting(run) -> LocalEngine:
    model = run.model
    stops, draft = list(model.stop_token_ids), draft_of(run.spec)
    return LocalEngine(str(model.path), 0, run.spec.model.dtype, 1, stops, draft=draft)


@pytest.fixture(scope="module")
def drafted(made, tmp_path_factory, quick_spec):
    """A complete run with a draft, and what each of its stages told."""
    root = tmp_path_factory.mktemp("drafted")
    shutil.copytree(made / "models", root / "models")
    run = open_run(root, quick_spec, {"draft": DRAFT})
    engine = drafting(run)
    vars(run)["engines"] = Fleet(RUN, run.lake, str(run.model.path), [engine], lambda number: drafting(run))
    run.perform("prompts", StepKey(RUN, 1))
    run.perform("evals", StepKey(RUN, 1))
    told = [take(run, step) for step in (1, 2, 3)]
    counts = counted(engine.health()["speculation"])
    run.perform("evals", StepKey(RUN, 3))
    yield run, told, counts
    run.pause()
    run.verifier.close()


def rows_of(run) -> list[dict]:
    rows = run.lake.read("batches", {"run": RUN}).to_pylist()
    return [row["speculation"] for row in sorted(rows, key=lambda row: row["step"])]


def test_each_count_is_of_one_step(drafted):
    run, _, counts = drafted
    rows = rows_of(run)
    # Version 0 has no draft, and evaluations before it none either, so that only their steps without one are missing.
    assert rows[0]["verifies"] == 0
    assert {step["kind"] for step in rows[0]["decode_steps"]} == {"off: no draft"}
    whole = added(rows)
    for name in ("verifies", "tokens", "proposed", "accepted", "positions"):
        assert whole[name] == counts[name], name
    assert whole["tokens"] > whole["verifies"] > 0


def test_a_step_tells_acceptance_by_depth_position_and_task(drafted):
    run, told, _ = drafted
    assert "acceptance_length" not in told[0]["rollouts"].values
    for step, row in zip(told[1:], rows_of(run)[1:], strict=True):
        values = step["rollouts"].values
        length = row["tokens"] / row["verifies"]
        assert 1 <= length <= 5
        places = ("acceptance_length", "acceptance_length_below_64", "acceptance_length_sort_digits")
        assert [values[name] for name in places] == [length] * 3
        assert 0 < values["accepted_depth_1"] < 1
        assert values["reply_tokens_per_second_shadow"] > 0
        # Nothing is ever drawn without the draft where it is always asked, so that there is nothing to compare with.
        assert "speculation_speedup" not in values


def test_a_step_tells_what_the_draft_learnt(drafted):
    _, told, _ = drafted
    values = [step["train_step"].values for step in told]
    assert all(row["draft_loss"] > 0 and 0 < row["draft_train_share"] < 1 and row["draft_tokens"] > 0 for row in values)
    assert all(1 <= row["draft_acceptance"] <= 5 for row in values)


def test_a_new_process_draws_the_same_plots(drafted):
    run, told, _ = drafted
    found = load_series(run.lake, RUN)
    assert found["acceptance_length"] == run.series("acceptance_length")
    assert found["draft_loss"] == run.series("draft_loss")
    view = SimpleNamespace(links=dict, series=run.series, spec=run.spec, twins={"other (frozen)": [(2, 1.5), (3, 1.2)]})
    facts = metadata(told[-1]["rollouts"], view)
    assert facts["acceptance_plot"].value.startswith("![acceptance length")
    assert facts["acceptance_length_sort_digits"] == told[-1]["rollouts"].values["acceptance_length"]
    assert "draft_plot" in metadata(told[-1]["train_step"], view)


def test_the_report_adds_up_and_is_shown(drafted):
    run, told, _ = drafted
    report = json.loads(json.dumps(build_report(run.lake, RUN, run.spec, [])))
    lengths = [step["rollouts"].values.get("acceptance_length") for step in told]
    assert report["acceptance_length_per_step"] == lengths
    assert report["draft"]["loss_per_step"] == [step["train_step"].values["draft_loss"] for step in told]
    assert 0 < report["draft_train_share"] < 1
    # Steps of version 0, and all others, had batches of the same sizes.
    assert report["rollout_speedup"] == report["draft"]["speculation_speedup"] > 0
    assert report["draft"]["skipped_steps"] == 0
    console = Console(record=True, width=100)
    show_report(console, report, run.placement)
    text = console.export_text()
    for part in (f"{lengths[1]:.2f} -> {lengths[2]:.2f}", f"{report['rollout_speedup']:.2f} x", "no draft"):
        assert part in text, part


def test_a_run_without_a_draft_tells_nothing_about_one(run):
    told = take(run, 1)
    assert not any("draft" in name and value is not None for name, value in told["train_step"].values.items())
    assert not any("accept" in name or "speculation" in name for name in told["rollouts"].values)
    assert rows_of(run) == [None]
    assert check_result(run).passed
    steps = run.lake.read("steps", {"run": RUN}).to_pylist()
    assert [row["draft_skipped"] for row in steps] == [None]


def viewed(lengths: list[float], **draft) -> SimpleNamespace:
    points = list(enumerate(lengths, 1))
    return SimpleNamespace(spec=SimpleNamespace(draft=draft), series=lambda value: points)


@pytest.mark.parametrize(("trains", "advice"), [(True, "draft.learning_rate"), (False, "draft.train: true")])
def test_the_check_warns_when_acceptance_falls(trains, advice):
    run = viewed([3.0] * WINDOW + [2.0] * WINDOW, kind="eagle3", train=trains)
    result, event = check_result(run), check_event(run)
    assert (result.passed, event.passed) == (False, False)
    assert result.severity.value == event.severity.value == "WARN"
    assert (result.check_name, event.asset_check_key) == (CHECK.name, CHECK.key)
    assert advice in result.description
    assert result.metadata[f"acceptance_length_of_last_{WINDOW}_steps"].value == 2.0
    assert check_result(viewed([2.0] * WINDOW + [3.0] * WINDOW, kind="eagle3")).passed


@pytest.mark.parametrize("last", [2.0, 3.0])
def test_a_step_that_is_materialised_by_itself_is_checked_and_goes_on(last, tmp_path):
    run = viewed([3.0] * WINDOW + [last] * WINDOW, kind="eagle3")
    vars(run).update(links=dict, twins={}, perform=lambda stage, key: StageReport(stage, key))
    place = SimpleNamespace(folder=tmp_path)
    system = SimpleNamespace(step_key=StepKey, driving=lambda name, dagster_run: nullcontext(run), placement=place)
    with DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(STEPS.name, ["demo-00010"])
        done = materialize(
            [assets.rollouts], instance=instance, partition_key="demo-00010", resources={"system": system}
        )
    (checked,) = done.get_asset_check_evaluations()
    assert done.success
    assert (checked.check_name, checked.passed, checked.severity) == (CHECK.name, last == 3.0, AssetCheckSeverity.WARN)


def test_twins_differ_in_whether_the_draft_learns_and_in_nothing_else(tmp_path, quick_spec):
    lake = Lake(str(tmp_path))
    changes = {
        "mine": {"draft": DRAFT},
        "frozen": {"draft": DRAFT | {"train": False}},
        "again": {"draft": DRAFT},
        "none": {},
        "other": {"draft": DRAFT | {"train": False, "depths": 2}},
        "seeded": {"draft": DRAFT | {"train": False}, "seed": 1},
    }
    counts = {"engines": 1, "verifies": 2, "tokens": 5, "proposed": [], "accepted": [], "positions": [], "tasks": [],
              "decode_steps": [], "draft_seconds": 0.0, "drafted": {"tokens": 0, "seconds": 0.0},
              "shadow": {"tokens": 0, "seconds": 0.0}}  # fmt: skip
    for name, overrides in changes.items():
        key = {"run": name}
        row = blank_row("runs") | key | {"spec": load_spec(quick_spec, overrides).canonical(), "created_at": 1.0}
        lake.commit_once("runs", key, records.rows("runs", [row]))
        row = blank_row("batches") | key | {"step": 2, "attempt": 1, "speculation": counts}
        lake.commit_once("batches", key | {"step": 2}, records.rows("batches", [row]))
    spec = {name: load_spec(quick_spec, overrides) for name, overrides in changes.items()}
    assert draft_twins(lake, "mine", spec["mine"]) == {"frozen (frozen)": [(2, 2.5)]}
    assert sorted(draft_twins(lake, "frozen", spec["frozen"])) == ["again (co-trained)", "mine (co-trained)"]
    assert draft_twins(lake, "seeded", spec["seeded"]) == {}
