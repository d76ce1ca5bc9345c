"""Tables and targets of the benchmark, from what the ranks found."""

from __future__ import annotations

from dataclasses import dataclass, field

from branch_attention_ranks import BYTES, DEPTH, HEAD_DIM, HEADS, KV_HEADS, Case

from furlong.kernels.trunk import SPAN

MIB = 2**20
HEADER = 512
NAMES = {
    "ring": "branch attention, zigzag ring",
    "gather": "branch attention, all-gather",
    "flex": "FlexAttention, block mask, all-gather (forward)",
    "contiguous": "branch attention, contiguous ring",
    "dense": "SDPA, dense mask, all-gather",
    "all depths": "branch attention, 4 depths at once",
    "in sequence": "4 depths as rows of the sequence, zigzag ring",
}
FORMULAS = ("ring", "gather", "flex", "dense", "in sequence")
"""Sides whose peak follows a formula; of the others only what was run is shown."""


def kv_bytes(tokens: int) -> int:
    """Of all main keys and values."""
    return 2 * tokens * KV_HEADS * HEAD_DIM * BYTES


def causal_pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def sent_formula(tokens: int, ranks: int) -> tuple[float, float]:
    """Bytes that a rank of a ring sends, forward and backward: keys and values each time, gradients once."""
    share = (ranks - 1) * kv_bytes(tokens) / ranks
    return share, 2 * share


def minimum_sent(tokens: int, ranks: int) -> float:
    """2 (C - 1) / C |K,V|: every key and value once to the others, every gradient once back."""
    return 2 * (ranks - 1) / ranks * kv_bytes(tokens)


@dataclass
class Points:
    """What the ranks found, by (side, ranks, tokens)."""

    cases: list[Case]
    by_rank: list[list[dict | None]]
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._at: dict[tuple[str, int, int, bool], list[dict]] = {}
        for index, case in enumerate(self.cases):
            found = [rank[index] for rank in self.by_rank if rank[index] is not None]
            if len(found) != case.ranks:
                raise ValueError(f"{case}: {len(found)} ranks reported; all of them have to, look at their errors")
            self._at[case.side, case.ranks, case.tokens, case.arithmetic] = found

    def at(self, side: str, ranks: int, tokens: int) -> list[dict] | None:
        """By rank; the run with arithmetic where there was one."""
        return self._at.get((side, ranks, tokens, True)) or self._at.get((side, ranks, tokens, False))

    def computed(self, side: str, ranks: int, tokens: int) -> bool:
        return (side, ranks, tokens, True) in self._at

    def twins(self) -> tuple[int, int]:
        """(points run both ways, those whose counts differ anywhere)."""
        both = [key[:3] for key in self._at if key[3] and (*key[:3], False) in self._at]
        return len(both), sum(self._at[*key, True] != self._at[*key, False] for key in both)

    def sizes(self, side: str) -> list[tuple[int, int]]:
        """(tokens, ranks) of a side, ascending."""
        return sorted({(key[2], key[1]) for key in self._at if key[0] == side})


def table(head: list[str], rows: list[list[str]]) -> None:
    """As Markdown."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    print(flush=True)


def size(tokens: int) -> str:
    return f"{tokens // 1024}K"


def mib(count: float) -> str:
    return f"{count / MIB:.2f}" if count < 100 * MIB else f"{count / MIB:.0f}"


def peak(found: dict) -> int:
    """Of forward and backward."""
    return max(found["forward"]["peak"], found["backward"]["peak"] if found["backward"] else 0)


def sent(found: dict, phase: str) -> int:
    """As the dispatcher saw it, without headers."""
    counts = found[phase]
    return sum(counts["sent"].values()) if counts else 0


def headers(ranks: int) -> int:
    """Bytes of one call's."""
    return HEADER * (ranks - 1)


def spread(values: list[float]) -> float:
    """Highest by mean."""
    return max(values) / (sum(values) / len(values)) if sum(values) else 1.0


def balance_table(points: Points) -> list[tuple[str, bool]]:
    """Pairs per rank, and what the kernels multiply for them."""
    rows, even, exact, worst = [], True, True, 0.0
    for tokens, ranks in points.sizes("ring"):
        found = points.at("ring", ranks, tokens)
        pairs = [one["pairs"] + one["branch_pairs"] for one in found]
        asked = [one["forward"]["pairs"]["forward"] / HEADS for one in found]
        done = [sum(one[p]["blocks"][p] for p in ("forward", "backward")) / HEADS for one in found]
        over = sum(done) / (2 * sum(pairs)) - 1
        uneven = points.at("contiguous", ranks, tokens)
        exact &= sum(pairs) == causal_pairs(tokens) + tokens * DEPTH and min(asked) >= min(pairs)
        even &= spread(pairs) <= 1.05 and spread(done) <= 1.05
        worst = max(worst, abs(over))
        rows.append([
            size(tokens), str(ranks), "yes" if points.computed("ring", ranks, tokens) else "no", f"{max(pairs):,}",
            f"{spread(pairs):.4f}", f"{spread(done):.4f}", f"{100 * (sum(asked) / sum(pairs) - 1):.2f} %",
            f"{100 * over:.2f} %", f"{spread([o['pairs'] for o in uneven]):.3f}" if uneven else "",
        ])  # fmt: skip
    print("Query-key pairs per rank and head, T(T+1)/2 + T K in all; forward and backward for what is multiplied.")
    head = ["T", "C", "arithmetic", "pairs, most", "max/mean", "max/mean multiplied", "asked over exact",
            "multiplied over exact", "contiguous max/mean"]  # fmt: skip
    table(head, rows)
    return [
        ("visible pairs of all ranks are T(T+1)/2 + T K, exactly", exact),
        ("one long document: pairs and FLOPs max/mean <= 1.05 over ranks", even),
        (f"FLOPs within 5 % of the exact count of unmasked pairs (worst {100 * worst:.2f} %)", worst <= 0.05),
    ]


def work_table(points: Points, ranks: list[int]) -> None:
    """Pairs that the busiest rank multiplies, by those it would have to if all ranks had equal shares of the visible."""
    rows = []
    for tokens in sorted({t for t, _ in points.sizes("in sequence")}):
        for side, name in NAMES.items():
            seen = causal_pairs(tokens) + tokens * DEPTH
            if side == "all depths":
                seen = DEPTH * causal_pairs(tokens) + tokens * causal_pairs(DEPTH)
            if side == "in sequence":
                seen = (DEPTH + 1) * causal_pairs(tokens) + tokens * causal_pairs(DEPTH)
            cells = [points.at(side, c, tokens) for c in ranks]
            if any(cells):
                worst = (
                    max(o["multiplied"] for o in x) * c / seen if x else 0 for x, c in zip(cells, ranks, strict=True)
                )
                rows.append([size(tokens), name, *(f"{x:.3f}" if x else "" for x in worst)])
    print(
        "Pairs that the busiest rank multiplies forward, by an equal share of the visible ones. Rows of the sequence are"
    )
    print("what a causal kernel would multiply, and still see wrong keys.")
    table(["T", "", *(f"C = {c}" for c in ranks)], rows)


def sent_table(points: Points) -> list[tuple[str, bool]]:
    rows, within = [], True
    for tokens, ranks in points.sizes("ring"):
        if ranks == 1:
            continue
        found = points.at("ring", ranks, tokens)
        forward, backward = (max(sent(one, p) for one in found) for p in ("forward", "backward"))
        own = max(sum(one["own_sent"].values()) for one in found)
        formula = sent_formula(tokens, ranks)
        right = sum(formula) + 2 * headers(ranks)
        within &= forward + backward == own and abs(own / right - 1) <= 0.02
        gather, flex, whole = (points.at(s, ranks, tokens) for s in ("gather", "flex", "in sequence"))
        rows.append([
            size(tokens), str(ranks), mib(forward), mib(backward), f"{100 * (own / right - 1):+.3f} %",
            f"{(forward - headers(ranks)) / (minimum_sent(tokens, ranks) / 2):.3f}",
            f"{(own - 2 * headers(ranks)) / minimum_sent(tokens, ranks):.3f}",
            mib(max(sent(one, "forward") + sent(one, "backward") for one in gather)) if gather else "",
            mib(max(sent(one, "forward") for one in flex)) if flex else "",
            mib(max(sent(one, "forward") + sent(one, "backward") for one in whole)) if whole else "",
        ])  # fmt: skip
    print(
        "MiB sent per rank (busiest). The minimum is 2 (C-1)/C |K,V|, half of it forward. A ring sends keys and values"
    )
    print("again in the backward pass, in place of keeping them: half as much again.")
    head = ["T", "C", "forward", "backward", "formula off", "forward x min", "both x min", "gather both", "Flex forward",
            "depths in sequence, both"]  # fmt: skip
    table(head, rows)
    return [("bytes sent: two independent counts agree, formula within 2 % on every point", within)]


def memory_table(points: Points, ranks: list[int]) -> list[tuple[str, bool]]:
    """Peak bytes per rank of every side; what was not run is extrapolated, and marked."""
    peaks: dict[str, dict[tuple[int, int], int]] = {}
    for side in NAMES:
        peaks[side] = {(t, c): max(map(peak, points.at(side, c, t))) for t, c in points.sizes(side)}
    shown = sorted({t for t, _ in points.sizes("flex")})
    off = {
        side: max(abs(_formula(side, peaks[side], c, t) / p - 1) for (t, c), p in peaks[side].items())
        for side in FORMULAS
    }
    rows = [
        [size(t), name, *(_peak_cell(side, peaks[side], c, t) for c in ranks)]
        for t in shown
        for side, name in NAMES.items()
    ]
    print("Peak MiB per rank (the busiest), inputs and gradients included, forward and backward. ~ is EXTRAPOLATED by")
    print("a(C) f + b(C) g, set at the least and the greatest T that were run and compared with those between: f, g =")
    print(
        "T, T^2 for masks; else T/C, min(T/C, rows of two of a backend's pieces). Farthest off of any measured point:"
    )
    print(", ".join(f"{side} {100 * x:.2f} %" for side, x in off.items()))
    table(["T", "", *(f"C = {c}" for c in ranks)], rows)
    one, two, four, eight = (peaks["ring"][shown[-1], c] for c in (1, 2, 4, 8))
    return [
        (f"memory per rank falls as 1/C: {four / eight:.2f}x from C = 4 to 8 (>= 0.95 of 2); {two / four:.2f}x from 2 to 4, "
         f"where the ring's second buffer comes in; {one / eight:.2f}x from 1 to 8", four / eight >= 1.9),
        (f"memory formulas within 2 % on every measured point (worst {100 * max(off.values()):.2f} %)",
         max(off.values()) <= 0.02),
    ]  # fmt: skip


def _peak_cell(side: str, found: dict[tuple[int, int], int], ranks: int, tokens: int) -> str:
    if (tokens, ranks) in found:
        return mib(found[tokens, ranks])
    return f"~{mib(_formula(side, found, ranks, tokens))}" if side in FORMULAS else ""


def _formula(side: str, found: dict[tuple[int, int], int], ranks: int, tokens: int) -> float:
    """Peak bytes: through the least and the greatest T that were run at these ranks."""
    (t, p), *_, (u, r) = sorted((t, p) for (t, c), p in found.items() if c == ranks)
    (f, g), (h, i), (j, k) = (_basis(side, x, ranks) for x in (t, u, tokens))
    det = f * i - g * h
    if det == 0:
        return r / h * j
    return j * (p * i - g * r) / det + k * (f * r - h * p) / det


def _basis(side: str, tokens: int, ranks: int) -> tuple[float, float]:
    if side in ("dense", "flex"):
        return tokens, tokens**2
    rows = tokens * (1 + DEPTH if side == "in sequence" else 1) / ranks
    return rows, min(rows, 2 * SPAN)


def resident_table(points: Points, tokens: list[int], ranks: int) -> list[tuple[str, bool]]:
    """Buffers of other ranks' keys and values against all of them."""
    rows, found = [], {}
    for t in tokens:
        ring, flex = points.at("ring", ranks, t), points.at("flex", ranks, t)
        if not ring or not flex:
            continue
        held = max(one["forward"]["most"]["ring"] for one in ring)
        entries = DEPTH * kv_bytes(t) // ranks
        gathered = max(one["forward"]["most"]["branch_attention_baselines"] for one in flex) - entries
        own = kv_bytes(t) / ranks
        both = [max(one["forward"]["peak"] for one in side) for side in (ring, flex)]
        found[t] = gathered / held
        rows.append([
            size(t), mib(held), mib(gathered), f"{gathered / held:.2f}", f"{(gathered + own) / (held + own):.2f}",
            *(mib(b) for b in both), f"{both[1] / both[0]:.2f}",
        ])  # fmt: skip
    print(
        f"Resident keys and values per rank at C = {ranks}, forward, MiB: the ring's buffers (the block in use and the one"
    )
    print(
        "arriving) against FlexAttention's gathered ones; then with the rank's own share, which both keep; then all bytes."
    )
    head = ["T", "ring", "gathered", "ratio", "ratio with own", "all bytes, ring", "all bytes, Flex", "ratio"]
    table(head, rows)
    last = max(found, default=0)
    return [(f"resident K/V at C = {ranks}, {size(last)}: {found.get(last, 0):.2f}x under all-gather (>= 4)",
             bool(found) and found[last] >= 4)]  # fmt: skip
