"""A run whose lake is in an object store leaves the rows and the weights of one whose lake is a folder."""

import pytest
from object_store import object_store

from furlong.resources.cluster import stop_cluster
from furlong.resources.lake import Lake
from furlong.resources.weights.run_model import run_model
from furlong.resources.weights.verify import verify_run

pytestmark = pytest.mark.slow
ANCHORS = {"trainer.anchor_every": 2}
URI = "s3://lake/furlong"


def test_a_run_in_an_object_store(place, tmp_path, monkeypatch):
    place.finish("anchored", overrides=ANCHORS)
    with object_store(tmp_path / "log") as env:
        for name, value in (env | {"FURLONG_LAKE": URI}).items():
            monkeypatch.setenv(name, value)
        afar = type(place)(tmp_path / "root", place.spec)
        afar.placement = afar.placement.model_copy(update={"lake": URI})
        afar.lake = Lake(URI)
        try:
            afar.finish("anchored", overrides=ANCHORS, steps=2)
            # The second block starts engine and trainer anew, from what is in the store.
            stop_cluster(afar.placement)
            afar.finish("anchored", overrides=ANCHORS)
            assert afar.digests("anchored") == place.digests("anchored")
            assert afar.row_digests("anchored", "RUN") == place.row_digests("anchored", "RUN")
            kinds = afar.lake.read("weight_versions", {"run": "anchored"}, ["kind", "version"]).to_pylist()
            assert {row["version"] for row in kinds if row["kind"] == "anchor"} == {0, 2}
            base = str(run_model(afar.lake, "anchored", afar.placement)[2].path)
            assert [verdict.fault for verdict in verify_run(afar.lake, "anchored", base)] == [None] * 4
        finally:
            stop_cluster(afar.placement)
    assert not (tmp_path / "root" / "lake").exists()
    files = [path for path in (tmp_path / "root").rglob("*") if path.is_file()]
    secret = env["AWS_SECRET_ACCESS_KEY"].encode()
    assert not [path for path in files if secret in path.read_bytes()]
    assert any(b"anchored" in path.read_bytes() for path in files if path.suffix == ".db")
