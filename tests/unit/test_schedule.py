import pytest

from furlong.ops.policy.schedule import learning_rate
from furlong.ops.spec import AlgorithmSpec


def rates(steps, **settings):
    algorithm = AlgorithmSpec(prompts_per_step=1, samples_per_prompt=2, learning_rate=1.0, **settings)
    return [learning_rate(algorithm, steps, step) for step in range(1, steps + 1)]


def test_constant_after_linear_warmup():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_reaches_the_final_fraction_at_the_last_step():
    assert rates(5, decay="linear", final_lr_fraction=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2], rel=1e-15)
    assert rates(4, warmup_steps=2, decay="linear", final_lr_fraction=0.5) == [0.5, 1.0, 0.75, 0.5]


@pytest.mark.parametrize("warmup", [0, 1])
def test_one_step_run(warmup):
    assert rates(1, warmup_steps=warmup, decay="linear") == [1.0]


def test_warmup_over_the_whole_run():
    assert rates(2, warmup_steps=2, decay="linear") == [0.5, 1.0]


@pytest.mark.parametrize("step", [0, -1, 4])
def test_outside_the_run_is_an_error(step):
    with pytest.raises(ValueError, match="run of 3 steps"):
        learning_rate(AlgorithmSpec(prompts_per_step=1, samples_per_prompt=2, learning_rate=1.0), 3, step)


def test_cosine_by_hand():
    """Half way down in the middle, a quarter of the way in time is (1 - cos 45 degrees) / 2 of the way down."""
    got = rates(5, decay="cosine", final_lr_fraction=0.2)
    assert got == pytest.approx(
        [1.0, 1 - 0.8 * 0.1464466094067262, 0.6, 0.2 + 0.8 * 0.1464466094067262, 0.2], rel=1e-15
    )
    assert rates(4, warmup_steps=2, decay="cosine", final_lr_fraction=0.0) == pytest.approx(
        [0.5, 1.0, 0.5, 0.0], abs=1e-15
    )


@pytest.mark.parametrize("decay", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_decay_never_rises_and_ends_at_the_fraction(decay, warmup):
    got = rates(40, warmup_steps=warmup, decay=decay, final_lr_fraction=0.1)[max(warmup, 1) - 1 :]
    assert got == sorted(got, reverse=True)
    assert (got[0], got[-1]) == pytest.approx((1.0, 0.1))
