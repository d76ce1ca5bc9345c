"""The cost model on simulated machines: it finds what pays, keeps what it found, and costs little where nothing pays."""

import itertools
import random

import pytest

from furlong.ops.draft.cost import BURST, FIRST_PROBE, LAST_PROBE, CostModel, StepSeconds
from furlong.ops.spec import SpecError

K = 4


class Machine:
    """Decodes batches: a step's policy forward takes `base + row` seconds for each of b (k + 1) rows, the draft's passes
    `draft` each; proposals of every depth are kept with one chance."""

    def __init__(self, model, row, chance, noise=0.0, seed=0, base=1.0, draft=0.05):
        self.model, self.row, self.chance, self.base, self.draft = model, row, chance, base, draft
        self.random, self.noise = random.Random(seed), noise
        self.seconds = self.tokens = 0.0
        self.decisions = []

    def take(self, rows):
        return (self.base + self.row * rows) * (1 + self.noise * self.random.uniform(-1, 1))

    def step(self, replies):
        decision = self.model.decide(replies)
        self.decisions.append(decision)
        k = decision.proposals
        spent = StepSeconds(self.take(replies * (k + 1)), self.draft if k else 0.0, self.draft * k)
        kept = [self.kept(k) for _ in range(replies)]
        if k:
            self.model.verified([k] * replies, kept)
        self.model.stepped(replies, k, spent)
        self.seconds += spent.total
        self.tokens += replies + sum(kept)

    def kept(self, k):
        count = 0
        while count < k and self.random.random() < self.chance:
            count += 1
        return count

    def run(self, replies, steps):
        """Tokens per second."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(steps):
            self.step(replies)
        return (self.tokens - tokens) / (self.seconds - seconds)

    def best(self, replies):
        """Tokens per second of the best number of proposals, and which it is, by the formula."""
        speeds = []
        for k in range(K + 1):
            spent = self.base + self.row * replies * (k + 1) + (self.draft * (k + 1) if k else 0)
            speeds.append(replies * sum(self.chance**d for d in range(k + 1)) / spent)
        return max(speeds), speeds.index(max(speeds))


@pytest.mark.parametrize("row", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("chance", [0.05, 0.4, 0.9])
@pytest.mark.parametrize("replies", [1, 4, 16])
def test_it_comes_near_the_best_choice(row, chance, replies):
    """After the first measurements, within 8 %: 5 that a change must bring, and probes. Noise of 3 %."""
    machine = Machine(CostModel(K), row, chance, noise=0.03, seed=replies)
    machine.run(replies, 200)
    assert machine.run(replies, 1000) > 0.92 * machine.best(replies)[0]


def test_where_nothing_pays_it_costs_less_than_two_percent():
    machine = Machine(CostModel(K), row=0.5, chance=0.1)
    machine.run(16, 2 * BURST)
    plain = 16 / machine.take(16)
    assert machine.run(16, 3000) > 0.98 * plain
    counts = {why: sum(d.why == why for d in machine.decisions) for why in ("measure", "probe", "costs")}
    assert counts["measure"] == 2 * BURST
    assert 0 < counts["probe"] < 0.02 * 3000
    assert counts["costs"] == len(machine.decisions) - counts["measure"] - counts["probe"]


def test_batches_are_decided_apart():
    """One reply alone leaves the processor idle; sixteen do not."""
    machine = Machine(CostModel(K), row=0.2, chance=0.7)
    for _ in range(60):
        machine.step(1)
        machine.step(16)
    assert machine.model.decide(1).proposals > 0
    assert machine.model.decide(1).why == "pays"
    assert machine.model.decide(16).proposals == 0
    assert machine.model.decide(16).why == "costs"


@pytest.mark.parametrize("told", [True, False])
def test_it_switches_on_when_the_draft_has_learnt_and_off_when_it_has_fallen_behind(told):
    """Sooner if it is told that the weights are new, at the latest after a probe or two."""
    machine = Machine(CostModel(K), row=0.05, chance=0.02)
    machine.run(2, 3000)
    assert machine.model.decide(2).proposals == 0
    machine.chance = 0.8
    if told:
        machine.model.renewed()
    machine.run(2, 4 * FIRST_PROBE if told else 6 * LAST_PROBE)
    assert machine.model.decide(2).proposals > 0
    machine.chance = 0.02
    machine.run(2, 300)
    assert machine.model.decide(2).proposals == 0


def test_it_sees_that_the_machine_has_changed():
    machine = Machine(CostModel(K), row=0.0, chance=0.6)
    machine.run(4, 300)
    assert machine.model.decide(4).proposals >= K - 1
    machine.row = 2.0
    machine.run(4, 3 * LAST_PROBE)
    assert machine.model.decide(4).proposals == 0
    machine.row = 0.0
    machine.run(4, 3 * LAST_PROBE)
    assert machine.model.decide(4).proposals > 0


def test_a_small_gain_is_no_reason_to_change():
    """Where on and off are as fast, noise does not make it change back and forth: one proposal gives 1.5 tokens in 1.5
    seconds."""
    machine = Machine(CostModel(1), row=0.0, chance=0.5, noise=0.02, draft=0.25)
    machine.run(64, 3000)
    steady = [d.proposals for d in machine.decisions if d.why not in ("measure", "probe")]
    assert sum(a != b for a, b in itertools.pairwise(steady)) <= 4
    assert any(d.why == "held" for d in machine.decisions)


def test_one_slow_step_changes_nothing():
    machine = Machine(CostModel(K), row=0.02, chance=0.8)
    machine.run(2, 300)
    before = machine.model.decide(2)
    machine.model.stepped(2, before.proposals, StepSeconds(500.0))
    machine.model.stepped(2, 0, StepSeconds(0.0))
    assert machine.model.decide(2).proposals == before.proposals


def test_the_same_calls_give_the_same_decisions():
    machines = [Machine(CostModel(K), row=0.05, chance=0.5, noise=0.2, seed=3) for _ in range(2)]
    for machine in machines:
        for step in range(600):
            machine.step(1 + step % 9)
            machine.model.decide(1 + step % 9)  # asking changes nothing
    assert machines[0].decisions == machines[1].decisions


def test_fixed_is_always_on():
    machine = Machine(CostModel(K, fixed=True), row=5.0, chance=0.0)
    machine.run(16, 200)
    assert {(d.proposals, d.why) for d in machine.decisions} == {(K, "fixed")}


def test_acceptance_is_that_of_proposals_whose_predecessors_were_kept():
    model = CostModel(3)
    assert model.acceptance() == [0.0, 0.0, 0.0]
    assert model.expected(3) == 1.0
    model.verified([3, 3, 1, 0], [3, 1, 0, 0])
    assert model.acceptance() == [2 / 3, 1 / 2, 1.0]
    assert model.expected(2) == pytest.approx(1 + 2 / 3 + 2 / 3 * 1 / 2)
    for _ in range(400):
        model.verified([2], [1])
    assert model.acceptance()[:2] == pytest.approx([1.0, 0.0], abs=1e-2)


def test_medians_are_of_the_parts():
    model = CostModel(2)
    for policy, extend, propose in ((3.0, 0.1, 9.0), (1.0, 0.3, 7.0), (2.0, 0.2, 8.0)):
        assert model.seconds(5, 2) is None
        model.stepped(5, 2, StepSeconds(policy, extend, propose))
    assert model.seconds(8, 2) == StepSeconds(2.0, 0.2, 8.0)  # five to eight replies are taken together
    assert model.seconds(9, 2) is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1e-9])
def test_what_no_clock_shows_is_an_error(wrong):
    for seconds in (StepSeconds(wrong), StepSeconds(1.0, wrong), StepSeconds(1.0, 0.0, wrong)):
        with pytest.raises(ValueError, match="was not measured"):
            CostModel(2).stepped(1, 0, seconds)


def test_what_cannot_be_is_an_error():
    with pytest.raises(SpecError, match="nothing to verify"):
        CostModel(0)
    for proposed, accepted in (([2], [3]), ([2], [-1]), ([2, 2], [1])):
        with pytest.raises(ValueError, match="cannot have been kept"):
            CostModel(4).verified(proposed, accepted)
