"""Dagster's storage in Postgres, set up as docs/scale.md says, where sqlite would be in the way."""

import re
import socket
import time
from pathlib import Path

import pytest
import yaml
from dagster import AssetKey, AssetMaterialization, DagsterInstance, DagsterRunStatus, Output, job, op
from dagster_postgres import PostgresEventLogStorage, PostgresRunStorage, PostgresScheduleStorage
from postgres_server import postgres

from furlong.pipelines.partitions import STEPS, partition_key
from furlong.resources.dagster_home import SETTINGS, close_orphaned_runs, ensure_dagster_home
from furlong.resources.run_launcher import TAG

SCALE = Path(__file__).parents[2] / "docs" / "scale.md"
MANY = 36_000
"""At so many partitions sqlite gives up, with too many variables in one statement."""


@pytest.fixture(scope="module")
def placement(tmp_path_factory):
    from furlong.ops.spec import Placement

    root = tmp_path_factory.mktemp("root")
    with postgres(root / "postgres") as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_POSTGRES_URL", url)
        patch.setenv("DAGSTER_HOME", str(root / "dagster"))
        (root / "dagster").mkdir()
        (block,) = re.findall(r"```yaml\n(.*?)```", SCALE.read_text(), re.DOTALL)
        (root / "dagster" / "dagster.yaml").write_text(SETTINGS.read_text() + block)
        yield Placement(root=str(root))


def test_our_settings_and_the_documented_block_are_one_valid_file(placement):
    ensure_dagster_home(placement)
    written = (placement.folder / "dagster" / "dagster.yaml").read_text()
    assert yaml.safe_load(written).keys() == yaml.safe_load(SETTINGS.read_text()).keys() | {"storage"}
    with DagsterInstance.get() as instance:
        assert isinstance(instance.event_log_storage, PostgresEventLogStorage)
        assert isinstance(instance.run_storage, PostgresRunStorage)
        assert isinstance(instance.schedule_storage, PostgresScheduleStorage)


def test_more_partitions_than_sqlite_can_name(placement):
    with DagsterInstance.get() as instance:
        keys = [partition_key("long", step) for step in range(1, MANY + 1)]
        begin = time.monotonic()
        instance.add_dynamic_partitions(STEPS.name, keys)
        instance.add_dynamic_partitions(STEPS.name, keys[-2:])
        assert set(instance.get_dynamic_partitions(STEPS.name)) == set(keys)
        assert instance.has_dynamic_partition(STEPS.name, keys[-1])
        assert time.monotonic() - begin < 60


def test_events_of_a_run_are_kept_and_an_orphan_is_closed(placement):
    @op
    def block(context):
        context.instance.add_dynamic_partitions(STEPS.name, ["pg-00001"])
        context.log_event(AssetMaterialization(AssetKey("train_step"), partition="pg-00001", metadata={"loss": 0.5}))
        return Output(None)

    @job
    def steps():
        block()

    with DagsterInstance.get() as instance:
        done = steps.execute_in_process(instance=instance)
        assert done.success
        event = instance.get_latest_materialization_event(AssetKey("train_step"))
        assert event.asset_materialization.partition == "pg-00001"
        assert event.asset_materialization.metadata["loss"].value == 0.5
        lost = instance.create_run_for_job(steps)
        instance.add_run_tags(lost.run_id, {TAG: f"{socket.gethostname()}:{2**22}:1.00"})
        instance.report_run_canceling(lost)
        assert close_orphaned_runs(placement) == [lost.run_id]
        assert instance.get_run_by_id(lost.run_id).status == DagsterRunStatus.CANCELED
