"""From rows to the trainer's batch: conversations with tools, branches, tokens of several weights versions."""

import pytest
from blank_rows import blank_row

from furlong.ops import records
from furlong.ops.spec import load_spec
from furlong.ops.stages.batch import assemble
from furlong.ops.stages.context import StageError, StepKey
from furlong.resources.lake import Lake

KEY = StepKey("r", 7)


def trajectory(name, tokens, mask, spans, home=7):
    group, _, rest = name.rpartition("-s")
    sample, _, leaf = rest.partition("-l")
    return blank_row("trajectories") | {
        "run": "r", "step": home, "attempt": 1, "trajectory_id": name, "group_id": group, "sample": int(sample),
        "leaf": int(leaf or 0), "tokens": tokens, "logprobs": [-1.0 if on else None for on in mask],
        "model_logprobs": [None] * len(tokens), "loss_mask": mask,
        "version_spans": [{"version": v, "start": a, "end": b} for v, a, b in spans],
    }  # fmt: skip


def lake_of(folder, trajectories, scores, samples, version=6):
    lake = Lake(str(folder))
    homes = {row["group_id"]: row["step"] for row in trajectories}
    groups = [
        blank_row("groups") | {"run": "r", "step": home, "attempt": 1, "group_id": name, "position": n, "samples": samples,
                               "prompt_tokens": [1]}
        for n, (name, home) in enumerate(homes.items())
    ]  # fmt: skip
    batch = blank_row("batches") | {
        "run": "r", "step": 7, "attempt": 1, "version": version, "waiting_tokens": None,
        "groups": [{"step": home, "attempt": 1, "group_id": name} for name, home in homes.items()],
    }  # fmt: skip
    rewards = [
        blank_row("rewards") | {"run": "r", "step": row["step"], "attempt": 1, "trajectory_id": row["trajectory_id"],
                                "score": score}
        for row, score in zip(trajectories, scores, strict=True)
    ]  # fmt: skip
    for table, rows in {"trajectories": trajectories, "groups": groups, "batches": [batch], "rewards": rewards}.items():
        lake.commit_once(table, {"run": "r"}, records.rows(table, rows))
    return lake


ON, OFF = True, False


def test_a_tools_answer_is_seen_but_not_trained_on(tmp_path):
    rows = [
        trajectory("g0-s00", [1, 2, 5, 8, 9, 6], [OFF, OFF, ON, OFF, OFF, ON], [(6, 2, 3), (6, 5, 6)]),
        trajectory("g0-s01", [1, 2, 7], [OFF, OFF, ON], [(6, 2, 3)]),
    ]
    batch, outcomes = assemble(lake_of(tmp_path, rows, [1.0, 0.0], 2), load_spec("tiny"), KEY)
    assert batch.prompts == ((1, 2),)
    assert batch.replies == ((5, 8, 9, 6), (7,))
    assert batch.masks == ((ON, OFF, OFF, ON), (ON,))
    assert batch.logprobs == ((-1.0, 0.0, 0.0, -1.0), (-1.0,))
    assert [outcome["disposition"] for outcome in outcomes] == ["trained", "trained"]


def test_groups_drawn_for_other_steps_belong_to_the_batch_that_took_them(tmp_path):
    rows = [trajectory(f"g{g}-s0{s}", [1, g, 5 + s], [OFF, OFF, ON], [(4 + g, 2, 3)], home=5 + g)
            for g in (1, 2) for s in (0, 1)]  # fmt: skip
    batch, _ = assemble(lake_of(tmp_path, rows, [1.0, 0.0, 0.0, 1.0], 2), load_spec("tiny"), KEY)
    assert batch.prompts == ((1, 1), (1, 2))
    assert batch.trajectory_ids == ("g1-s00", "g1-s01", "g2-s00", "g2-s01")
    assert (batch.version, batch.sampled_by) == (6, ((5,), (5,), (6,), (6,)))


def test_leaves_of_a_sample_count_once_and_share_its_advantage(tmp_path):
    rows = [
        trajectory("g0-s00", [1, 5, 6], [OFF, ON, ON], [(6, 1, 3)]),
        trajectory("g0-s00-l1", [1, 5, 7], [OFF, OFF, ON], [(6, 1, 3)]),
        trajectory("g0-s01", [1, 8], [OFF, ON], [(6, 1, 2)]),
    ]
    batch, outcomes = assemble(lake_of(tmp_path, rows, [1.0, 1.0, 0.0], 2), load_spec("tiny"), KEY)
    assert [o["advantage"] for o in outcomes] == pytest.approx([1.0, 1.0, -1.0], abs=1e-5), "mean 1/2 of two samples"
    assert batch.masks == ((ON, ON), (OFF, ON), (ON,)), "the shared token is trained once"


def test_agents_that_write_other_prompts_share_what_they_have_in_common(tmp_path):
    rows = [
        trajectory("g0-s00", [1, 2, 3, 5], [OFF, OFF, OFF, ON], [(6, 3, 4)]),
        trajectory("g0-s01", [1, 4, 5], [OFF, OFF, ON], [(6, 2, 3)]),
    ]
    batch, _ = assemble(lake_of(tmp_path, rows, [1.0, 0.0], 2), load_spec("tiny"), KEY)
    assert batch.prompts == ((1,),)
    assert batch.replies == ((2, 3, 5), (4, 5))


def test_tokens_older_than_the_trajectorys_newest_can_be_left_out(tmp_path):
    rows = [
        trajectory("g0-s00", [1, 5, 6, 7], [OFF, ON, ON, ON], [(4, 1, 3), (6, 3, 4)]),
        trajectory("g0-s01", [1, 8], [OFF, ON], [(5, 1, 2)]),
    ]
    lake = lake_of(tmp_path, rows, [1.0, 0.0], 2)
    assert assemble(lake, load_spec("tiny"), KEY)[0].masks == ((ON, ON, ON), (ON,))
    masked = load_spec("tiny", {"rollout.stale_tokens": "mask"})
    assert assemble(lake, masked, KEY)[0].masks == ((OFF, OFF, ON), (ON,))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_sample_that_is_not_there_once_stops_the_step(tmp_path, lost):
    rows = [trajectory(f"g0-s0{s}", [1, 5], [OFF, ON], [(6, 1, 2)]) for s in range(3)]
    del rows[lost]
    with pytest.raises(StageError, match="2 of 3 samples"):
        assemble(lake_of(tmp_path, rows, [1.0, 0.0], 3), load_spec("tiny"), KEY)
