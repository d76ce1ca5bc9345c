"""Prompt tables, the order of drawing, and rendering."""

import json
from collections import Counter

import pytest

from furlong.ops import records
from furlong.ops.spec import DataSpec, SpecError, TaskSpec, load_spec
from furlong.ops.tasks.prompts import draw, prompt_rows

SUMS = TaskSpec(name="chain_sum", options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
DIGITS = TaskSpec(name="sort_digits", options={"min_digits": 3, "max_digits": 4})


def _data(*tasks: TaskSpec, train: int = 20, held_out: int = 8) -> DataSpec:
    return DataSpec(tasks=tasks, train_prompts=train, eval_prompts=held_out)


def test_rows_fit_the_table_and_are_reproducible() -> None:
    first, second = (prompt_rows(_data(SUMS, DIGITS), 3) for _ in range(2))
    assert first == second
    assert records.rows("prompts", first).num_rows == 28
    assert prompt_rows(_data(SUMS, DIGITS), 4) != first


def test_splits_share_no_question_and_have_dense_positions() -> None:
    rows = prompt_rows(_data(SUMS, train=136, held_out=64), 0)
    questions = {split: {r["question"] for r in rows if r["split"] == split} for split in ("train", "eval")}
    assert not questions["train"] & questions["eval"]
    assert len({r["prompt_id"] for r in rows}) == len(rows) == 200
    for split, size in (("train", 136), ("eval", 64)):
        assert [r["position"] for r in rows if r["split"] == split] == list(range(size))


def test_every_question_of_a_small_family_is_found_and_training_takes_what_is_left() -> None:
    rows = prompt_rows(_data(SUMS, train=10_000, held_out=64), 1)
    expected = {f"State the final answer to the following arithmetic problem: {a} {s} {b} =" for a in range(10)
                for b in range(10) for s in "+-"}  # fmt: skip
    assert {r["question"] for r in rows} == expected
    assert Counter(r["split"] for r in rows) == {"eval": 64, "train": 136}


def test_prompt_ids_do_not_depend_on_the_seed_but_the_split_does() -> None:
    def by_question(seed: int, key: str) -> dict:
        return {r["question"]: r[key] for r in prompt_rows(_data(SUMS, train=136, held_out=64), seed)}

    assert by_question(0, "prompt_id") == by_question(1, "prompt_id")
    assert by_question(0, "split") != by_question(1, "split")
    assert by_question(0, "dataset") != by_question(1, "dataset")


def test_families_are_mixed_in_equal_parts() -> None:
    rows = prompt_rows(_data(SUMS, DIGITS, train=21, held_out=8), 0)
    counts = Counter((r["split"], r["task"]) for r in rows)
    assert counts == {("eval", "chain_sum"): 4, ("eval", "sort_digits"): 4,
                      ("train", "chain_sum"): 11, ("train", "sort_digits"): 10}  # fmt: skip


def test_a_family_listed_twice_does_not_give_its_questions_twice() -> None:
    rows = prompt_rows(_data(DIGITS, DIGITS, train=40, held_out=20), 0)
    assert len({r["question"] for r in rows}) == len(rows) == 60
    with pytest.raises(SpecError, match="0 distinct questions beyond those of the tasks before it"):
        prompt_rows(_data(SUMS, SUMS, train=400, held_out=20), 0)


def test_too_few_questions_is_an_error_that_counts_them() -> None:
    with pytest.raises(SpecError, match=r"200 distinct questions.*200 held out.*eval_prompts"):
        prompt_rows(_data(SUMS, held_out=200), 0)


def test_an_empty_split_is_an_error() -> None:
    hollow = DataSpec.model_construct(tasks=(DIGITS,), train_prompts=0, eval_prompts=4, system="")
    with pytest.raises(SpecError, match="no train prompts"):
        prompt_rows(hollow, 0)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (TaskSpec(name="chain_sums"), "chain_sums.*not registered"),
        (TaskSpec(name="chain_sum", options={"terms": 2}), "terms"),
        (TaskSpec(name="chain_sum", options={"min_terms": 5, "max_terms": 2}), "max_terms must be >= min_terms"),
        (TaskSpec(name="chain_sum", options={"seed": 1}), "seed"),
        (TaskSpec(name="sort_digits", options={"digits": 3}), "min_digits and max_digits"),
        (TaskSpec(name="sort_digits", options={"min_digits": 7}), "1 <= min_digits <= max_digits"),
        (TaskSpec(name="sort_digits", options={"min_digits": 1.5}), "integers"),
    ],
)
def test_a_wrong_family_or_option_is_named(task: TaskSpec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        prompt_rows(_data(task), 0)


@pytest.mark.parametrize("name", ["products", "gcd", "basic_arithmetic", "chain_sum"])
def test_arithmetic_families_are_answered_by_an_integer(name: str) -> None:
    rows = prompt_rows(_data(TaskSpec(name=name)), 0)
    assert {r["verifier"] for r in rows} == {"furlong.ops.tasks.scoring:last_integer"}
    assert all(json.loads(r["entry"])["item"]["answer"] == r["answer"] for r in rows)


def test_a_family_with_words_for_answers_is_scored_as_a_whole() -> None:
    rows = prompt_rows(_data(TaskSpec(name="spell_backward")), 0)
    assert {r["verifier"] for r in rows} == {"furlong.ops.tasks.scoring:whole_reply"}


@pytest.mark.parametrize(("n", "per_step"), [(10, 4), (7, 7), (5, 8), (1, 3), (136, 8)])
def test_each_epoch_draws_every_prompt_once_across_step_boundaries(n: int, per_step: int) -> None:
    epochs = 3
    steps = -(-epochs * n // per_step)
    stream = [p for step in range(1, steps + 1) for p in draw(n, step, per_step, seed=5)]
    cut = [stream[i * n : (i + 1) * n] for i in range(epochs)]
    assert all(sorted(epoch) == list(range(n)) for epoch in cut)
    assert n < 5 or len({tuple(epoch) for epoch in cut}) == epochs


def test_drawing_depends_on_its_arguments_alone() -> None:
    late = draw(10, 7, 4, 0)
    assert [draw(10, s, 4, 0) for s in (1, 7, 2, 7)][1::2] == [late, late]
    assert draw(10, 7, 4, 1) != late


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_to_draw_from_is_an_error(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        draw(*bad, seed=0)


@pytest.mark.parametrize(("name", "train", "held_out"), [("smollm2", 136, 64), ("tiny", 4096, 200)])
def test_the_specs_that_ship_have_all_the_questions_they_ask_for(name: str, train: int, held_out: int) -> None:
    spec = load_spec(name)
    assert Counter(r["split"] for r in prompt_rows(spec.data, spec.seed)) == {"train": train, "eval": held_out}
