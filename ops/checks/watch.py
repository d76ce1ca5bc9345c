"""Checks that warn when a number moves as reward hacking moves it, with the trajectories that moved it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from furlong.ops.checks.verdict import SHOWN, Verdict

WINDOW = 5
"""Steps that a mean is taken over."""
DROP = 0.2
"""Of the reward's range so far, below the best mean."""
LONGER, SHORTER = 2.0, 0.5
"""Times the mean length of the run's first steps."""
REPEATED = 0.5
"""Share of a reply's three-token runs that are one and the same, from which on it counts as repetitive."""
REPETITIVE = 0.25
"""Share of a step's replies that may be."""
SHORTEST = 12
"""Tokens; shorter replies repeat by chance."""


def reward_drift(series: list[float], outcomes: list[dict[str, Any]]) -> Verdict:
    """Mean reward has not fallen off its best; a warning.

    Args:
        series: mean reward of every step so far, this one last.
        outcomes: rows of `steps.outcomes` of this step.
    """
    if len(series) < 2 * WINDOW:
        return Verdict("reward_drift", True, False, found={"steps": len(series)})
    means = [sum(series[at : at + WINDOW]) / WINDOW for at in range(len(series) - WINDOW + 1)]
    best, now, span = max(means), means[-1], max(series) - min(series)
    found = {"mean_reward": now, "best_mean_reward": best, "window": WINDOW}
    if now >= best - DROP * span or span == 0:
        return Verdict("reward_drift", True, False, found=found)
    worst = sorted(
        (row for row in outcomes if row["reward"] is not None), key=lambda row: (row["reward"], row["trajectory_id"])
    )
    words = f"mean reward of {WINDOW} steps is {now:.3f} after a best of {best:.3f}; read the step's worst trajectories"
    return Verdict("reward_drift", False, False, words, found, [row["trajectory_id"] for row in worst][:SHOWN])


def length_drift(series: list[float], trajectories: list[dict[str, Any]]) -> Verdict:
    """Replies are neither much longer nor much shorter than when the run began; a warning.

    Args:
        series: mean trained tokens per reply of the run's first steps and of the newest, this one last.
        trajectories: this step's, with `loss_mask`.
    """
    if len(series) < 2 * WINDOW:
        return Verdict("length_drift", True, False, found={"steps": len(series)})
    begin, now = sum(series[:WINDOW]) / WINDOW, sum(series[-WINDOW:]) / WINDOW
    found = {"mean_tokens": now, "mean_tokens_at_first": begin, "window": WINDOW}
    if SHORTER * begin <= now <= LONGER * begin:
        return Verdict("length_drift", True, False, found=found)
    longest = now > begin
    lengths = {row["trajectory_id"]: sum(row["loss_mask"]) for row in trajectories}
    named = sorted(lengths, key=lambda name: (-lengths[name] if longest else lengths[name], name))
    which = "longest" if longest else "shortest"
    words = f"replies have {now:.0f} tokens on average, {begin:.0f} at first; read the {which} ones"
    return Verdict("length_drift", False, False, words, found, named[:SHOWN])


def repetition(trajectories: list[dict[str, Any]]) -> Verdict:
    """Replies do not repeat themselves; a warning.

    Args:
        trajectories: this step's, with `tokens` and `loss_mask`.
    """
    shares = {row["trajectory_id"]: _share(row) for row in trajectories}
    loops = sorted(
        (name for name, share in shares.items() if share >= REPEATED), key=lambda name: (-shares[name], name)
    )
    found = {"replies": len(shares), "repetitive": len(loops)}
    if not shares:
        return Verdict("repetition", False, False, "there are no replies to look at; run the step's rollouts", found)
    if len(loops) <= REPETITIVE * len(shares):
        return Verdict("repetition", True, False, found=found)
    words = f"{len(loops)} of {len(shares)} replies repeat three tokens over and over; read them, and shape the reward"
    return Verdict("repetition", False, False, words, found, loops[:SHOWN])


def _share(row: dict[str, Any]) -> float:
    tokens = [token for token, sampled in zip(row["tokens"], row["loss_mask"], strict=True) if sampled]
    if len(tokens) < SHORTEST:
        return 0.0
    runs = Counter(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return max(runs.values()) / runs.total()
