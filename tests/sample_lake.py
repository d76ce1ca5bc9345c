"""A small lake whose every number is known, for what reads lakes: two steps of a run, the second of them repeated.

Run `demo`: v0 is the base. Step 1 (groups g1, g2) made v1. Step 2 was taken (group g3, v2), then repeated on purpose as
attempt 2 (group g4, v3, built on v1). v4 is v3 with another draft. g5 was drawn and rejected as stale, g6 is waiting. Each
group has two trajectories, of 2 prompt tokens and 3 sampled ones; the first of each group is right, the second wrong, but
both of g2 are wrong.
"""

from typing import Any

from furlong.ops import records
from furlong.resources.lake import Lake

RUN, DATASET = "demo", "d" * 16
PROMPTS = {"g1": "p1", "g2": "p2", "g3": "p3", "g4": "p3", "g5": "p2", "g6": "p1"}
"""Group -> its prompt."""
DRAWN = {"g1": (1, 1), "g2": (1, 1), "g3": (2, 1), "g4": (2, 2), "g5": (2, 2), "g6": (2, 2)}
"""Group -> the step and attempt that it was drawn for."""
TAKEN = {(1, 1): ["g1", "g2"], (2, 1): ["g3"], (2, 2): ["g4"]}
MADE = {(1, 1): (0, 1), (2, 1): (1, 2), (2, 2): (1, 3)}
"""Step and attempt -> the versions before and after."""
QUESTION = "1 < 2 & <b>3</b>?"


def fill(lake: Lake) -> Lake:
    """Write it."""
    lake.create()
    put(
        lake,
        "runs",
        [
            {
                "run": RUN,
                "spec_fingerprint": "f" * 16,
                "spec": '{"name": "demo", "seed": 7}',
                "dataset": DATASET,
                "base_digest": "b" * 64,
                "code_version": "c0de",
                "created_at": 1.0,
            }
        ],
    )
    asked = [
        {
            "dataset": DATASET,
            "prompt_id": f"p{n}",
            "split": "train",
            "position": n,
            "task": "sums" if n < 3 else "gcd",
            "question": QUESTION,
            "answer": str(n),
            "entry": "{}",
            "verifier": "exact",
        }
        for n in (1, 2, 3, 4)
    ]
    lake.commit_once("prompts", {"dataset": DATASET}, records.rows("prompts", asked))
    for group, (step, attempt) in DRAWN.items():
        put(
            lake,
            "groups",
            [
                {
                    **key(step, attempt),
                    "group_id": group,
                    "position": int(group[1]),
                    "dataset": DATASET,
                    "prompt_id": PROMPTS[group],
                    "prompt_tokens": [1, 2],
                    "samples": 2,
                    "weights_version": step - 1,
                }
            ],
            group_id=group,
        )
        drawn = [trajectory(group, step, attempt, sample) for sample in range(2)]
        ids = [row["trajectory_id"] for row in drawn]
        put(lake, "trajectories", drawn, trajectory_id=ids)
        put(lake, "rewards", [reward(row) for row in drawn], trajectory_id=ids)
    states = [
        ("g1", "trained", "", 1),
        ("g2", "trained", "", 1),
        ("g3", "trained", "", 2),
        ("g3", "rejected", "superseded", None),
        ("g4", "trained", "", 2),
        ("g5", "rejected", "stale", None),
        ("g6", "finished", "", None),
    ]
    put(
        lake,
        "ledger",
        [
            {"run": RUN, "seq": n, "group_id": group, "state": state, "reason": reason, "step": step, "at": 1.0}
            for n, (group, state, reason, step) in enumerate(states)
        ],
        seq=list(range(len(states))),
    )
    for at, groups in TAKEN.items():
        take(lake, at, groups)
    publish(lake, 0, None, 0, 1)
    for (step, attempt), (before, after) in MADE.items():
        publish(lake, after, before, step, attempt)
    publish(lake, 4, 3, 2, 2)
    put(lake, "weight_tags", [{"run": RUN, "tag": "stable", "version": 3, "tagged_at": 1.0}], tag="stable")
    put(
        lake,
        "failures",
        [
            {
                **key(2, 2),
                "trajectory_id": "g6-s1",
                "try": 0,
                "kind": "engine_lost",
                "detail": "gone",
                "tokens": 2,
                "engine": "e",
                "at": 1.0,
            }
        ],
        trajectory_id="g6-s1",
    )
    put(
        lake,
        "evals",
        [
            {
                "run": RUN,
                "version": version,
                "mode": "greedy",
                "prompt_id": "p4",
                "samples": 1,
                "correct": correct,
                "truncated": 0,
                "mean_tokens": 3.0,
                "texts": ["x"],
                "verdicts": ["correct"],
            }
            for version, correct in ((0, 0), (3, 1))
        ],
        version=[0, 3],
    )
    return lake


def key(step: int, attempt: int) -> dict[str, Any]:
    return {"run": RUN, "step": step, "attempt": attempt}


def put(lake: Lake, table: str, rows: list[dict[str, Any]], **more: Any) -> None:
    lake.commit_once(table, {"run": RUN, **more}, records.rows(table, rows))


def right(group: str, sample: int) -> bool:
    return sample == 0 and group != "g2"


def trajectory(group: str, step: int, attempt: int, sample: int) -> dict[str, Any]:
    sampled = [-0.1 * (n + 1) for n in range(3)]
    return {
        **key(step, attempt),
        "trajectory_id": f"{group}-s{sample}",
        "group_id": group,
        "prompt_id": PROMPTS[group],
        "sample": sample,
        "leaf": 0,
        "turns": 1,
        "messages": "[]",
        "tokens": [1, 2, 10, 11, 12],
        "logprobs": [None, None, *sampled],
        "model_logprobs": [None, None, *sampled],
        "loss_mask": [False, False, True, True, True],
        "routing": None,
        "drafted": [False, False, False, True, False],
        # g4 began under v0 and went on under v1.
        "version_spans": [{"version": 0, "start": 2, "end": 3}, {"version": 1, "start": 3, "end": 5}]
        if group == "g4"
        else [{"version": step - 1, "start": 2, "end": 5}],
        "finish_reason": "stop",
        "seed": 100 * int(group[1]) + sample,
        "text": "<script>alert(1)</script> \u00fc",
        "engine": "e",
        "started_at": 1.0,
        "seconds": 0.5,
    }


def reward(row: dict[str, Any]) -> dict[str, Any]:
    good = right(row["group_id"], row["sample"])
    return {
        **{name: row[name] for name in ("run", "step", "attempt", "trajectory_id")},
        "verifier": "exact",
        "verifier_version": "v1",
        "verdict": "correct" if good else "incorrect",
        "score": float(good),
        "extracted": "",
        "detail": "",
        "seconds": 0.0,
    }


def take(lake: Lake, at: tuple[int, int], groups: list[str]) -> None:
    """The batch, scores and record of one attempt of a step."""
    (step, attempt), (before, after) = at, MADE[at]
    taken = [{"step": DRAWN[group][0], "attempt": DRAWN[group][1], "group_id": group} for group in groups]
    put(
        lake,
        "batches",
        [
            {
                **key(step, attempt),
                "version": before,
                "groups": taken,
                "staleness_mean": 0.0,
                "staleness_max": 0,
                "passed_over": 0,
                "waiting_groups": 0,
                "waiting_tokens": None,
                "waited_seconds": 0.0,
                "speculation": None,
            }
        ],
        step=step,
        attempt=attempt,
    )
    outcomes = []
    for group in groups:
        flat = group == "g2"
        outcomes += [
            {
                "trajectory_id": f"{group}-s{n}",
                "group_id": group,
                "reward": float(right(group, n)),
                "advantage": 0.0 if flat else 1.0 - 2.0 * n,
                "disposition": "zero_variance" if flat else "trained",
                "tokens_trained": 0 if flat else 3,
                "tokens_reached": 0 if flat else 3,
            }
            for n in range(2)
        ]
    trained = [row for row in outcomes if row["tokens_trained"]]
    put(
        lake,
        "trainer_scores",
        [
            {**key(step, attempt), "trajectory_id": row["trajectory_id"], "logprobs": [None, None, -0.1, -0.2, -0.25]}
            for row in trained
        ],
        trajectory_id=[row["trajectory_id"] for row in trained],
        step=step,
        attempt=attempt,
    )
    numbers = dict.fromkeys(
        (
            "loss",
            "grad_norm",
            "learning_rate",
            "clip_fraction",
            "entropy",
            "ess",
            "rejected_fraction",
            "mismatch_coverage",
            "mismatch_mean",
            "mismatch_max",
            "mismatch_p99",
            "mismatch_k3",
            "mismatch_ess",
        ),
        0.5,
    )
    empty = dict.fromkeys(
        (
            "kl",
            "value_loss",
            "value_explained",
            "value_grad_norm",
            "draft_loss",
            "draft_agreement",
            "draft_acceptance",
            "draft_tokens",
            "draft_grad_norm",
            "draft_seconds",
            "draft_skipped",
        )
    )
    mean = sum(row["reward"] for row in outcomes) / len(outcomes)
    put(
        lake,
        "steps",
        [
            {
                **key(step, attempt),
                "version_before": before,
                "version_after": after,
                "batch_digest": f"batch{after}",
                "digest_before": f"digest{before}",
                "digest_after": f"digest{after}",
                "master_digest_after": "m",
                "outcomes": outcomes,
                "reward_mean": mean,
                "tokens_trained": 3 * len(trained),
                "trainer": "t",
                "seconds": 2.0,
                **numbers,
                **empty,
            }
        ],
        step=step,
        attempt=attempt,
    )
    for stage in ("rollouts", "train_step"):
        row = {
            **key(step, attempt),
            "stage": stage,
            "started_at": 1.0,
            "seconds": 2.0,
            "work_seconds": 1.5,
            "dagster_run": "r",
        }
        put(lake, "stage_times", [row], step=step, attempt=attempt, stage=stage)
    put(
        lake,
        "checks",
        [
            {
                **key(step, attempt),
                "check": "finite_loss",
                "asset": "train_step",
                "passed": True,
                "blocking": True,
                "severity": "ERROR",
                "message": "",
                "found": "{}",
                "evidence": [],
                "at": 1.0,
            }
        ],
        step=step,
        attempt=attempt,
        check="finite_loss",
    )


def publish(lake: Lake, version: int, parent: int | None, step: int, attempt: int) -> None:
    put(
        lake,
        "weight_versions",
        [
            {
                **key(step, attempt),
                "version": version,
                "state": "live",
                "kind": "anchor" if version == 0 else "delta",
                "parent": parent,
                "digest": f"digest{version}",
                "tensors": [],
                "anchor": "base" if version == 0 else None,
                "full_bytes": 100,
                "delta_bytes": 10,
                "changed_fraction": 0.1,
                "attestations": [{"engine": "e", "version": version, "digest": f"digest{version}"}],
                "fence": 1,
                "transport": "p2p",
                "wire_bytes": 10,
                "stage_seconds": 0.1,
                "pause_seconds": 0.01,
                "retried_because": "",
                "staged_at": 1.0,
                "live_at": 2.0,
            }
        ],
        version=version,
    )
