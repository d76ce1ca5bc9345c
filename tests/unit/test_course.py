"""Which prompts come next, and how many groups may be under way."""

from hypothesis import given
from hypothesis import strategies as st

from furlong.ops.rollouts.course import Course, Reservation, attempt_of, room


def test_a_synchronous_run_draws_each_steps_own_prompts_in_order():
    course = Course()
    for step in (1, 2, 3):
        made = course.reserve(4, step, 1, ahead=0, per_step=4, bound=0)
        assert made == [Reservation(step, 1, index, 4 * (step - 1) + index) for index in range(4)]


def test_groups_begun_ahead_belong_to_later_steps_but_none_beyond_the_bound():
    made = Course().reserve(9, 5, 1, ahead=1, per_step=3, bound=2)
    assert [r.step for r in made] == [5, 5, 6, 6, 6, 7, 7, 7, 7]
    assert [r.index for r in made] == [0, 1, 0, 1, 2, 0, 1, 2, 3]


def test_a_repeated_step_takes_the_prompts_given_back_and_numbers_its_own_groups():
    course = Course()
    first = course.reserve(3, 1, 1, ahead=0, per_step=3, bound=0)
    for reservation in first:
        course.give_back(reservation.position)
    again = course.reserve(3, 1, 2, ahead=0, per_step=3, bound=0)
    assert [(r.attempt, r.index, r.position) for r in again] == [(2, 0, 0), (2, 1, 1), (2, 2, 2)]
    assert course.reserve(1, 2, 1, ahead=0, per_step=3, bound=0)[0].position == 3
    assert again[0].group_id("run-7") == "run-7-00001.2-g000"
    assert attempt_of(again[0].group_id("run-7")) == 2


def test_what_was_drawn_is_read_back_from_rows():
    course, rows = Course(), []
    for step in (1, 2):
        made = course.reserve(3, step, 1, ahead=0, per_step=3, bound=0)
        rows += [{"step": r.step, "attempt": r.attempt, "position": r.position} for r in made]
    course.give_back(4)
    again = Course.of(rows, [4])
    assert again == course
    assert again.reserve(2, 3, 1, 0, 3, 0) == course.reserve(2, 3, 1, 0, 3, 0)


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(1, 4), st.integers(0, 3))
def test_no_position_is_drawn_twice_unless_it_was_given_back(counts, per_step, bound):
    course, held, ever = Course(), set(), set()
    for step, count in enumerate(counts, 1):
        for reservation in course.reserve(count, step, 1, len(held), per_step, bound):
            assert reservation.position not in held
            held.add(reservation.position)
            ever.add(reservation.position)
        if held and step % 2:
            position = max(held)
            held.discard(position)
            course.give_back(position)
    assert ever == set(range(course.fresh)), "no prompt is left out"


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 3), st.floats(1, 3))
def test_what_is_begun_never_exceeds_the_bound_nor_what_the_run_needs(steps, per_step, bound, oversample):
    """Play the whole course: fill up, train the oldest batch, publish, again."""
    begun = trained = 0
    for step in range(1, steps + 1):
        more = room(begun, begun, step, steps, per_step, bound, oversample)
        begun += more
        assert begun >= per_step, "the step can be taken"
        assert begun <= per_step * (bound + 1) * oversample + 1
        trained += per_step
        begun -= per_step
        # While the step is trained its own groups are still under way, as their weights are not published.
        assert room(begun + per_step, begun, step + 1, steps, per_step, bound, oversample) >= 0
    if oversample == 1:
        assert begun == 0, "nothing is drawn that no step needs"


def test_a_synchronous_run_begins_nothing_while_a_step_trains():
    assert room(begun=4, unadmitted=0, step=2, steps=9, per_step=4, bound=0, oversample=1.0) == 0
    assert room(begun=4, unadmitted=0, step=2, steps=9, per_step=4, bound=1, oversample=1.0) == 4
