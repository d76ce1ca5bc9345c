"""Trainer and engine are compared under the weights that sampled a token: the step's own, or those given beside it."""

import math
from dataclasses import replace

import pytest
from test_fsdp_trainer import ALONE, folder, folders, loaded, near  # noqa: F401 - folder and folders are fixtures
from tiny_policy import make_batch

from furlong.ops.protocols import OtherLogprobs


def halves(folder):  # noqa: F811
    """A batch whose tokens at even offsets the step's own weights have sampled, the others older ones; and only the first
    in the loss."""
    batch = replace(near(loaded(folder), make_batch(4)), version=3)
    own = tuple(tuple(t % 2 == 0 for t in range(len(row))) for row in batch.replies)
    by = tuple(tuple(3 if mine else 2 for mine in row) for row in own)
    stale = tuple(tuple(v if mine else v - 0.5 for v, mine in zip(*pair, strict=True))
                  for pair in zip(batch.logprobs, own, strict=True))  # fmt: skip
    kept = tuple(tuple(on and mine for on, mine in zip(*pair, strict=True))
                 for pair in zip(batch.masks, own, strict=True))  # fmt: skip
    mixed = replace(batch, logprobs=stale, sampled_by=by)
    return mixed, replace(mixed, masks=kept), own


def test_mismatch_is_measured_on_fresh_tokens_only(folder):  # noqa: F811
    mixed, fresh, _ = halves(folder)
    metrics, alone = loaded(folder).step(mixed, ALONE), loaded(folder).step(fresh, ALONE)
    assert 0 < metrics.mismatch_coverage < 1
    assert metrics.mismatch_coverage == pytest.approx(alone.tokens_trained / metrics.tokens_trained)
    assert metrics.mismatch_mean == pytest.approx(alone.mismatch_mean, abs=2e-6)


def test_stale_tokens_are_compared_under_the_weights_that_sampled_them(folder):  # noqa: F811
    """As if the older weights' log-probabilities were 0.25 above the engine's."""
    mixed, fresh, own = halves(folder)
    sampling = tuple(tuple(math.nan if mine else v + 0.25 for v, mine in zip(*pair, strict=True))
                     for pair in zip(mixed.logprobs, own, strict=True))  # fmt: skip
    metrics, alone = loaded(folder).step(mixed, OtherLogprobs(sampling)), loaded(folder).step(fresh, ALONE)
    assert metrics.mismatch_coverage == 1
    share = alone.tokens_trained / metrics.tokens_trained
    assert metrics.mismatch_mean == pytest.approx(share * alone.mismatch_mean + (1 - share) * 0.25, abs=2e-6)
