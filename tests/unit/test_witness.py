"""The witness against trainers that are honest and trainers that are not."""

import pytest
import torch
from test_fsdp_trainer import ALONE, folder, folders, loaded, near  # noqa: F401 - fixtures
from tiny_policy import make_batch

from furlong.ops.policy.packing import pack
from furlong.ops.policy.witness import Witness, counts


def micro_batches(batch, budget=24):
    return pack(batch, batch.masks, budget)


def weight_of(micro, trunk):
    """Stands for a network: log-probabilities that depend on the trunk and on nothing else."""
    return trunk.sum() * torch.ones(len(micro.target))


def test_every_token_with_a_slope_is_counted_once():
    batch = make_batch(1)
    witness = Witness(len(batch.replies))
    for micro in micro_batches(batch):
        trunk = torch.ones(3, requires_grad=True) * 2
        logprobs = weight_of(micro, trunk)
        witness.watch(micro, logprobs, trunk)
        (logprobs * (micro.offset != 0)).sum().backward()
    assert witness.counts().tolist() == [sum(mask[1:]) for mask in batch.masks]


@pytest.mark.parametrize("fault", ["detached", "skipped", "zero loss", "no trunk", "vanished"])
def test_what_does_not_arrive_counts_nothing(fault):
    batch = make_batch(1)
    micro = micro_batches(batch, 512)[0]
    witness = Witness(len(batch.replies))
    trunk = torch.ones(3, requires_grad=True) * 2
    through = trunk.detach().requires_grad_() if fault == "detached" else trunk
    logprobs = weight_of(micro, through * (0.0 if fault == "vanished" else 1.0))
    witness.watch(micro, logprobs, None if fault == "no trunk" else trunk)
    if fault != "skipped":
        (logprobs * (0.0 if fault == "zero loss" else 1.0)).sum().backward()
    assert witness.counts().tolist() == [0] * len(batch.replies)


def test_ranks_of_a_pipeline_add_their_evidence():
    batch = make_batch(1)
    micros = micro_batches(batch)
    first, last = Witness(len(batch.replies)), Witness(len(batch.replies))
    for number, micro in enumerate(micros):
        trunk = torch.ones(3, requires_grad=True) * 2
        logprobs = weight_of(micro, trunk)
        last.watch(micro, logprobs, None)
        first.watch(micro, None, trunk)
        if number:
            logprobs.sum().backward()
    assert first.counts().sum() == last.counts().sum() == 0, "each alone has seen half"
    lost = set(micros[0].trajectory.tolist())
    found = counts(first.evidence() + last.evidence()).tolist()
    kept = torch.cat([micro.trajectory for micro in micros[1:]]).bincount(minlength=len(found)).tolist()
    assert found == kept
    assert lost
    assert sum(found) > 0


def test_nothing_watched_counts_nothing():
    assert Witness(2).counts().tolist() == [0, 0]


def test_a_step_tells_of_every_token_that_had_a_gradient(folder):  # noqa: F811
    """Clipped and masked tokens have none, nor has a trajectory whose advantage is 0; all the others must be there."""
    trainer = loaded(folder, budget=24)
    batch = near(trainer, make_batch(2))
    metrics = trainer.step(batch, ALONE)
    trained = [sum(mask) for mask in batch.masks]
    assert all(0 <= got <= most for got, most in zip(metrics.tokens_reached, trained, strict=True))
    assert sum(metrics.tokens_reached) == round((1 - metrics.clip_fraction) * metrics.tokens_trained)


def test_a_network_cut_in_two_is_seen(folder):  # noqa: F811
    trainer = loaded(folder, budget=24)
    batch = near(trainer, make_batch(2))
    trainer.module.layers()[1].register_forward_hook(lambda module, args, out: out.detach())
    metrics = trainer.step(batch, ALONE)
    assert metrics.grad_norm > 0, "the head still learns"
    assert metrics.tokens_reached == (0,) * len(batch.replies)
