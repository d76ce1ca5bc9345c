"""What a spec says of rewards: the options `reward.*` of a task, applied to each of its questions.

`reward.verifier` replaces the family's own verifier: a name of VERIFIERS, "module:function", or several with weights, such
as `0.8 math_verify, 0.2 llm_judge`. `reward.free` and `reward.limit` (characters) shape by length, `reward.pattern` and
`reward.otherwise` by form. Every other `reward.X` goes into the verifier's entry as X.
"""

from __future__ import annotations

from typing import Any

from furlong.ops.spec import SpecError, TaskSpec
from furlong.ops.tasks.scoring import resolve

PREFIX = "reward."
VERIFIERS = {
    "exact": "furlong.ops.tasks.scoring:exact",
    "last_integer": "furlong.ops.tasks.scoring:last_integer",
    "whole_reply": "furlong.ops.tasks.scoring:whole_reply",
    "numeric": "furlong.ops.tasks.scoring_math:numeric",
    "math_verify": "furlong.ops.tasks.scoring_math:math_verify",
    "llm_judge": "furlong.ops.tasks.scoring_judge:llm_judge",
}
_SHAPE = "furlong.ops.tasks.scoring_shape"


def split(task: TaskSpec) -> tuple[TaskSpec, dict[str, Any]]:
    """The task without its `reward.*` options, and those without their prefix."""
    ours = {name: value for name, value in task.options.items() if name.startswith(PREFIX)}
    if not ours:
        return task, {}
    rest = {name: value for name, value in task.options.items() if name not in ours}
    return task.model_copy(update={"options": rest}), {name.removeprefix(PREFIX): v for name, v in ours.items()}


def shaped(row: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """A family's entry {question, answer, verifier, entry} with its verifier replaced and wrapped.

    Raises:
        SpecError: a verifier that does not exist, or an option that lacks its partner.
    """
    if not options:
        return row
    left = dict(options)
    named = left.pop("verifier", row["verifier"])
    form = {name: left.pop(name) for name in ("pattern", "otherwise") if name in left}
    length = {name: left.pop(name) for name in ("free", "limit") if name in left}
    if form and "pattern" not in form:
        raise SpecError("data.tasks: reward.otherwise goes with reward.pattern; set both")
    if length and len(length) < 2:
        raise SpecError("data.tasks: reward.free and reward.limit go together; set both, in characters")
    entry = {"answer": row["answer"], **row["entry"], **left}
    current = _combined(str(named), entry)
    for wrapper, settings in (("format_shaped", form), ("length_shaped", length)):
        if settings:
            current = {"verifier": f"{_SHAPE}:{wrapper}", "entry": {"of": current, **settings}}
    return {**row, **current}


def _combined(named: str, entry: dict[str, Any]) -> dict[str, Any]:
    parts = []
    for text in named.split(","):
        *weight, name = text.split() or [""]
        verifier = VERIFIERS.get(name, name)
        try:
            parts.append({"verifier": verifier, "entry": entry, "weight": float(weight[0]) if weight else 1.0})
            resolve(verifier)
        except (ValueError, ImportError, IndexError) as err:
            raise SpecError(
                f"data.tasks: reward.verifier={named!r} ({err}); set one of {', '.join(VERIFIERS)}, module:function of your "
                "own, or several as `0.8 math_verify, 0.2 llm_judge`"
            ) from err
    if len(parts) == 1:
        return {"verifier": parts[0]["verifier"], "entry": entry}
    return {"verifier": f"{_SHAPE}:composite", "entry": {"parts": parts}}
