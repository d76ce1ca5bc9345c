"""Stage 2: draw the step's prompts and sample a group of replies for each."""

from __future__ import annotations

import math
import time
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from furlong.ops import records
from furlong.ops.identity import counter_seed
from furlong.ops.protocols import GenerateRequest, Sample
from furlong.ops.stages.chain import check_repeatable, starting_version
from furlong.ops.stages.context import Run, StageError, StageReport, StepKey, reporting
from furlong.ops.tasks.prompts import draw


def rollouts(run: Run, key: StepKey) -> StageReport:
    """Commit `trajectories`, then `groups`: once the groups stand, so do all their trajectories."""
    with reporting("rollouts", key) as report:
        known = run.lake.read("groups", {"run": key.run, "step": key.step})
        groups = known.filter(pc.field("attempt") == key.attempt)
        trajectories = run.lake.read("trajectories", key.columns()) if groups.num_rows else None
        if trajectories is None:
            check_repeatable(run.lake, key, max(known["attempt"].to_pylist(), default=0))
            version = starting_version(run.lake, key)
            groups = _groups(run, key, version)
            trajectories = run.lake.read("trajectories", key.columns())
            if not trajectories.num_rows:
                trajectories = _trajectories(run, key, groups, version, report)
                report.note(run.lake.commit_once("trajectories", key.columns(), trajectories))
            report.note(run.lake.commit_once("groups", key.columns(), groups))
        report.values = _summary(groups, trajectories)
    return report


def _groups(run: Run, key: StepKey, version: int) -> pa.Table:
    spec = run.spec
    positions = draw(run.train_prompts, key.step, spec.algorithm.prompts_per_step, spec.seed)
    wanted = {"dataset": run.dataset, "split": "train", "position": sorted(set(positions))}
    drawn = run.lake.read("prompts", wanted, ["position", "prompt_id", "question"]).to_pylist()
    by_position = {row["position"]: row for row in drawn}
    rows = []
    for index, position in enumerate(positions):
        prompt = by_position[position]
        rows.append({
            **key.columns(), "group_id": f"{key.run}-{key.step:05d}.{key.attempt}-g{index:03d}", "dataset": run.dataset,
            "prompt_id": prompt["prompt_id"], "prompt_tokens": fitting_prompt(run, prompt),
            "samples": spec.algorithm.samples_per_prompt, "weights_version": version,
        })  # fmt: skip
    return records.rows("groups", rows)


def fitting_prompt(run: Run, prompt: dict[str, Any]) -> list[int]:
    """The prompt's token ids; StageError when prompt and longest reply do not fit the model's context."""
    ids = run.render(prompt["question"])
    room, limit = run.context_length, run.spec.sampling.max_new_tokens
    if len(ids) + limit > room:
        raise StageError(
            f"prompt {prompt['prompt_id']} has {len(ids)} tokens; with max_new_tokens={limit} it exceeds the model's "
            f"context of {room}; shorten data.system or the task's questions, or lower sampling.max_new_tokens"
        )
    return ids


def _trajectories(run: Run, key: StepKey, groups: pa.Table, version: int, report: StageReport) -> pa.Table:
    requests, owners = [], []
    for group in groups.to_pylist():
        for sample in range(group["samples"]):
            index = group["group_id"].rsplit("-", 1)[1]
            seed = counter_seed(run.spec.seed, key.step, key.attempt, index, group["prompt_id"], sample)
            name = f"{group['group_id']}-s{sample:02d}"
            requests.append(
                GenerateRequest(
                    request_id=name,
                    prompt=tuple(group["prompt_tokens"]),
                    seed=seed,
                    max_new_tokens=run.spec.sampling.max_new_tokens,
                    temperature=run.spec.sampling.temperature,
                )
            )
            owners.append((group, sample))
    engines = run.engines_at(version)
    started = time.time()
    samples = report.work(lambda: engines.generate(requests))
    fingerprint = engines.fingerprint()
    rows = []
    for request, (group, index), sample in zip(requests, owners, samples, strict=True):
        check_sample(request, sample, version)
        blank = len(request.prompt)
        rows.append({
            **key.columns(), "trajectory_id": request.request_id, "group_id": group["group_id"],
            "prompt_id": group["prompt_id"], "sample": index, "tokens": [*request.prompt, *sample.tokens],
            "logprobs": [None] * blank + list(sample.logprobs),
            "loss_mask": [False] * blank + [True] * len(sample.tokens),
            "version_spans": [{"version": v, "start": a + blank, "end": b + blank} for v, a, b in sample.versions],
            "finish_reason": sample.finish_reason, "seed": request.seed,
            "text": run.decode(list(sample.tokens)), "engine": fingerprint, "started_at": started,
            "seconds": sample.seconds,
        })  # fmt: skip
    return records.rows("trajectories", rows)


def check_sample(request: GenerateRequest, sample: Sample, version: int) -> None:
    """Refuse a sample that is not a whole, finite reply of this request under this version."""
    name = request.request_id
    if sample.request_id != name:
        raise StageError(f"engine answered {sample.request_id} for {name}; restart the engine with `make down`")
    if not sample.tokens or len(sample.tokens) != len(sample.logprobs):
        raise StageError(f"trajectory {name}: {len(sample.tokens)} tokens but {len(sample.logprobs)} log-probabilities")
    bad = [t for t, value in enumerate(sample.logprobs) if not math.isfinite(value) or value > 0]
    if bad:
        raise StageError(
            f"trajectory {name}: log-probability {sample.logprobs[bad[0]]} at reply token {bad[0]}; nothing was "
            "committed; check the weights version's digest and the engine's log"
        )
    if [span[0] for span in sample.versions] != [version]:
        raise StageError(f"trajectory {name}: sampled by versions {sample.versions}, expected only {version}")


def _summary(groups: pa.Table, trajectories: pa.Table) -> dict[str, Any]:
    lengths = [sum(mask) for mask in trajectories["loss_mask"].to_pylist()]
    reasons = trajectories["finish_reason"].to_pylist()
    return {
        "trajectories": len(lengths),
        "reply_tokens": sum(lengths),
        "mean_reply_tokens": sum(lengths) / len(lengths),
        "stopped_fraction": reasons.count("stop") / len(reasons),
        "weights_version": groups["weights_version"][0].as_py(),
    }
