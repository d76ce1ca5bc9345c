"""A whole run whose replies real SGLang servers draw."""

import pytest
from test_async import check_conservation


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_on_sglang_trains_publishes_and_keeps_its_accounts(place, staleness):
    run = f"sglang-{staleness}"
    place.finish(run, overrides={"engine": "sglang", "staleness": staleness, "steps": 3})
    assert [state for _, state, _ in place.digests(run)] == ["live"] * 4
    assert len({digest for _, _, digest in place.digests(run)}) > 1
    check_conservation(place.lake, run)
    engines = place.lake.read("trajectories", {"run": run}, ["engine"])["engine"].to_pylist()
    assert all(name.startswith("SGLangEngine") for name in engines)
    steps = place.lake.read("steps", {"run": run}).to_pylist()
    measured = [row["mismatch_mean"] for row in steps if row["mismatch_mean"] is not None]
    assert measured
    assert max(measured) < 1e-3, "float32 on both sides"
