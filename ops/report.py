"""What a finished run amounts to, computed from the lake."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from furlong.ops.history import newest_attempts
from furlong.ops.protocols import LakeLike
from furlong.ops.rollouts.acceptance import added, numbers, speedup
from furlong.ops.rollouts.usage import usage
from furlong.ops.spec import RunSpec
from furlong.ops.stages.evals import accuracies


def build_report(lake: LakeLike, run: str, spec: RunSpec, drives: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of report.json.

    `eval_*` are mean accuracies of sampled replies, `greedy_*` of greedy ones, both on questions that never occur in
    training. `peak_rss_bytes` is the largest sum of proportional set sizes over driver, engine, trainer and Ray. What
    `_draft` adds is null, or a list of nulls, where there was no draft or nothing was measured.
    """
    steps = newest_attempts(lake.read("steps", {"run": run}).to_pylist())
    versions = sorted(lake.read("weight_versions", {"run": run}).to_pylist(), key=lambda row: row["version"])
    by_version = {row["version"]: row for row in versions}
    last = steps[-1]["version_after"]
    before, after = (accuracies(lake.read("evals", {"run": run, "version": v}).to_pylist()) for v in (0, last))
    used = usage(lake, run)
    timed = [step for drive in drives for step in drive["steps"]]
    return {
        "run": run,
        "spec": spec.model_dump(mode="json"),
        "steps": len(steps),
        "seconds": sum(drive["seconds"] for drive in drives),
        "reward_per_step": [row["reward_mean"] for row in steps],
        "eval_before": before["sampled"],
        "eval_after": after["sampled"],
        "greedy_before": before["greedy"],
        "greedy_after": after["greedy"],
        "eval_split": _split(lake, run),
        "full_bytes": by_version[last]["full_bytes"],
        "delta_bytes_per_step": [by_version[row["version_after"]]["delta_bytes"] for row in steps],
        "weights_versions": [
            {"version": row["version"], "step": row["step"], "parent": row["parent"], "digest": row["digest"]}
            for row in versions
        ],
        "peak_rss_bytes": max((drive["peak_rss_bytes"] for drive in drives), default=0),
        "tokens_per_second": used["tokens_per_second"],
        "rollouts": used,
        **_draft(lake, run, steps),
        "stage_seconds": _added(drive["stage_seconds"] for drive in drives),
        "overhead_seconds_per_step": median(step["overhead"] for step in timed) if timed else None,
        **extremes(lake, run, steps),
        "lineage": lineage(lake, run, last),
    }


def _draft(lake: LakeLike, run: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """What the draft was worth: `acceptance_length_per_step`, tokens per verify; `rollout_speedup`, over the whole run, of
    the engines' steps against steps of their size without proposals; `draft_train_share`, of the trainer's time; and
    `draft`, all numbers over the whole run as `acceptance.numbers` names them, with the draft's loss per step."""
    batches = newest_attempts(lake.read("batches", {"run": run}, ["step", "attempt", "speculation"]).to_pylist())
    whole = added(row["speculation"] for row in batches if row["speculation"])
    spent = [row for row in steps if row["draft_seconds"] is not None]
    seconds = sum(row["seconds"] for row in spent)
    return {
        "acceptance_length_per_step": [numbers(row["speculation"]).get("acceptance_length") for row in batches],
        "rollout_speedup": speedup(whole["decode_steps"]) if whole else None,
        "draft_train_share": sum(row["draft_seconds"] for row in spent) / seconds if seconds else None,
        "draft": {
            **numbers(whole),
            "loss_per_step": [row["draft_loss"] for row in steps],
            "agreement_per_step": [row["draft_agreement"] for row in steps],
            "skipped_steps": sum(row["draft_skipped"] is not None for row in steps),
        }
        if whole or spent
        else None,
    }


def _split(lake: LakeLike, run: str) -> dict[str, Any]:
    dataset = lake.read("runs", {"run": run}, ["dataset"])["dataset"][0].as_py()
    rows = lake.read("prompts", {"dataset": dataset}, ["prompt_id", "split"]).to_pylist()
    train, held = ({row["prompt_id"] for row in rows if row["split"] == split} for split in ("train", "eval"))
    trained = set(lake.read("groups", {"run": run}, ["prompt_id"])["prompt_id"].to_pylist())
    return {
        "by": "question",
        "train_questions": len(train),
        "eval_questions": len(held),
        "questions_trained_on": len(trained),
        "eval_questions_trained_on": len(trained & held),
    }


def _added(parts: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def extremes(lake: LakeLike, run: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The best and the worst trajectory of the last step: by reward, ties by the engine's mean log-probability."""
    outcomes = [dict(o, step=row["step"]) for row in steps[-1:] for o in row["outcomes"] if o["reward"] is not None]
    if not outcomes:
        return {"best": None, "worst": None}
    names = [o["trajectory_id"] for o in outcomes]
    columns = ["trajectory_id", "prompt_id", "text", "messages", "turns", "logprobs", "finish_reason"]
    found = {
        r["trajectory_id"]: r
        for r in lake.read("trajectories", {"run": run, "trajectory_id": names}, columns).to_pylist()
    }
    dataset = lake.read("runs", {"run": run}, ["dataset"])["dataset"][0].as_py()
    wanted = sorted({row["prompt_id"] for row in found.values()})
    asked = {
        row["prompt_id"]: row
        for row in lake.read(
            "prompts", {"dataset": dataset, "prompt_id": wanted}, ["prompt_id", "question", "answer"]
        ).to_pylist()
    }

    def rank(outcome: dict[str, Any]) -> tuple[float, float]:
        sampled = [value for value in found[outcome["trajectory_id"]]["logprobs"] if value is not None]
        return outcome["reward"], sum(sampled) / len(sampled)

    ordered = sorted(outcomes, key=rank)
    return {"best": _told(ordered[-1], found, asked), "worst": _told(ordered[0], found, asked)}


def _told(outcome: dict[str, Any], found: dict[str, dict], asked: dict[str, dict]) -> dict[str, Any]:
    row = found[outcome["trajectory_id"]]
    prompt = asked[row["prompt_id"]]
    return {
        "trajectory_id": outcome["trajectory_id"],
        "question": prompt["question"],
        "reply": row["text"] if row["turns"] < 2 else transcript(json.loads(row["messages"])),
        "answer": prompt["answer"],
        "reward": outcome["reward"],
        "finish_reason": row["finish_reason"],
    }


def transcript(messages: list[dict[str, Any]]) -> str:
    """A conversation after its question, a line per message."""
    lines = []
    for message in messages[next(i for i, m in enumerate(messages) if m["role"] == "assistant") :]:
        calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or []]
        lines.append(f"{message['role']}: " + " ".join([message.get("content") or "", *calls]).strip())
    return "\n".join(lines)


def lineage(lake: LakeLike, run: str, version: int) -> dict[str, Any]:
    """What made a weights version: its ancestors, and the step, prompts and trajectories behind the newest one."""
    rows = {r["version"]: r for r in lake.read("weight_versions", {"run": run}).to_pylist()}
    row = rows[version]
    chain = [version]
    while rows[chain[-1]]["parent"] is not None:
        chain.append(rows[chain[-1]]["parent"])
    key = {"run": run, "step": row["step"], "attempt": row["attempt"]}
    steps = lake.read("steps", key, ["outcomes", "batch_digest"]).to_pylist()
    outcomes = steps[0]["outcomes"] if steps else []
    names = [group["group_id"] for row in lake.read("batches", key, ["groups"]).to_pylist() for group in row["groups"]]
    groups = lake.read("groups", {"run": run, "group_id": names}, ["group_id", "prompt_id"]).to_pylist()
    spans = lake.read("trajectories", {"run": run, "group_id": names}, ["version_spans"])["version_spans"].to_pylist()
    return {
        "version": version,
        "digest": row["digest"],
        "ancestors": chain[1:],
        "step": row["step"],
        "attempt": row["attempt"],
        "sampled_by_versions": sorted({span["version"] for some in spans for span in some}),
        "batch_digest": steps[0]["batch_digest"] if steps else None,
        "prompts": sorted({group["prompt_id"] for group in groups}),
        "trajectories": {o["trajectory_id"]: o["disposition"] for o in outcomes},
        "attestations": row["attestations"],
    }
