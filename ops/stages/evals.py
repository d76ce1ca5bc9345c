"""Accuracy of weights versions on the questions kept away from training."""

from __future__ import annotations

from typing import Any

from furlong.ops import records
from furlong.ops.identity import counter_seed
from furlong.ops.protocols import GenerateRequest
from furlong.ops.records import Verdict
from furlong.ops.spec import RunSpec
from furlong.ops.stages.chain import one_row, starting_version
from furlong.ops.stages.context import Run, StageError, StageReport, StepKey, reporting
from furlong.ops.stages.rewards import verifier_items
from furlong.ops.stages.rollouts import check_sample, fitting_prompt


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
    columns = ["prompt_id", "question", "position"]
    prompts = run.lake.read("prompts", {"dataset": run.dataset, "split": "eval"}, columns).to_pylist()
    if not prompts:
        raise StageError(f"dataset {run.dataset} has no held-out prompts to evaluate on; raise data.eval_prompts")
    prompts.sort(key=lambda row: row["position"])
    requests, owner = [], []
    for prompt in prompts:
        ids = tuple(fitting_prompt(run, prompt))
        for mode, count, temperature in (("greedy", 1, 0.0), ("sampled", run.spec.evals.samples, None)):
            for sample in range(count):
                requests.append(
                    GenerateRequest(
                        request_id=f"{run.name}-eval-v{version}-{prompt['prompt_id']}-{mode}{sample}",
                        prompt=ids,
                        seed=counter_seed(run.spec.seed, "eval", prompt["prompt_id"], mode, sample),
                        max_new_tokens=run.spec.sampling.max_new_tokens,
                        temperature=run.spec.sampling.temperature if temperature is None else temperature,
                    )
                )
                owner.append((mode, prompt["prompt_id"]))
    engines = run.engines_at(version)
    samples = report.work(lambda: engines.generate(requests))
    replies = []
    for request, (mode, prompt_id), sample in zip(requests, owner, samples, strict=True):
        check_sample(request, sample, version)
        text = run.decode(list(sample.tokens))
        replies.append({"mode": mode, "prompt_id": prompt_id, "text": text, "tokens": len(sample.tokens),
                        "finish_reason": sample.finish_reason})  # fmt: skip
    verdicts = report.work(lambda: run.verifier.score(verifier_items(run, replies)))
    for reply, verdict in zip(replies, verdicts, strict=True):
        if verdict["score"] is None:
            raise StageError(
                f"version {version}, question {reply['prompt_id']}: the verifier gave {verdict['verdict']} "
                f"({verdict['detail'][:200]}); accuracy needs every verdict; raise FURLONG_VERIFY_DEADLINE or fix it"
            )
        reply["verdict"], reply["correct"] = verdict["verdict"], verdict["verdict"] == Verdict.CORRECT
    return _per_question(run.name, version, replies)


def _per_question(run: str, version: int, replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for mode in ("greedy", "sampled"):
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
