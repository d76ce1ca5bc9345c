"""Accuracy of weights versions on the questions kept away from training."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from furlong.ops import records
from furlong.ops.identity import counter_seed
from furlong.ops.records import Verdict
from furlong.ops.rollouts.trajectory import Failed, Task, Trajectory
from furlong.ops.spec import RunSpec
from furlong.ops.stages.chain import one_row, starting_version
from furlong.ops.stages.context import Engines, Run, StageError, StageReport, StepKey, reporting
from furlong.ops.stages.rewards import as_json, verifier_items
from furlong.ops.stages.rollouts import fitting_prompt

MODES = ("greedy", "sampled")
THREADS = 64
"""Questions played at once."""
TRIES = 3
"""At a question's replies."""


def evals_before(spec: RunSpec, step: int) -> bool:
    """Whether the version that a step starts from is evaluated."""
    return step == 1 or (spec.evals.every > 0 and (step - 1) % spec.evals.every == 0)


def evals(run: Run, key: StepKey) -> StageReport:
    """Evaluate the versions due at this step: the one it started from, and at the last step the one it made."""
    with reporting("evals", key) as report:
        if evals_before(run.spec, key.step):
            evaluate(run, starting_version(run.lake, key), report)
        if key.step == run.spec.steps:
            step = one_row(run.lake, "steps", key.columns(), ["version_after"])
            if step is not None:
                evaluate(run, step["version_after"], report)
    return report


def evaluate(run: Run, version: int, report: StageReport) -> None:
    """Commit one row of `evals` per held-out question and mode for a version; seeds are the same at every version."""
    where = {"run": run.name, "version": version}
    found = run.lake.read("evals", where)
    if not found.num_rows:
        rows = _measure(run, version, report)
        found = records.rows("evals", rows)
        report.note(run.lake.commit_once("evals", where, found))
    for mode, value in accuracies(found.to_pylist()).items():
        report.values[f"{mode}_v{version}"] = value


def accuracies(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mode -> mean over questions of the share of correct replies (an unbiased pass@1); pass@k of `sampled`."""
    result = {}
    for mode in sorted({row["mode"] for row in rows}):
        some = [row for row in rows if row["mode"] == mode]
        result[mode] = sum(row["correct"] / row["samples"] for row in some) / len(some)
        if some[0]["samples"] > 1:
            result[f"{mode}_pass_at_{some[0]['samples']}"] = sum(row["correct"] > 0 for row in some) / len(some)
    return result


def _measure(run: Run, version: int, report: StageReport) -> list[dict[str, Any]]:
    prompts = run.prompts_of(_held_out(run))
    engines = run.engines_at(version)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="eval") as pool:
        played = [
            pool.submit(_play, run, engines, version, prompt, mode) for prompt in prompts.values() for mode in MODES
        ]
        replies = report.work(lambda: [reply for future in played for reply in future.result()])
    verdicts = report.work(lambda: _verdicts(run, replies))
    for reply, verdict in zip(replies, verdicts, strict=True):
        if verdict["score"] is None:
            raise StageError(
                f"version {version}, question {reply['prompt_id']}: the verifier gave {verdict['verdict']} "
                f"({verdict['detail'][:200]}); accuracy needs every verdict; raise FURLONG_VERIFY_DEADLINE or fix it"
            )
        reply["verdict"], reply["correct"] = verdict["verdict"], verdict["verdict"] == Verdict.CORRECT
    return _per_question(run.name, version, replies)


def _verdicts(run: Run, replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each reply; where the verifier failed, of a second try."""
    items = verifier_items(run, replies)
    verdicts = run.verifier.score(items)
    lost = [number for number, verdict in enumerate(verdicts) if verdict["score"] is None]
    second = run.verifier.score([items[number] for number in lost]) if lost else []
    for number, verdict in zip(lost, second, strict=True):
        verdicts[number] = verdict
    return verdicts


def _held_out(run: Run) -> list[str]:
    where = {"dataset": run.dataset, "split": "eval"}
    rows = run.lake.read("prompts", where, ["prompt_id", "position"]).to_pylist()
    if not rows:
        raise StageError(f"dataset {run.dataset} has no held-out prompts to evaluate on; raise data.eval_prompts")
    return [row["prompt_id"] for row in sorted(rows, key=lambda row: row["position"])]


def _play(run: Run, engines: Engines, version: int, prompt: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    """One question in one mode; a try that fails is made once more, since accuracy needs every reply."""
    fitting_prompt(run, prompt)
    key = f"{run.name}-eval-v{version}-{prompt['prompt_id']}-{mode}"
    count = 1 if mode == "greedy" else run.spec.evals.samples
    tasks = [
        Task(f"{key}-s{n:02d}", n, counter_seed(run.spec.seed, "eval", prompt["prompt_id"], mode, n))
        for n in range(count)
    ]
    done: dict[int, Trajectory] = {}
    for attempt in range(TRIES):
        missing = [replace(task, attempt=attempt) for task in tasks if task.sample not in done]
        outcomes = run.play(missing, prompt, lambda requests, _: engines.generate(requests), key, mode == "greedy")
        done |= {o[0].sample: o[0] for o in outcomes if not isinstance(o, Failed)}
        if len(done) == count:
            break
    else:
        failed = next(outcome for outcome in outcomes if isinstance(outcome, Failed))
        raise StageError(
            f"version {version}, question {prompt['prompt_id']}: {failed.kind} in {TRIES} tries, last {failed.detail}; "
            "accuracy needs every reply"
        )
    for trajectory in done.values():
        if odd := {span[0] for span in trajectory.versions} - {version}:
            raise StageError(
                f"{trajectory.trajectory_id}: sampled by versions {sorted(odd)}, expected only {version}; end other "
                "drivers of this run's engines, and run again"
            )
    return [
        {"mode": mode, "prompt_id": prompt["prompt_id"], "text": done[n].text, "messages": as_json(done[n].messages),
         "tokens": sum(done[n].loss_mask), "finish_reason": done[n].finish_reason}
        for n in range(count)
    ]  # fmt: skip


def _per_question(run: str, version: int, replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for mode in MODES:
        for prompt_id in dict.fromkeys(r["prompt_id"] for r in replies):
            some = [r for r in replies if r["mode"] == mode and r["prompt_id"] == prompt_id]
            rows.append({
                "run": run, "version": version, "mode": mode, "prompt_id": prompt_id, "samples": len(some),
                "correct": sum(r["correct"] for r in some),
                "truncated": sum(r["verdict"] == Verdict.TRUNCATED for r in some),
                "mean_tokens": sum(r["tokens"] for r in some) / len(some),
                "texts": [r["text"] for r in some], "verdicts": [r["verdict"] for r in some],
            })  # fmt: skip
    return rows
