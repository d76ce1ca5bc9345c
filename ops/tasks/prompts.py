"""The prompt table of a dataset, split by question, and which of its prompts a step draws."""

from __future__ import annotations

import json
import random
from typing import Any

from furlong.ops.identity import counter_seed, fingerprint
from furlong.ops.spec import DataSpec, SpecError, TaskSpec
from furlong.ops.tasks.families import entries, generator_version

PATIENCE = 20
"""A family counts as exhausted after PATIENCE x (questions found + 50) draws in a row brought none that is new.

With n equally likely questions of which one is missing, that leaves it unfound with probability exp(-20).
"""


def dataset_id(data: DataSpec, seed: int) -> str:
    """16 hex digits that name the prompt table which `data` and `seed` describe under today's generators."""
    return fingerprint({"data": data.model_dump(mode="json"), "seed": seed, "generator": generator_version()})[:16]


def prompt_rows(data: DataSpec, seed: int) -> list[dict[str, Any]]:
    """Rows of table `prompts`: distinct questions, held-out ones first chosen, each split in its own seeded order.

    Families are mixed in equal parts in both splits, as far as each has questions. Held-out questions are exactly
    `data.eval_prompts`; training questions are at most `data.train_prompts`.

    Raises:
        SpecError: an unknown family or option, or too few distinct questions; the message says how many there are.
    """
    dataset = dataset_id(data, seed)
    splits: dict[str, list[dict[str, Any]]] = {"eval": [], "train": []}
    seen: set[str] = set()
    for index, task in enumerate(data.tasks):
        n_eval = _share(data.eval_prompts, index, len(data.tasks))
        n_train = _share(data.train_prompts, index, len(data.tasks))
        found = _distinct(task, seed, n_eval + n_train, seen)
        if len(found) < n_eval + min(n_train, 1):
            beyond = " beyond those of the tasks before it" if index else ""
            raise SpecError(
                f"data: {task.name} with options {task.options} has {len(found)} distinct questions{beyond}, but needs "
                f"{n_eval} held out for evaluation and at least {min(n_train, 1)} to train on; "
                "lower data.eval_prompts or widen the task's options"
            )
        found.sort(key=lambda row: counter_seed("split", seed, row["prompt_id"]))
        splits["eval"] += found[:n_eval]
        splits["train"] += found[n_eval:]
    for split, found in splits.items():
        if not found:
            raise SpecError(f"data: no {split} prompts; set data.{split}_prompts to at least 1")
        found.sort(key=lambda row: counter_seed("order", seed, row["prompt_id"]))
    return [
        {"dataset": dataset, "split": split, "position": position, **row}
        for split, found in splits.items()
        for position, row in enumerate(found)
    ]


def draw(n_prompts: int, step: int, per_step: int, seed: int) -> list[int]:
    """Positions of the training prompts of `step` (from 1): seeded permutations, one after the other, cut in steps.

    A pure function, so nothing has to be remembered between steps: the i-th prompt of a step stands at place
    (step - 1) * per_step + i of an endless stream of epochs, each of which holds every prompt exactly once.
    """
    if n_prompts < 1 or step < 1 or per_step < 1:
        raise ValueError(f"draw: n_prompts={n_prompts}, step={step}, per_step={per_step} must all be at least 1")
    epochs: dict[int, list[int]] = {}
    positions = []
    for place in range((step - 1) * per_step, step * per_step):
        epoch, offset = divmod(place, n_prompts)
        if epoch not in epochs:
            epochs[epoch] = list(range(n_prompts))
            random.Random(counter_seed("epoch", seed, epoch)).shuffle(epochs[epoch])
        positions.append(epochs[epoch][offset])
    return positions


def _share(total: int, index: int, parts: int) -> int:
    return total // parts + (index < total % parts)


def _distinct(task: TaskSpec, seed: int, wanted: int, seen: set[str]) -> list[dict[str, Any]]:
    """Up to `wanted` rows with questions not in `seen`, which grows; fewer when the family has no more."""
    found: list[dict[str, Any]] = []
    barren = 0
    for entry in entries(task, seed):
        if len(found) == wanted or barren > PATIENCE * (len(found) + 50):
            return found
        barren += 1
        if entry["question"] in seen:
            continue
        barren = 0
        seen.add(entry["question"])
        found.append(_row(task, entry))
    raise AssertionError(f"{task.name}: entries() ended, but a family is an endless stream; mend the family")


def _row(task: TaskSpec, entry: dict[str, Any]) -> dict[str, Any]:
    try:
        body = json.dumps(entry["entry"], sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as err:
        raise SpecError(
            f"data.tasks: entries of {task.name} cannot be stored as JSON ({err}); choose another family"
        ) from err
    return {
        "prompt_id": fingerprint([task.name, entry["question"]])[:16],
        "task": task.name,
        "question": entry["question"],
        "answer": entry["answer"],
        "entry": body,
        "verifier": entry["verifier"],
    }
