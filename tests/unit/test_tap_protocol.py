"""TapChannel's protocol: every reachable state of a model of it, the numbers of slots, and the header."""

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from tap_model import Model, operations, run_ahead

from furlong.kernels.tap_protocol import (
    DATA,
    EMBEDDING,
    FINAL,
    HEADER_BYTES,
    Header,
    TapError,
    TapKey,
    by_stage,
    digest,
    slots_needed,
    slots_per_stage,
)

# stages, chunks per stage, micro-batches, what each source taps
PIPELINES = [
    (2, 1, 4, {0: (0,)}),
    (3, 1, 6, {0: (0,), 1: (0,)}),
    (4, 1, 6, {0: (0,), 1: (0,), 2: (0,)}),
    (4, 1, 8, {1: (0,)}),
    (2, 2, 6, {0: (0,)}),
    (2, 2, 6, {0: (0, 1)}),
    (2, 3, 6, {0: (0, 2)}),
    (3, 2, 6, {0: (0, 1), 1: (0,)}),
    (4, 2, 8, {0: (0, 1), 2: (0,)}),
]


def slots(stages: int, virtual: int) -> tuple[int, ...]:
    return slots_per_stage(stages, virtual, "1f1b" if virtual == 1 else "interleaved")


@pytest.mark.parametrize(("stages", "virtual", "micro_batches", "taps"), PIPELINES)
@pytest.mark.parametrize("landing", [1, 2])
def test_no_put_waits_and_nothing_deadlocks_in_any_reachable_state(stages, virtual, micro_batches, taps, landing):
    # The model itself asserts bounded slots and delivery by key in each state.
    model = Model(stages, virtual, micro_batches, taps, slots(stages, virtual), landing)
    states, stuck = model.explore()
    assert states > 30
    assert not stuck
    assert not model.waits


@pytest.mark.parametrize(("stages", "virtual", "micro_batches", "taps"), PIPELINES)
def test_one_slot_fewer_makes_put_wait(stages, virtual, micro_batches, taps):
    for source in taps:
        fewer = list(slots(stages, virtual))
        fewer[source] -= 1
        model = Model(stages, virtual, micro_batches, taps, tuple(fewer))
        _, stuck = model.explore()
        assert model.waits == {source}
        assert not stuck


def test_too_few_slots_for_a_whole_group_deadlock_an_interleaved_schedule():
    model = Model(3, 2, 6, {0: (0,)}, (1, 3, 3), landing=1)
    _, stuck = model.explore()
    assert stuck
    assert model.waits == {0}


@pytest.mark.parametrize(("stages", "virtual"), [(3, 1), (2, 2)])
def test_gradients_come_in_time_if_they_leave_before_the_pipelines_own(stages, virtual):
    model = Model(stages, virtual, 6, {0: (0,)}, slots(stages, virtual), projected=True)
    _, stuck = model.explore()
    assert not model.waits
    assert not stuck
    late = Model(stages, virtual, 6, {0: (0,)}, slots(stages, virtual), projected=True, release_late=1)
    _, stuck = late.explore()
    assert late.waits == {0}


def test_the_second_landing_slot_is_what_a_late_release_needs():
    for landing, expected in ((1, True), (2, False)):
        model = Model(3, 1, 6, {0: (0,)}, slots(3, 1), landing, release_late=1)
        _, stuck = model.explore()
        assert bool(stuck) == expected
        assert not model.waits or stuck


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_slots_are_the_run_ahead_of_every_stage(stages, virtual):
    for stage in range(stages):
        ahead = run_ahead(stages, stage, virtual, 4 * stages)
        assert slots(stages, virtual)[stage] == ahead
        assert all(run_ahead(stages, stage, virtual, 4 * stages, chunk) <= ahead for chunk in range(virtual))
    assert slots(stages, virtual)[0] == (stages if virtual == 1 else 2 * stages - 1)


@pytest.mark.parametrize("group", [4, 5, 8])
def test_slots_follow_the_size_of_an_interleaved_group(group):
    for stage in range(4):
        assert slots_needed(4, stage, 2, "interleaved", group) == run_ahead(4, stage, 2, 4 * group, group=group)


def test_the_models_order_is_megatrons():
    """The warm-up and the table of the library itself, for shapes that the model is used with."""

    class Group:
        def __init__(self, stages: int, stage: int):
            self.size, self.rank = lambda: stages, lambda: stage

    class Communicator:
        def __init__(self, stages: int, stage: int, virtual: int | None):
            self.pp_group, self.virtual_pipeline_model_parallel_size = Group(stages, stage), virtual

    for stages, virtual, micro_batches, group in [
        (2, 1, 4, 2),
        (4, 1, 6, 4),
        (2, 2, 6, 2),
        (4, 3, 8, 4),
        (4, 2, 10, 5),
    ]:
        for stage in range(stages):
            where = Communicator(stages, stage, None if virtual == 1 else virtual)
            total, _, ahead, _ = schedules.get_pp_rank_microbatches(
                micro_batches, virtual, group, p2p_communicator=where
            )
            order = operations(stages, stage, virtual, micro_batches, group)
            assert len(order) == 2 * total
            assert [kind for kind, *_ in order[: ahead + 2]] == (["F"] * (ahead + 1) + ["B"])[: ahead + 2]
            table = schedules.get_schedule_table(micro_batches, virtual, group)
            assert [(m, c) for kind, c, m in order if kind == "F"] == table
            assert [(m, virtual - 1 - c) for kind, c, m in order if kind == "B"] == table


def test_slots_of_schedules_that_do_not_exist_are_refused():
    assert slots_needed(1, 0, 1, "none") == 1
    for wrong in [
        (2, 2, 1, "1f1b"),
        (2, 0, 2, "1f1b"),
        (2, 0, 1, "interleaved"),
        (2, 0, 1, "none"),
        (2, 0, 1, "gpipe"),
    ]:
        with pytest.raises(ValueError, match=r"schedule|stage"):
            slots_needed(*wrong)
    with pytest.raises(ValueError, match="smaller than 4 stages"):
        slots_needed(4, 0, 2, "interleaved", group=3)


def test_headers_come_back_as_written():
    for header in (
        Header(DATA, 7, 3, 1, 5, 16, torch.bfloat16, (EMBEDDING, 4, FINAL), (-(2**63), 0, 2**63 - 1)),
        Header(DATA, 2**40, 0, 0),
    ):
        message = torch.empty(HEADER_BYTES + 8, dtype=torch.uint8)
        header.write(message)
        assert Header.read(message) == header
    with pytest.raises(TapError, match="no tap message"):
        Header.read(torch.zeros(HEADER_BYTES, dtype=torch.uint8))


def test_digests_see_every_byte():
    x = torch.randn(3, 4, dtype=torch.float32).bfloat16()
    expected = digest(x)
    assert digest(x.clone()) == expected
    for place in range(x.numel() * 2):
        other = x.clone()
        other.view(-1).view(torch.uint8)[place] ^= 1
        assert digest(other) != expected


def test_keys_and_stages_sort_by_layer():
    assert sorted([TapKey(0, 0, FINAL), TapKey(0, 0, 3), TapKey(0, 0, EMBEDDING)])[0].layer == EMBEDDING
    assert by_stage({FINAL: 1, 2: 0, EMBEDDING: 0, 9: 1}, 2) == [(EMBEDDING, 2), (9, FINAL)]
    with pytest.raises(ValueError, match="no stage"):
        by_stage({1: 2}, 2)
    with pytest.raises(ValueError, match="more than 11"):
        by_stage(dict.fromkeys(range(12), 0), 1)
