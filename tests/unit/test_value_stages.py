"""A run with a value model and one reply to each prompt, in this process: its numbers are in the lake, and a new trainer
goes on with the same bits."""

import shutil

import pytest
from test_stages import RUN, live, new_trainer, open_run, restart, take

PPO = {
    "algorithm.name": "ppo", "algorithm.kl_coef": 0.01, "algorithm.critic": {"learning_rate": 3e-3, "updates": 2},
    "algorithm.prompts_per_step": 8, "algorithm.samples_per_prompt": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(made, tmp_path_factory):
    """Three steps that nothing disturbed."""
    root = tmp_path_factory.mktemp("calm")
    shutil.copytree(made / "models", root / "models")
    return root


@pytest.fixture(scope="module")
def calm(root, quick_spec):
    run = open_run(root, quick_spec, PPO)
    shown = [take(run, step)["train_step"].values for step in (1, 2, 3)]
    run.pause()
    run.verifier.close()
    return run, shown


def steps_of(run) -> list[dict]:
    return sorted(run.lake.read("steps", {"run": RUN}).to_pylist(), key=lambda row: row["step"])


def test_what_the_value_model_did_is_recorded_and_shown(calm):
    run, shown = calm
    for row, values in zip(steps_of(run), shown, strict=True):
        for name in ("value_loss", "value_explained", "value_grad_norm"):
            assert values[name] == row[name]
            assert row[name] is not None
        assert row["value_loss"] > 0
        assert row["value_grad_norm"] > 0
        assert row["kl"] is not None
        assert {outcome["disposition"] for outcome in row["outcomes"]} == {"trained"}, (
            "no group is too flat to learn from"
        )
        assert all(outcome["advantage"] == outcome["reward"] for outcome in row["outcomes"])
    tensors = {row["version"]: row["tensors"] for row in run.lake.read("weight_versions", {"run": RUN}).to_pylist()}
    names = [sorted(tensor["name"] for tensor in tensors[version]) for version in range(4)]
    assert names == [names[0]] * 4, "it is not published"
    assert len(set(live(run).values())) == 4


@pytest.mark.parametrize("lost", [False, True])
def test_a_new_trainer_goes_on_with_the_same_value_model(calm, made, tmp_path, quick_spec, lost):
    """From what was saved after step 2, or, without it, by taking both steps again."""
    shutil.copytree(made / "models", tmp_path / "models")
    run = open_run(tmp_path, quick_spec, PPO)
    take(run, 1)
    take(run, 2)
    run.trainer.settle()
    states = run.folder / "state"
    assert [path.name for path in states.iterdir()] == ["00002.1"]
    if lost:
        shutil.rmtree(states)
    restart(run, trainer=new_trainer(run))
    take(run, 3)
    run.pause()
    run.verifier.close()
    same = ("digest_after", "master_digest_after", "value_loss", "value_explained", "value_grad_norm")
    assert [steps_of(run)[2][name] for name in same] == [steps_of(calm[0])[2][name] for name in same]
