"""A draft learns the same on any number of ranks: loss, measures and every gradient, in float64 to 1e-12."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from draft_ranks import DEADLINE, Shared, part_of, solve
from kernel_ranks import run_ranks

from furlong.kernels.ring import Ring
from furlong.ops.draft.gradients import draft_gradients
from furlong.ops.draft.module import draft_module

CASES = [
    Shared(),
    Shared(loss="mixed", reduced=True, backend="cpu"),
    Shared(layout="line"),
    Shared(layout="contiguous", loss="tv"),
    Shared(lengths=(1,)),
    Shared(lengths=(3, 2, 5)),
    Shared(trained="last", lengths=(20, 3), layout="contiguous"),
    Shared("block"),
    Shared("block", loss="mixed", reduced=True, layout="line", backend="cpu"),
    Shared("block", trained="last", lengths=(20, 6), layout="contiguous"),
]


@pytest.fixture(scope="module")
def truth():
    """Of each case, on one rank that has everything."""
    found = []
    for shared in CASES:
        case = shared.whole()
        module = draft_module(case.shape, case.tensors)
        result = draft_gradients(
            module, case.inputs, case.settings, case.counts, case.embedding, case.head, progress=0.4,
            backend=shared.backend,
        )  # fmt: skip
        grads = {name: p.grad for name, p in module.named_parameters()}
        found.append((result, grads, case.counts))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_learns_the_same(ranks, truth):
    if ranks == 1:
        results = [[part_of(shared, Ring(None, DEADLINE)) for shared in CASES]]
    else:
        results = run_ranks(ranks, solve, CASES, deadline=DEADLINE + 30)
    for shared, (whole, grads, counts), *parts in zip(CASES, truth, *results, strict=True):
        losses, sums, slopes, counted, sent = zip(*parts, strict=True)
        assert torch.equal(sum(counted), counts), shared
        if not counts.any():
            # Then no gradient was made at all.
            assert whole.reason, shared
            assert all(grad is None for grad in slopes[0].values()), shared
            continue
        assert whole.loss > 0.01, shared
        assert sum(losses) == pytest.approx(whole.loss, rel=0, abs=1e-12), shared
        torch.testing.assert_close(sum(sums), whole.sums, rtol=0, atol=1e-12, msg=str(shared))
        for name, grad in grads.items():
            total = sum(slope[name] for slope in slopes)
            torch.testing.assert_close(total, grad, rtol=0, atol=1e-12, msg=f"{shared} {name}")
        kinds = {kind for each in sent for kind, size in each.items() if size}
        assert bool(kinds) == (ranks > 1), shared
    idle = [shared for shared, *parts in zip(CASES, *results, strict=True) if any(not part[1].any() for part in parts)]
    assert ranks == 1 or any(shared.trained == "last" for shared in idle), "a rank without a token to learn was meant"
