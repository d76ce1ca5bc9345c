"""Training unrolls the draft exactly as a decoder with a cache would run it, and learns from the right teachers."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from draft_cases import DEPTHS, LENGTHS, Case, Truth, make, picked

from furlong.kernels.halo import Halo
from furlong.kernels.layout import NOBODY, Rows
from furlong.kernels.ring import Ring
from furlong.ops.draft import module as module_file
from furlong.ops.draft import unroll as unroll_file
from furlong.ops.draft.draft_loss import Pairs
from furlong.ops.draft.gradients import MEASURES, DraftLoss, depth_weights, draft_gradients
from furlong.ops.draft.inputs import DraftInputError, anchor_offsets, local_counts, one_rank
from furlong.ops.draft.module import draft_module
from furlong.ops.draft.unroll import Place, unroll

KINDS = ["eagle3", "block"]
LOSSES = [("ce", 0.5, 0.0), ("tv", 0.5, 1.0), ("mixed", 0.3, 0.3)]
PARTS = {"backend": "reference"}


def solve(case: Case, progress: float = 0.0, inputs=(), counts=None, module=None, **options):
    """Loss, sums and gradients of micro-batches, each on one rank."""
    module = module or draft_module(case.shape, case.tensors)
    counts = case.counts if counts is None else counts
    found = [
        draft_gradients(
            module, part, case.settings, counts, case.embedding, case.head, progress=progress, **(PARTS | options)
        )
        for part in inputs or [case.inputs]
    ]
    total = found[0]
    for more in found[1:]:
        total = total + more
    return total.loss, total.sums, {name: p.grad for name, p in module.named_parameters()}


def distance(found, wanted) -> float:
    """The largest difference of anything."""
    assert found[2].keys() == wanted[2].keys()
    parts = [torch.tensor(found[0] - wanted[0]), found[1] - wanted[1]]
    parts += [found[2][name] - wanted[2][name] for name in wanted[2]]
    worst = [float(part.abs().max()) for part in parts]
    # max() of a list passes over NaN.
    assert all(value == value for value in worst)
    return max(worst)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("loss", "progress", "tv"), LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_a_decoder_with_a_cache(kind, loss, progress, tv, reduced):
    case = make(kind, loss, reduced)
    wanted = Truth(case).solve(tv)
    assert distance(solve(case, progress), wanted) <= 1e-12
    assert torch.equal(wanted[1][0].long(), case.counts)
    assert bool((case.counts > 0).all())
    assert all(bool(grad.abs().max() > 1e-4) for grad in wanted[2].values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_states_are_those_of_incremental_decoding_at_every_depth(kind, backend):
    case = make(kind)
    truth = Truth(case)
    made = unrolled(case, draft_module(case.shape, case.tensors), backend)
    found = {
        (int(depth), int(teacher)): made.states[state]
        for depth, teacher, state in zip(made.pairs.depth, made.pairs.teacher, made.pairs.student, strict=True)
    }
    wanted = {(depth, row): truth.norm("norm", state) for depth, state, row in truth.pairs()}
    assert found.keys() == wanted.keys()
    assert {depth for depth, _ in found} == set(range(DEPTHS))
    for key, state in wanted.items():
        torch.testing.assert_close(found[key], state, rtol=0, atol=1e-12)


def unrolled(case, module, backend="reference"):
    place = Place(one_rank(case.inputs.rows), Ring(None, deadline=10), backend)
    return unroll(module, case.inputs, DEPTHS, case.embedding, place)


def each_step(module, change):
    """Let `change(depth, hidden, position)` give what the layer gets at each depth, and at the main keys, of depth 0."""
    keys, attended, inputs, steps = module.keys, module.attended, module.inputs, {"keys": 0, "attended": 0, "inputs": 0}

    def of(name):
        steps[name] += 1
        return steps[name] - 1

    module.keys = lambda at, x, position: keys(at, x, change(of("keys"), None, position)[1])
    module.inputs = lambda embedded, hidden: inputs(embedded, change(of("inputs"), hidden, None)[0])

    def changed(at, x, hidden, position, attend):
        hidden, position = change(of("attended"), hidden, position)
        return attended(at, x, hidden, position, attend)

    module.attended = changed


def unshifted_mask(monkeypatch, module):
    def teaches(learnt, offsets):
        there = learnt.at[:, list(offsets)] != NOBODY
        return learnt.shift(0, fill=False)[:, None] & there

    monkeypatch.setattr(unroll_file, "_teaches", teaches)


def mask_of_the_row_before(monkeypatch, module):
    original = Halo.shift
    monkeypatch.setattr(
        Halo, "shift", lambda self, n, fill=0: original(self, n - (self.held.dtype == torch.bool), fill)
    )


def rope_of_the_anchor(monkeypatch, module):
    each_step(module, lambda depth, hidden, position: (hidden, None if position is None else position - depth))


def rope_left_out(monkeypatch, module):
    monkeypatch.setattr(module_file, "rotated", lambda x, position, theta: x)


def detached_between_depths(monkeypatch, module):
    def change(depth, hidden, position):
        return hidden.detach() if depth and hidden is not None else hidden, position

    each_step(module, change)


def teacher_off_by_one(monkeypatch, module):
    original = unroll_file._pairs

    def shifted(at, on):
        pairs = original(at, on)
        return Pairs(pairs.student, (pairs.teacher - 1).clamp(min=0), pairs.depth)

    monkeypatch.setattr(unroll_file, "_pairs", shifted)


def own_branch_unseen(monkeypatch, module):
    original = unroll_file.test_time_training
    monkeypatch.setattr(
        unroll_file,
        "test_time_training",
        lambda rows, depth: replace(original(rows, depth), sees=torch.zeros(1, depth, dtype=torch.bool)),
    )


def token_off_by_one(monkeypatch, module):
    original = Halo.shift
    monkeypatch.setattr(
        Halo, "shift", lambda self, n, fill=0: original(self, n - (self.held.dtype == torch.int64), fill)
    )


MUTANTS = [
    unshifted_mask, mask_of_the_row_before, rope_of_the_anchor, rope_left_out, detached_between_depths,
    teacher_off_by_one, own_branch_unseen, token_off_by_one,
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant, monkeypatch):
    case = make(lengths=(11, 8))
    # Prompts of six tokens, then drawn ones; so no mutant learns more tokens than were counted, which would be refused.
    case = replace(case, inputs=replace(case.inputs, trained=case.inputs.rows.position >= 5))
    wanted = Truth(case).solve()
    assert distance(solve(case), wanted) <= 1e-12
    module = draft_module(case.shape, case.tensors)
    mutant(monkeypatch, module)
    found = distance(solve(case, module=module), wanted)
    assert found > 1e-3


def test_what_a_depth_says_depends_on_its_rotary_position(monkeypatch):
    case = make()
    right = unrolled(case, draft_module(case.shape, case.tensors)).states
    module = draft_module(case.shape, case.tensors)
    rope_of_the_anchor(monkeypatch, module)
    wrong = unrolled(case, module).states
    moved = (right - wrong).abs().amax(1).view(DEPTHS, -1).amax(1)
    assert moved[0] == 0
    assert bool((moved[1:] > 1e-3).all())


@pytest.mark.parametrize("kind", KINDS)
def test_packing_changes_nothing(kind):
    """Documents in one line, in any order and with padding between, or in micro-batches of their own."""
    case = make(kind, "mixed")
    whole = solve(case, 0.4)
    total = len(case.inputs.tokens)
    order = torch.cat([torch.randperm(total, generator=torch.Generator().manual_seed(2)), torch.full((5,), NOBODY)])
    order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(3))]
    assert distance(solve(case, 0.4, [picked(case.inputs, order)]), whole) <= 1e-12
    edges = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    parts = [
        replace(
            picked(case.inputs, torch.arange(start, end), torch.zeros(end - start, dtype=torch.int64)),
            offsets=case.inputs.offsets[n : n + 1],
        )
        for n, (start, end) in enumerate(itertools.pairwise(edges))
    ]
    counts = sum(local_counts(part, case.shape, DEPTHS) for part in parts)
    assert torch.equal(counts, case.counts)
    assert distance(solve(case, 0.4, parts, counts), whole) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_the_loss_change_nothing(kind):
    case = make(kind, "mixed", reduced=True)
    assert distance(solve(case, 0.4, logit_bytes=3 * 17 * 8), solve(case, 0.4)) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_documents_do_not_know_of_each_other(kind):
    case = make(kind)
    first = torch.arange(len(case.inputs.tokens)) < LENGTHS[0]
    other = replace(
        case.inputs, tokens=torch.where(first, 5, case.inputs.tokens), taps=case.inputs.taps * (1.0 + first[:, None])
    )
    module = draft_module(case.shape, case.tensors)
    before, after = (unrolled(replace(case, inputs=inputs), module) for inputs in (case.inputs, other))
    rest = before.pairs.student[before.pairs.teacher >= LENGTHS[0]]
    assert len(rest)
    assert torch.equal(before.states[rest], after.states[rest])
    assert not torch.equal(before.states, after.states)


@pytest.mark.parametrize("kind", KINDS)
def test_only_drawn_tokens_teach(kind):
    case = make(kind)
    blind = replace(case.inputs, final=case.inputs.final.masked_fill(~case.inputs.trained[:, None], float("nan")))
    assert distance(solve(case, inputs=[blind]), solve(case)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_the_draft_gets_a_gradient_and_no_random_state_moves(kind):
    case = make(kind)
    for tensor in (case.embedding, case.head, case.inputs.taps, case.inputs.final):
        tensor.requires_grad_()
    kept = [tensor.detach().clone() for tensor in (case.embedding, case.head, case.inputs.taps, case.inputs.final)]
    states = torch.get_rng_state(), np.random.get_state()
    _, _, grads = solve(case)
    anchor_offsets(1, 2, ["a", "b"], 4)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1][1])
    for tensor, before in zip((case.embedding, case.head, case.inputs.taps, case.inputs.final), kept, strict=True):
        assert tensor.grad is None
        assert torch.equal(tensor, before)
    assert all(grad is not None for grad in grads.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_inputs_give_the_same_bits(kind):
    case = make(kind)
    assert distance(solve(case), solve(case)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_says_why_and_computes_nothing(kind):
    case = make(kind)
    none = replace(case.inputs, trained=torch.zeros_like(case.inputs.trained))
    module = draft_module(case.shape, case.tensors)
    counts = local_counts(none, case.shape, DEPTHS)
    found = draft_gradients(module, none, case.settings, counts, case.embedding, case.head, **PARTS)
    assert found.loss == 0
    assert found.reason == "no token to learn in this step"
    assert not found.sums.any()
    assert found.means() == {name: [] for name in MEASURES[1:]}
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_with_nothing_of_its_own_adds_zero(kind, rows):
    """No rows, one padding row, or rows that teach nothing, while others have tokens to learn."""
    case = make(kind)
    at = torch.full((rows,), NOBODY) if rows < 2 else torch.arange(rows)
    part = replace(picked(case.inputs, at), trained=torch.zeros(rows, dtype=torch.bool))
    loss, sums, grads = solve(case, inputs=[part])
    assert loss == 0
    assert not sums.any()
    assert all(grad is not None and not grad.any() for grad in grads.values())


def test_a_depth_that_nobody_learns_is_left_out():
    case = make(lengths=(3, 2))
    case = replace(case, inputs=replace(case.inputs, trained=torch.ones(5, dtype=torch.bool)))
    assert case.counts.tolist() == [3, 1, 0, 0]
    wanted = Truth(case).solve()
    assert distance(solve(case), wanted) <= 1e-12
    assert depth_weights(case.counts, 0.5).tolist() == pytest.approx([1 / 1.5 / 3, 0.5 / 1.5, 0, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_policies_of_less_precision_teach_a_draft_of_more(kind):
    """bfloat16 states have 8 bits: a loss near 3 moves by some hundredths."""
    case = make(kind)
    module = draft_module(case.shape, case.tensors, torch.float32)
    part = replace(case.inputs, taps=case.inputs.taps.bfloat16(), final=case.inputs.final.bfloat16())
    found = draft_gradients(
        module, part, case.settings, case.counts, case.embedding.bfloat16(), case.head.bfloat16(), backend="cpu"
    )
    assert found.loss == pytest.approx(solve(case)[0], rel=0.05)
    assert all(p.grad.dtype == torch.float32 and bool(torch.isfinite(p.grad).all()) for p in module.parameters())


def test_results_add_up():
    parts = [DraftLoss(1.0, torch.full((5, 2), n)) for n in (1.0, 3.0)]
    total = parts[0] + parts[1] + DraftLoss(0.0, torch.zeros(5, 2), "nothing")
    assert total.loss == 2.0
    assert not total.reason
    assert total.means()["ce"] == [1.0, 1.0]
    none = DraftLoss(0.0, torch.zeros(5, 2), "nothing")
    assert (none + none).reason == "nothing"


def test_offsets_of_anchors_are_even_and_depend_on_their_document_alone():
    names = [f"trajectory {n}" for n in range(2000)]
    drawn = anchor_offsets(0, 1, names, 4)
    # 4 sigma of a binomial of 2,000 and 1/4 are 77.
    assert (torch.bincount(drawn, minlength=4) - 500).abs().max() < 77
    assert torch.equal(anchor_offsets(0, 1, names[::-1], 4), drawn.flip(0))
    assert not torch.equal(anchor_offsets(0, 2, names, 4), drawn)
    assert not torch.equal(anchor_offsets(1, 1, names, 4), drawn)


def test_blocks_learn_every_token_after_the_first_anchor_once():
    case = make("block")
    case = replace(case, inputs=replace(case.inputs, trained=torch.ones_like(case.inputs.trained)))
    module = draft_module(case.shape, case.tensors)
    teachers = unrolled(case, module).pairs.teacher
    rows = case.inputs.rows
    after = (rows.position >= case.inputs.offsets[rows.document]).nonzero().flatten()
    assert torch.equal(teachers, after)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, "tokens is"),
        ({"taps": torch.zeros(31, 12)}, "taps is"),
        ({"final": torch.zeros(30, 12)}, "final is"),
        ({"trained": torch.ones(31)}, "boolean"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"rows": Rows(torch.zeros(31, dtype=torch.int64), torch.zeros(31, dtype=torch.int64))}, "twice"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(wrong, says):
    case = make()
    assert len(case.inputs.tokens) == 31
    with pytest.raises(DraftInputError, match=says):
        solve(case, inputs=[replace(case.inputs, **wrong)])


def test_counts_and_ranks_that_do_not_fit_are_refused():
    case = make()
    with pytest.raises(DraftInputError, match="local_counts"):
        solve(case, counts=torch.ones(DEPTHS + 1, dtype=torch.int64))
    with pytest.raises(DraftInputError, match="were counted"):
        solve(case, counts=torch.ones(DEPTHS, dtype=torch.int64))
    with pytest.raises(DraftInputError, match="belong together"):
        solve(case, ring=Ring(None, deadline=1))
    block = make("block")
    with pytest.raises(DraftInputError, match="anchor_offsets"):
        solve(block, counts=block.counts, inputs=[replace(block.inputs, offsets=None)])
