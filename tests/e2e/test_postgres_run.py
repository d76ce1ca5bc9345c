"""A run with Dagster's events in Postgres: the same weights, and every materialisation where the UI looks for it."""

import re
from pathlib import Path

import pytest
from dagster import AssetKey, DagsterInstance
from postgres_server import postgres

from furlong.pipelines.partitions import STEPS
from furlong.resources.cluster import stop_cluster
from furlong.resources.dagster_home import SETTINGS

pytestmark = pytest.mark.slow
SCALE = Path(__file__).parents[2] / "docs" / "scale.md"


def test_a_run_with_its_events_in_postgres(place, undisturbed, tmp_path, monkeypatch):
    root = tmp_path / "root"
    (root / "dagster").mkdir(parents=True)
    (block,) = re.findall(r"```yaml\n(.*?)```", SCALE.read_text(), re.DOTALL)
    (root / "dagster" / "dagster.yaml").write_text(SETTINGS.read_text() + block)
    with postgres(tmp_path / "postgres") as url:
        monkeypatch.setenv("DAGSTER_POSTGRES_URL", url)
        monkeypatch.setenv("DAGSTER_HOME", str(root / "dagster"))
        other = type(place)(root, place.spec)
        try:
            other.finish("calm", steps=2)
            other.finish("calm")
            assert other.digests("calm") == undisturbed[0]
            with DagsterInstance.get() as instance:
                assert sorted(instance.get_dynamic_partitions(STEPS.name)) == [f"calm-0000{n}" for n in (1, 2, 3)]
                for name in ("rollouts", "rewards", "train_step", "weight_publish"):
                    done = instance.get_materialized_partitions(AssetKey(name))
                    assert done == {f"calm-0000{n}" for n in (1, 2, 3)}, name
            assert not list((root / "dagster").rglob("*.db"))
        finally:
            stop_cluster(other.placement)
