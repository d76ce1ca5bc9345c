"""A run that trains adapters: the base is published once, and what is killed comes back with the same bits."""

import signal
from pathlib import Path

import pytest
import yaml

from furlong.ops.policy.lora import is_adapted, names_of, policy_of
from furlong.resources.weights.checkpoint import compare_logits, export_checkpoint
from furlong.resources.weights.rebuild import full_row, rebuild
from furlong.resources.weights.run_model import run_model
from furlong.resources.weights.verify import verify_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lora(place, tmp_path_factory) -> str:
    """Path of the quick spec with adapters."""
    spec = yaml.safe_load(Path(place.spec).read_text())
    spec["trainer"]["lora"] = {"rank": 4, "alpha": 8.0}
    path = tmp_path_factory.mktemp("specs") / "lora.yaml"
    path.write_text(yaml.safe_dump(spec | {"name": "lora"}))
    return str(path)


@pytest.fixture(scope="module")
def calm(place, lora) -> list:
    """The versions of a run that nothing disturbed."""
    place.finish("adapters", spec=lora)
    return place.digests("adapters")


def test_adapters_are_trained_published_rebuilt_and_exported(place, calm):
    _, _, model = run_model(place.lake, "adapters", place.placement)
    base = str(model.path)
    zero = rebuild(place.lake, "adapters", 0, base)
    adapted = {part for name in filter(is_adapted, zero) for part in names_of(name)}
    assert not zero.keys() & adapted
    for version in (1, 2, 3):
        row = full_row(place.lake, "adapters", version)
        assert row["state"] == "live"
        new = rebuild(place.lake, "adapters", version, base)
        assert new.keys() == zero.keys() | adapted | {"adapter.scale"}
        assert all(new[name].equal(zero[name]) for name in zero)
        rows = place.lake.read("weight_deltas", {"run": "adapters", "version": version}, ["name"])
        assert set(rows["name"].to_pylist()) <= adapted | {"adapter.scale"}
        assert row["delta_bytes"] < 1.1 * sum(new[name].nbytes for name in adapted)
    assert [verdict.fault for verdict in verify_run(place.lake, "adapters", base)] == [None] * 4
    exported = export_checkpoint(place.placement, "adapters", 3)
    compared = compare_logits(place.placement, "adapters", exported)
    assert compared.passed, compared.reason
    assert compared.logits > 100
    assert (exported.folder / "adapter" / "adapter_model.safetensors").is_file()
    assert any(not policy_of(new)[name].equal(zero[name]) for name in zero)


@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_an_actor_killed_between_blocks_comes_back_with_the_adapters(place, lora, calm, role):
    run = f"adapters-{role}"
    place.finish(run, spec=lora, steps=2)
    place.actor_process(role, run).send_signal(signal.SIGKILL)
    place.finish(run, spec=lora)
    assert place.digests(run) == calm
