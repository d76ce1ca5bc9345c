"""Trainer and engine are compared where the step's own starting weights have sampled, and nowhere else."""

from dataclasses import replace

import pytest
from test_fsdp_trainer import folder, folders, loaded, near  # noqa: F401 - folder and folders are fixtures
from tiny_policy import make_batch


def test_mismatch_is_measured_on_fresh_tokens_only(folder):  # noqa: F811
    trainer = loaded(folder)
    batch = near(trainer, make_batch(4))
    fresh = tuple(tuple(t % 2 == 0 for t in range(len(row))) for row in batch.replies)
    stale = tuple(tuple(v if new else v - 0.5 for v, new in zip(*pair, strict=True))
                  for pair in zip(batch.logprobs, fresh, strict=True))  # fmt: skip
    kept = replace(batch, masks=tuple(tuple(a and b for a, b in zip(*pair, strict=True))
                                      for pair in zip(batch.masks, fresh, strict=True)))  # fmt: skip
    metrics = trainer.step(replace(batch, logprobs=stale, fresh=fresh))
    alone = loaded(folder).step(kept)
    assert metrics.mismatch_coverage == pytest.approx(alone.tokens_trained / metrics.tokens_trained)
    assert metrics.mismatch_mean == pytest.approx(alone.mismatch_mean, abs=2e-6)
