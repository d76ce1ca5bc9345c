"""What a draft did for the rollouts of a step: counts of the engines, and the numbers that are shown.

Engines count since they began (`ops.policy.speculation_counts`); a step's own counts are differences between two readings.
The acceptance length is the mean number of tokens that one verify gives: those accepted, and one of the policy's own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

WINDOW = 5
"""Steps over which acceptance is averaged before it is compared."""
DROP = 0.1
"""Share of the accepted tokens by which acceptance may be below its best before people are warned."""
_LISTS = {"positions": ("below",), "tasks": ("task",), "decode_steps": ("kind", "replies")}
_PLAIN = ("verifies", "tokens", "draft_seconds")
_DEPTHS = ("proposed", "accepted")
_REPLIES = ("drafted", "shadow")


def counted(report: dict[str, Any]) -> dict[str, Any]:
    """Counts in the form of column `speculation` of table `batches`, of one engine's `health()["speculation"]`."""
    return {
        "engines": 1,
        "verifies": report["verifies"],
        "tokens": sum(row["tokens"] for row in report["positions"]),
        "draft_seconds": report["draft_seconds"],
        **{name: list(report[name]) for name in (*_DEPTHS, "positions", "tasks")},
        "decode_steps": report["steps"],
        **{name: report["replies"][name] for name in _REPLIES},
    }


def since(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """What was counted between two readings of one engine; all of `now` where it has begun anew in between."""
    difference = _flat(now)
    for place, count in _flat(before).items() if before else ():
        difference[place] -= count
    if any(count < 0 for count in difference.values()):
        return now
    return _whole(difference, now["engines"])


def added(rows: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The sum of several engines' counts, or of several steps'; None of none."""
    total: dict[tuple, float] = defaultdict(int)
    engines = []
    for row in rows:
        engines.append(row["engines"])
        for place, count in _flat(row).items():
            total[place] += count
    return _whole(total, max(engines)) if engines else None


def together(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The sum over engines that were read at once; None of none."""
    total = added(rows)
    return total and total | {"engines": len(rows)}


def numbers(row: dict[str, Any] | None) -> dict[str, float | str]:
    """What is worth showing, by name; what was not measured is left out, and of a run without a draft all.

    `accepted_depth_<d>` is the share of the proposals of depth d that were accepted. Both paces are of the same decode
    steps: as they were, and as they would have been at the pace of those of their size without proposals (`speedup`).
    """
    if row is None:
        return {}
    steps = row["decode_steps"]
    taken, count = sum(step["seconds"] for step in steps), sum(step["count"] for step in steps)
    tokens, seconds, plain = _paces(steps)
    found: dict[str, float | str | None] = {
        "acceptance_length": _ratio(row),
        **{
            f"accepted_depth_{depth}": accepted / proposed if proposed else None
            for depth, (proposed, accepted) in enumerate(zip(row["proposed"], row["accepted"], strict=True), 1)
        },
        **{f"acceptance_length_{_where(row['positions'], at)}": _ratio(p) for at, p in enumerate(row["positions"])},
        **{f"acceptance_length_{task['task']}": _ratio(task) for task in row["tasks"] if task["task"]},
        "speculation_off_share": sum(map(_off, steps)) / count if count else None,
        "speculation_off_because": _reasons(steps),
        "speculation_speedup": speedup(steps),
        "tokens_per_second_with_draft": tokens / seconds if tokens else None,
        "tokens_per_second_without": tokens / plain if tokens else None,
        "draft_rollout_share": row["draft_seconds"] / taken if taken else None,
        **{f"reply_tokens_per_second_{name}": _per_second(row[name]) for name in _REPLIES},
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


def speedup(decode_steps: list[dict[str, Any]]) -> float | None:
    """How many times as long the decode steps would have taken at the pace of those of their size without proposals; None
    where no size has both kinds. Sizes without plain steps are left out."""
    tokens, seconds, plain = _paces(decode_steps)
    return plain / seconds if tokens else None


def fallen(lengths: list[float]) -> tuple[bool, float | None, float | None]:
    """Whether acceptance is below its best by more than `DROP`.

    Args:
        lengths: acceptance length of each step so far, in order.
    Returns:
        the verdict, the mean of the last `WINDOW` steps, and the highest mean of as many steps before them; None while
        there are too few.
    """
    means = [sum(lengths[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(lengths) + 1)]
    if len(means) <= WINDOW:
        return False, means[-1] if means else None, None
    recent, best = means[-1], max(means[:-WINDOW])
    return recent - 1 < (1 - DROP) * (best - 1), recent, best


def _ratio(part: dict[str, Any]) -> float | None:
    return part["tokens"] / part["verifies"] if part["verifies"] else None


def _per_second(part: dict[str, Any]) -> float | None:
    return part["tokens"] / part["seconds"] if part["seconds"] else None


def _paces(steps: list[dict[str, Any]]) -> tuple[int, float, float]:
    """Of the sizes that have decode steps with proposals and without: tokens, the seconds they took, and the seconds that
    they would have taken at the pace of those without."""
    plain, every = _by_size(filter(_off, steps)), _by_size(steps)
    both = [size for size, (tokens, seconds) in plain.items() if tokens and seconds and every[size] != plain[size]]
    would = sum(every[size][0] * plain[size][1] / plain[size][0] for size in both)
    return sum(every[size][0] for size in both), sum(every[size][1] for size in both), would


def _where(positions: list[dict[str, Any]], at: int) -> str:
    end = positions[at]["below"]
    return f"below_{end}" if end is not None else "beyond"


def _off(step: dict[str, Any]) -> int:
    return step["count"] if step["kind"].startswith("off") else 0


def _reasons(steps: list[dict[str, Any]]) -> str:
    total = sum(step["count"] for step in steps)
    counts: Counter[str] = Counter()
    for step in filter(_off, steps):
        counts[step["kind"].partition(": ")[2]] += step["count"]
    return ", ".join(f"{why} {count / total:.0%}" for why, count in counts.most_common())


def _by_size(steps: Iterable[dict[str, Any]]) -> dict[int, tuple[int, float]]:
    found: dict[int, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for step in steps:
        tokens, seconds = found[step["replies"]]
        found[step["replies"]] = (tokens + step["tokens"], seconds + step["seconds"])
    return found


def _flat(row: dict[str, Any]) -> dict[tuple, float]:
    """Each count under the place it has in the row."""
    flat: dict[tuple, float] = defaultdict(int, {(name,): row[name] for name in _PLAIN})
    for name in _DEPTHS:
        flat |= {(name, depth): count for depth, count in enumerate(row[name])}
    for name, keys in _LISTS.items():
        for part in row[name]:
            where = tuple(part[key] for key in keys)
            flat |= {(name, where, what): count for what, count in part.items() if what not in keys}
    for name in _REPLIES:
        flat |= {(name, what): count for what, count in row[name].items()}
    return flat


def _whole(flat: dict[tuple, float], engines: int) -> dict[str, Any]:
    """The row of these counts; parts in which nothing was counted are left out."""
    row: dict[str, Any] = {"engines": engines, **{name: flat.get((name,), 0) for name in _PLAIN}}
    for name in _DEPTHS:
        depths = sorted(place[1] for place in flat if place[0] == name)
        row[name] = [flat[name, depth] for depth in depths]
    for name, keys in _LISTS.items():
        parts: dict[tuple, dict[str, Any]] = {}
        for place, count in flat.items():
            if place[0] == name:
                parts.setdefault(place[1], dict(zip(keys, place[1], strict=True)))[place[2]] = count
        counts = [(where, part) for where, part in parts.items() if any(part[key] for key in part if key not in keys)]
        row[name] = [part for _, part in sorted(counts, key=lambda pair: [(v is None, v) for v in pair[0]])]
    for name in _REPLIES:
        row[name] = {what: flat.get((name, what), 0) for what in ("tokens", "seconds")}
    return row
