"""Checks of what a step trained on: nothing lost, nothing doubled, nothing too old, every token what it says it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from furlong.ops.checks.verdict import SHOWN, Verdict

Row = dict[str, Any]


def conservation(groups: list[Row], trajectories: list[Row], rewards: list[Row], outcomes: list[Row]) -> Verdict:
    """prompts x samples = trained + dropped, each dropped one with its reason: every trajectory has one reward and one
    outcome, every outcome a trajectory, every sample of every group is there."""
    wanted = {(row["group_id"], sample) for row in groups for sample in range(row["samples"])}
    there = {(row["group_id"], row["sample"]) for row in trajectories}
    ids = Counter(row["trajectory_id"] for row in trajectories)
    scored, told = (Counter(row["trajectory_id"] for row in rows) for rows in (rewards, outcomes))
    faults = {
        "missing": [f"{group}-s{sample:02d}" for group, sample in sorted(wanted - there)],
        "strangers": [f"{group}-s{sample:02d}" for group, sample in sorted(there - wanted)],
        "not scored once": sorted(name for name in ids | scored if scored[name] != 1),
        "without one outcome": sorted(name for name in ids | told if told[name] != ids[name] or ids[name] != 1),
    }
    found: dict[str, Any] = {"prompts": len(groups), "samples": len(wanted), "trajectories": len(trajectories)}
    found |= Counter(row["disposition"] for row in outcomes)
    wrong = {name: rows for name, rows in faults.items() if rows}
    if not groups:
        return Verdict(
            "conservation", False, True, "the step has no groups, so nothing can be accounted for; run its rollouts"
        )
    if not wrong:
        return Verdict("conservation", True, True, found=found)
    words = "; ".join(f"{len(rows)} {name} ({', '.join(rows[:3])})" for name, rows in wrong.items())
    return Verdict(
        "conservation", False, True,
        f"trajectories do not add up: {words}; compare `trajectories`, `rewards` and `steps.outcomes`, and repeat the step",
        found | {name: len(rows) for name, rows in wrong.items()},
        [name for rows in wrong.values() for name in rows][:SHOWN],
    )  # fmt: skip


def token_round_trip(groups: list[Row], trajectories: list[Row], decode: Callable[[list[int]], str]) -> Verdict:
    """Every trajectory begins with its prompt's tokens; log-probabilities and weights versions stand exactly where tokens
    were sampled; the last reply's tokens are its text.

    Args:
        groups: with `prompt_tokens`. trajectories: with `tokens`, `logprobs`, `loss_mask`, `version_spans`, `text`, `turns`.
        decode: tokens to text.
    """
    prompts = {row["group_id"]: row["prompt_tokens"] for row in groups}
    faults = {}
    for row in trajectories:
        if fault := _token_fault(row, prompts.get(row["group_id"]), decode):
            faults[row["trajectory_id"]] = fault
    found = {"trajectories": len(trajectories), "faulty": len(faults)}
    if not trajectories:
        return Verdict(
            "token_round_trip", False, True, "there are no trajectories to check; run the step's rollouts", found
        )
    if not faults:
        return Verdict("token_round_trip", True, True, found=found)
    name, fault = next(iter(faults.items()))
    count = f"{len(faults)} of {len(trajectories)} trajectories"
    words = f"{count} are not what was sampled; {name}: {fault}; do not train on them"
    return Verdict("token_round_trip", False, True, words, found, list(faults)[:SHOWN])


def _token_fault(row: Row, prompt: list[int] | None, decode: Callable[[list[int]], str]) -> str:
    tokens, logprobs, mask = row["tokens"], row["logprobs"], row["loss_mask"]
    if not len(tokens) == len(logprobs) == len(mask):
        return f"{len(tokens)} tokens, {len(logprobs)} log-probabilities and a mask of {len(mask)}"
    sampled = [at for at, value in enumerate(logprobs) if value is not None]
    if not sampled or any(mask[at] and logprobs[at] is None for at in range(len(tokens))):
        return "a token that was not sampled would be trained on" if sampled else "nothing was sampled"
    if row["leaf"] == 0 and (prompt is None or tokens[: len(prompt)] != prompt):
        return "it does not begin with its prompt's tokens"
    spans = [(span["version"], span["start"], span["end"]) for span in row["version_spans"]]
    if [at for _, start, end in spans for at in range(start, end)] != sampled:
        return "the weights versions of its tokens do not cover what was sampled"
    first = sampled[-1]
    while first and logprobs[first - 1] is not None:
        first -= 1
    last = tokens[first : sampled[-1] + 1]
    # Without a stop token at its end, which most have.
    if row["text"] != decode(last[:-1]) and row["text"] != decode(last):
        return f"its tokens read {decode(last)[:60]!r}, its text is {row['text'][:60]!r}"
    return ""


def staleness_bound(trajectories: list[Row], step_of: dict[int, int], step: int, bound: int, masked: bool) -> Verdict:
    """No trained token was sampled by weights older than the run's bound.

    Args:
        step_of: weights version -> the step that made it.
        step: the step that trains.
        bound: `staleness` of the spec.
        masked: whether the run masks older tokens instead of leaving such groups out.
    """
    ages: dict[str, int] = {}
    for row in trajectories:
        versions = {span["version"] for span in row["version_spans"]}
        if unknown := versions - step_of.keys():
            words = f"{row['trajectory_id']} was sampled by weights version {min(unknown)}, which is not in the lake"
            return Verdict(
                "staleness_bound",
                False,
                True,
                f"{words}; restore weight_versions",
                {"bound": bound},
                [row["trajectory_id"]],
            )
        each = [step - 1 - step_of[version] for version in versions]
        ages[row["trajectory_id"]] = min(each) if min(each, default=0) < 0 else max(each, default=0)
    worst = max(ages.values(), default=0)
    found = {"bound": bound, "oldest": worst, "masked": masked}
    late = sorted((name for name, age in ages.items() if age > bound), key=lambda name: -ages[name])
    if not ages or min(ages.values()) < 0:
        return Verdict(
            "staleness_bound", False, True, "there is nothing sampled, or something sampled by later weights", found
        )
    if not late or masked:
        return Verdict("staleness_bound", True, True, found=found)
    words = f"{len(late)} trajectories have tokens {worst} steps old where {bound} are allowed; repeat the step"
    return Verdict("staleness_bound", False, True, words, found, late[:SHOWN])


def routing_coverage(trajectories: list[Row]) -> Verdict | None:
    """Where the model has experts, those of every token that was fed are recorded; None for a model without.

    That the trainer went through the very experts that are recorded, token by token, it asserts itself in every pass.
    """
    if all(row["routing"] is None for row in trajectories):
        return None
    short = [row["trajectory_id"] for row in trajectories if not _routed(row)]
    found = {"trajectories": len(trajectories), "without": len(short)}
    if not short:
        return Verdict("routing_coverage", True, True, found=found)
    words = f"{len(short)} trajectories lack the experts of some tokens, so the trainer would choose others; repeat the step"
    return Verdict("routing_coverage", False, True, words, found, short[:SHOWN])


def _routed(row: Row) -> bool:
    routing = row["routing"]
    # The last token of a trajectory was drawn but never fed.
    return routing is not None and routing["first"] == 0 and routing["rows"] >= len(row["tokens"]) - 1
