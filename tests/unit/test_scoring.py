"""Verdicts of replies."""

import json

import pytest

from furlong.ops.records import Verdict
from furlong.ops.spec import DataSpec, TaskSpec
from furlong.ops.tasks import scoring
from furlong.ops.tasks.families import EXACT, LAST_INTEGER, WHOLE_REPLY
from furlong.ops.tasks.prompts import prompt_rows
from furlong.ops.tasks.scoring import Judgement, extract_integer, score_reply, verifier_version

SUMS = DataSpec(
    tasks=(TaskSpec(name="chain_sum", options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),),
    train_prompts=136,
    eval_prompts=64,
)


@pytest.fixture(scope="module")
def sums() -> list[dict]:
    return prompt_rows(SUMS, 0)


def _with_answer(rows: list[dict], answer: str) -> dict:
    return next(row for row in rows if row["answer"] == answer)


def _item(row: dict, reply: str, finish_reason: str = "stop") -> dict:
    return {**row, "reply": reply, "finish_reason": finish_reason}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", "12"), ("7 + 5 = 12.", "12"), ("-3", "-3"), ("3-5=-2", "-2"), ("3 - 5 = -2", "-2"),
        ("is -2.", "-2"),
        ("3-5", "5"), ("3 - 5", "5"), ("3 -5", "5"), ("(1+2)-5", "5"), ("(1+2) -5", "5"), ("x-5", "5"), ("- 5", "5"),
        ("3 - -2", "-2"), ("(-2)", "-2"), ("=\u22122", "-2"), ("3\u22125", "5"), ("-0", "0"), ("007", "7"),
        ("-007", "-7"),
        ("1,234", "1234"), ("1, 2, 3", "3"), ("12,34", "34"), ("1,2345", "2345"), ("-1,234", "-1234"), ("**8**", "8"),
        ("8\n", "8"), ("1<|im_start|>2", "2"), ("", None), ("twelve", None), ("2.5", None), ("12 or 2.5", None),
        ("2.5 is 3", "3"), ("\u0663", None), ("-", None), ("9" * 5000, "9" * 5000), ("2^-3", "-3"),
    ],
)  # fmt: skip
def test_the_last_integer(text: str, number: str | None) -> None:
    assert extract_integer(text) == number


@pytest.mark.parametrize(
    ("reply", "verdict", "score"),
    [
        ("2", Verdict.CORRECT, 1.0),
        ("The answer is 2.", Verdict.CORRECT, 1.0),
        ("12", Verdict.INCORRECT, 0.0),  # reasoning-gym alone gives 0.5: its partial credit is the overlap of strings
        ("2 then 3", Verdict.INCORRECT, 0.0),
        ("-2", Verdict.INCORRECT, 0.0),
        ("two", Verdict.UNPARSABLE, 0.0),
        ("", Verdict.UNPARSABLE, 0.0),
    ],
)
def test_integer_answers(sums: list[dict], reply: str, verdict: Verdict, score: float) -> None:
    found = score_reply(_item(_with_answer(sums, "2"), reply))
    assert (found["verdict"], found["score"]) == (verdict, score)


def test_negative_answers(sums: list[dict]) -> None:
    row = _with_answer(sums, "-2")
    assert [score_reply(_item(row, reply))["score"] for reply in ("3-5=-2", "-2", "2", "- 2")] == [1.0, 1.0, 0.0, 0.0]


def test_every_question_accepts_its_own_answer_and_no_other(sums: list[dict]) -> None:
    assert len(sums) == 200
    for row in sums:
        assert score_reply(_item(row, f"It is {row['answer']}."))["verdict"] == Verdict.CORRECT
        assert score_reply(_item(row, str(int(row["answer"]) + 1)))["verdict"] == Verdict.INCORRECT


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_reply_that_did_not_end_scores_nothing_even_when_right(sums: list[dict], reason: str) -> None:
    found = score_reply(_item(_with_answer(sums, "2"), "2", reason))
    assert (found["verdict"], found["score"], found["extracted"]) == (Verdict.TRUNCATED, 0.0, "")


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("01349", Verdict.CORRECT),
        (" 01349\n", Verdict.CORRECT),
        ("1349", Verdict.INCORRECT),
        ("01349<pad>", Verdict.INCORRECT),
        ("", Verdict.UNPARSABLE),
    ],
)
def test_exact_answers(reply: str, verdict: Verdict) -> None:
    row = {"verifier": EXACT, "entry": json.dumps({"answer": "01349"})}
    assert score_reply(_item(row, reply))["verdict"] == verdict


def test_word_answers_are_judged_as_a_whole() -> None:
    row = prompt_rows(DataSpec(tasks=(TaskSpec(name="spell_backward"),), train_prompts=1, eval_prompts=1), 0)[0]
    assert row["verifier"] == WHOLE_REPLY
    verdicts = [score_reply(_item(row, reply))["verdict"] for reply in (row["answer"], "no", " ")]
    assert verdicts == [Verdict.CORRECT, Verdict.INCORRECT, Verdict.UNPARSABLE]


@pytest.mark.parametrize("score", [float("nan"), 2.0, -1.0, None, "1"])
def test_a_score_that_is_none_is_refused(score: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "exact", lambda reply, entry: Judgement("x", score))
    with pytest.raises(ValueError, match=r"must return a number in \[0, 1\]"):
        score_reply(_item({"verifier": EXACT, "entry": "{}"}, "x"))


@pytest.mark.parametrize(
    ("verifier", "message"),
    [("no_such_module:f", "No module"), ("json:nothing", "module:function"), ("json", "module:function")],
)
def test_an_unknown_verifier_is_named(verifier: str, message: str) -> None:
    with pytest.raises((ValueError, ModuleNotFoundError), match=message):
        score_reply(_item({"verifier": verifier, "entry": "{}"}, "x"))


def test_an_unknown_finish_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="'done' is not stop, length or abort"):
        score_reply(_item({"verifier": EXACT, "entry": "{}"}, "x", "done"))


def test_the_version_of_a_verifier_is_that_of_its_source(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, body in (("va", "return 1"), ("vb", "return 2")):
        (tmp_path / f"furlong_test_{name}.py").write_text(f"def f(reply, entry):\n    {body}\n")
    versions = {verifier_version(v) for v in (LAST_INTEGER, "furlong_test_va:f", "furlong_test_vb:f")}
    assert len(versions) == 3
    assert verifier_version(LAST_INTEGER) == verifier_version(EXACT)
