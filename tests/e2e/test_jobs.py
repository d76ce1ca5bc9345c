"""Every way to launch a run leaves the same rows, the report, and a trail in Dagster and MLflow."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from dagster import AssetKey, AssetRecordsFilter, DagsterInstance

from furlong.ops.spec import load_spec
from furlong.pipelines.partitions import partition_key
from furlong.resources.run_lock import run_lock

STEP_BY_STEP = Path(__file__).with_name("step_by_step.py")
FURLONG = str(Path(sys.executable).with_name("furlong"))
KEYS = {
    "run", "spec", "steps", "seconds", "reward_per_step", "eval_before", "eval_after", "greedy_before", "greedy_after",
    "full_bytes", "delta_bytes_per_step", "weights_versions", "peak_rss_bytes", "tokens_per_second",
}  # fmt: skip


def test_step_by_step_leaves_the_rows_of_a_block(place, undisturbed):
    done = place.run(sys.executable, str(STEP_BY_STEP), place.spec, "stepwise", "3")
    assert done.returncode == 0, done.stderr[-4000:]
    assert place.digests("stepwise") == undisturbed[0]
    assert place.row_digests("stepwise", "RUN") == undisturbed[1]
    assert (place.placement.folder / "runs" / "stepwise" / "report.json").is_file()
    assert metric_steps(place, "stepwise", "train_step/loss") == [1, 2, 3]


def test_blocks_of_one_step_leave_the_same_rows(place, undisturbed):
    for _ in range(3):
        place.finish("blocks", steps=1)
    assert place.digests("blocks") == undisturbed[0]
    assert place.row_digests("blocks", "RUN") == undisturbed[1]


@pytest.mark.parametrize("role", [pytest.param("engine", marks=pytest.mark.slow), "trainer"])
def test_an_actor_killed_between_blocks_is_rebuilt_from_the_lake(place, undisturbed, role):
    run = f"lost-{role}"
    place.finish(run, steps=2)
    place.actor_process(role, run).send_signal(signal.SIGKILL)
    place.finish(run)
    assert place.digests(run) == undisturbed[0]
    assert place.row_digests(run, "RUN") == undisturbed[1]


def test_the_demo_trains_reports_and_can_be_found_everywhere(place):
    spec = load_spec(place.spec, {"seed": 3})
    run = f"quick-{spec.fingerprint()[:6]}"
    done = place.run(FURLONG, "demo", "--spec", place.spec, "--seed", "3")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((place.placement.folder / "runs" / run / "report.json").read_text())
    assert set(report) >= KEYS
    assert report["steps"] == len(report["reward_per_step"]) == len(report["delta_bytes_per_step"]) == 3
    assert report["eval_split"]["eval_questions_trained_on"] == 0
    assert [row["version"] for row in report["weights_versions"]] == [0, 1, 2, 3]
    assert report["full_bytes"] > 0 < report["tokens_per_second"]
    for shown in ("mean reward", "unseen questions", "delta publish", "best trajectory", "lineage", "make ui"):
        assert shown in done.stdout, shown
    check_trail(place, run)


def metric_steps(place, run: str, name: str) -> list[int]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(place.placement.mlflow_uri())
    experiment = client.get_experiment_by_name("furlong")
    found = client.search_runs([experiment.experiment_id], f"tags.`furlong.run` = '{run}'")
    return [metric.step for row in found for metric in client.get_metric_history(row.info.run_id, name)]


def check_trail(place, run: str) -> None:
    with DagsterInstance.from_config(str(place.placement.folder / "dagster")) as instance:
        for asset in ("rollouts", "rewards", "train_step", "weight_publish"):
            wanted = AssetRecordsFilter(AssetKey(asset), asset_partitions=[partition_key(run, 3)])
            records = instance.fetch_materializations(wanted, limit=5).records
            assert len(records) == 1, asset
            facts = records[0].asset_materialization.metadata
            assert {"seconds", "sql", "mlflow", "plot"} <= set(facts)
        dagster_run = records[0].run_id
    from mlflow.tracking import MlflowClient

    client = MlflowClient(place.placement.mlflow_uri())
    experiment = client.get_experiment_by_name("furlong")
    found = client.search_runs([experiment.experiment_id], f"tags.`furlong.run` = '{run}'")
    assert [row.data.tags["dagster/run_id"] for row in found] == [dagster_run]
    history = client.get_metric_history(found[0].info.run_id, "rewards/reward_mean")
    assert [metric.step for metric in history] == [1, 2, 3]
    assert found[0].info.run_id in facts["mlflow"].value


def test_the_demo_refuses_a_bad_spec_before_anything_starts(place, tmp_path):
    spec = yaml.safe_load(Path(place.spec).read_text())
    spec["algorithm"]["learning_rat"] = 1.0
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(spec))
    done = place.run(FURLONG, "demo", "--spec", str(path))
    assert done.returncode == 2
    assert "algorithm.learning_rat: unknown key; did you mean 'learning_rate'?" in " ".join(done.stdout.split())


def test_a_second_driver_is_told_who_drives(place):
    with run_lock(place.placement.folder, "held"):
        done = place.run(FURLONG, "demo", "--spec", place.spec, "--run", "held")
    said = " ".join(done.stdout.split())
    assert done.returncode == 1, said
    assert f"LockHeld: run held is being driven by process {os.getpid()}" in said
    assert "Traceback" not in done.stdout + done.stderr


def test_an_interrupted_demo_says_so_and_is_continued(place, undisturbed):
    command = [FURLONG, "demo", "--spec", place.spec, "--run", "interrupted"]
    with subprocess.Popen(command, env=place.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        killer = threading.Timer(120, demo.kill)
        killer.start()
        for line in demo.stdout:
            if line.startswith("step 1/"):
                demo.send_signal(signal.SIGINT)
                break
        said, trouble = demo.communicate()
        killer.cancel()
    assert demo.returncode == 130, said + trouble
    assert "the same command continues" in " ".join(said.split())
    assert "Traceback" not in said + trouble
    place.finish("interrupted")
    assert place.digests("interrupted") == undisturbed[0]
    assert place.row_digests("interrupted", "RUN") == undisturbed[1]


def test_dagster_s_own_command_line_launches_a_block(place, undisturbed):
    config = {"ops": {"block": {"config": {"spec": place.spec, "run": "by-command"}}}}
    dg = str(Path(sys.executable).with_name("dg"))
    done = place.run(dg, "launch", "--job", "rl_run", "--config-json", json.dumps(config))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert place.digests("by-command") == undisturbed[0]
