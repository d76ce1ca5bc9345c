"""Verifiers beyond exact ones: numbers, expressions, shapes, several at once, and how a spec asks for them."""

import json
from fractions import Fraction

import pytest

from furlong.ops.records import Verdict
from furlong.ops.spec import SpecError, TaskSpec
from furlong.ops.tasks.families import EXACT, LAST_INTEGER, entries
from furlong.ops.tasks.scoring import Judgement, modules, score_reply
from furlong.ops.tasks.scoring_math import last_number
from furlong.ops.tasks.shaping import VERIFIERS, shaped, split

NUMERIC, MATH = VERIFIERS["numeric"], VERIFIERS["math_verify"]
SHAPE = "furlong.ops.tasks.scoring_shape"
HERE = __name__


def partial(reply: str, entry: dict) -> Judgement:
    """Half marks for anything."""
    return Judgement(reply, 0.5, accepted=entry.get("accepted", True))


def wild(reply: str, entry: dict) -> Judgement:
    return Judgement(reply, entry["score"], accepted=True)


def _score(verifier: str, reply: str, answer: str = "ok", **entry: object) -> dict:
    item = {"verifier": verifier, "entry": json.dumps({"answer": answer, **entry}), "answer": answer, "reply": reply}
    return score_reply({**item, "finish_reason": "stop"})


def _of(verifier: str = EXACT, **entry: object) -> dict:
    return {"verifier": verifier, "entry": {"answer": "ok", **entry}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("-3.5", Fraction(-7, 2)), ("x = 1,234.50", Fraction(2469, 2)), ("1e-3", Fraction(1, 1000)), ("1.", 1),
        ("3-5", 5), (".5", Fraction(1, 2)), ("3-5=-2", -2), ("2 - -7", -7), ("is \u22127", -7),
        ("It is 3.14.", Fraction(157, 50)), ("9" * 5000, None), ("1e" + "9" * 5000, None),
        ("3/4", Fraction(3, 4)), ("is -1/2.", Fraction(-1, 2)), ("4/0", None), ("25/12/2024", 2024), ("3 / 4", 4),
        ("9" * 350, None), ("1e300/1e-300", None),
        ("1,2", 2), ("5 e", 5), ("abc", None), ("", None), ("1e999", None), (".", None), ("e5", 5),
    ],
)  # fmt: skip
def test_the_last_number_is_read_exactly(text: str, value: Fraction | None):
    assert last_number(text) == value


@pytest.mark.parametrize(
    ("reply", "answer", "entry", "verdict"),
    [
        ("It is 3.14", "3.14159", {"tolerance": 0.01}, Verdict.CORRECT),
        ("It is 3.14", "3.14159", {}, Verdict.INCORRECT),
        ("1000001", "1000000", {"tolerance": 1e-6}, Verdict.CORRECT),
        ("1000002", "1000000", {"tolerance": 1e-6}, Verdict.INCORRECT),
        ("0.0000005", "0", {}, Verdict.CORRECT),
        ("0.1", "1e-1", {"tolerance": 0}, Verdict.CORRECT),
        ("-5", "5", {}, Verdict.INCORRECT),
        ("none", "5", {}, Verdict.UNPARSABLE),
    ],
)
def test_numbers_within_a_tolerance(reply: str, answer: str, entry: dict, verdict: Verdict):
    found = _score(NUMERIC, reply, answer, **entry)
    assert (found["verdict"], found["score"]) == (verdict, float(verdict == Verdict.CORRECT))


@pytest.mark.parametrize(("answer", "entry"), [("blue", {}), ("5", {"tolerance": -1})])
def test_a_number_that_cannot_be_compared_is_an_error(answer: str, entry: dict):
    with pytest.raises(ValueError, match=r"set 0 or more|is no number"):
        _score(NUMERIC, "5", answer, **entry)


@pytest.mark.parametrize(
    ("reply", "answer", "verdict"),
    [
        (r"So it is $\frac{1}{2}$.", "0.5", Verdict.CORRECT),
        (r"\boxed{x^2+1}", "$1+x^2$", Verdict.CORRECT),
        (r"\boxed{x^2}", "$1+x^2$", Verdict.INCORRECT),
        ("I do not know", "3", Verdict.UNPARSABLE),
        ("", "3", Verdict.UNPARSABLE),
    ],
)
def test_mathematical_equality(reply: str, answer: str, verdict: Verdict):
    assert _score(MATH, reply, answer)["verdict"] == verdict


@pytest.mark.parametrize("reply", ["$" + "{" * 50 + "$", r"$\frac{1}{$", "9" * 5000, "\x00", r"$\sqrt$"])
def test_whatever_a_policy_writes_has_a_verdict(reply: str):
    """A reply that makes the library raise is no fault of the verifier's, which would cost the run its budget."""
    assert _score(MATH, reply, "3")["verdict"] in (Verdict.UNPARSABLE, Verdict.INCORRECT)


def test_an_answer_without_an_expression_is_an_error():
    with pytest.raises(ValueError, match="finds no expression in the answer"):
        _score(MATH, "3", "blue")


def test_an_expression_that_takes_for_ever_is_a_time_out_not_a_zero():
    from furlong.resources.verifier import VerifierWorker

    def item(reply: str) -> dict:
        return {"verifier": MATH, "entry": "{}", "answer": "3", "reply": reply, "finish_reason": "stop"}

    with VerifierWorker(deadline=4.0) as worker:
        found = worker.score([item("3"), item("$9^{9^{9^{9}}}$ and 9**9**9**9"), item("3")])
    assert [row["verdict"] for row in found] == [Verdict.CORRECT, Verdict.TIMEOUT, Verdict.CORRECT]
    assert found[1]["score"] is None


def test_partial_scores_count_where_a_verifier_says_so():
    assert _score(f"{HERE}:partial", "a") == {"verdict": "correct", "score": 0.5, "extracted": "a", "detail": ""}
    assert _score(f"{HERE}:partial", "a", accepted=False)["verdict"] == Verdict.INCORRECT
    assert _score(f"{HERE}:partial", "a", accepted=None)["score"] == 0.0
    for score in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"number in \[0, 1\]"):
            score_reply(
                {
                    "verifier": f"{HERE}:wild",
                    "entry": json.dumps({"score": score}),
                    "reply": "",
                    "finish_reason": "stop",
                }
            )


@pytest.mark.parametrize(("length", "score"), [(2, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (40, 0.0)])
def test_length_takes_from_the_score_in_a_line(length: int, score: float):
    reply = "ok" + " " * (length - 2)
    found = _score(f"{SHAPE}:length_shaped", reply, of=_of(), free=10, limit=20)
    assert (found["verdict"], found["score"]) == (Verdict.CORRECT, score)
    assert _score(f"{SHAPE}:length_shaped", "no", of=_of(), free=10, limit=20)["score"] == 0.0
    assert _score(f"{SHAPE}:length_shaped", " ", of=_of(), free=10, limit=20)["verdict"] == Verdict.UNPARSABLE


def test_form_takes_a_share_and_can_name_the_answer():
    form = f"{SHAPE}:format_shaped"
    assert _score(form, "ok", of=_of(), pattern="[a-z]+")["score"] == 1.0
    assert _score(form, "ok", of=_of(), pattern="[0-9]+") | {"detail": ""} == {
        "verdict": "incorrect", "score": 0.0, "extracted": "ok", "detail": "",
    }  # fmt: skip
    assert _score(form, "ok", of=_of(), pattern="[0-9]+", otherwise=0.25)["score"] == 0.25
    tagged = r".*<answer>(?P<answer>.*)</answer>"
    assert _score(form, "I think\n<answer>ok</answer>", of=_of(), pattern=tagged)["verdict"] == Verdict.CORRECT
    assert _score(form, "<answer>no</answer>", of=_of(), pattern=tagged)["verdict"] == Verdict.INCORRECT
    assert _score(form, "ok", of=_of(), pattern=tagged)["verdict"] == Verdict.UNPARSABLE


def test_parts_are_weighed():
    parts = [{**_of(), "weight": 3}, {**_of(f"{HERE}:partial"), "weight": 1}]
    both = f"{SHAPE}:composite"
    found = _score(both, "ok", parts=parts)
    assert (found["verdict"], found["score"], found["detail"]) == ("correct", 0.875, "exact 1, partial 0.5")
    assert _score(both, "no", parts=parts)["score"] == 0.125
    assert _score(both, "no", parts=parts)["verdict"] == Verdict.INCORRECT
    assert _score(both, " ", parts=[{**_of(), "weight": 1}])["verdict"] == Verdict.UNPARSABLE
    zero = [{**_of(), "weight": 0}, {**_of(f"{HERE}:partial"), "weight": 1}]
    assert _score(both, "no", parts=zero)["verdict"] == Verdict.CORRECT


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("inf"), 1], []])
def test_weights_that_weigh_nothing_are_an_error(weights: list[float]):
    item = {"verifier": f"{SHAPE}:composite", "reply": "ok", "finish_reason": "stop"}
    parts = [{**_of(), "weight": weight} for weight in weights]
    with pytest.raises(ValueError, match="weights"):
        score_reply({**item, "entry": json.dumps({"parts": parts})})


@pytest.mark.parametrize("settings", [{"free": 5, "limit": 5}, {"free": -1, "limit": 5}])
def test_lengths_without_a_slope_are_an_error(settings: dict):
    with pytest.raises(ValueError, match=r"reward.free < reward.limit"):
        _score(f"{SHAPE}:length_shaped", "ok", of=_of(), **settings)


def test_a_reply_cut_off_scores_nothing_whatever_its_shape():
    item = {"verifier": f"{SHAPE}:composite", "entry": json.dumps({"parts": [{**_of(), "weight": 1}]}), "reply": "ok"}
    assert score_reply({**item, "finish_reason": "length"})["verdict"] == Verdict.TRUNCATED


def _first(**options: object) -> dict:
    return next(entries(TaskSpec(name="sort_digits", options=options), 0))


def test_a_spec_without_rewards_keeps_its_questions_as_they_were():
    plain = _first()
    assert (plain["verifier"], plain["entry"]) == (EXACT, {"answer": plain["answer"]})
    task = TaskSpec(name="sort_digits")
    assert split(task) == (task, {})


def test_a_spec_chooses_and_shapes_its_rewards():
    plain = _first()
    options = {
        "reward.verifier": "0.75 exact, 0.25 numeric", "reward.tolerance": 0.5, "reward.free": 4, "reward.limit": 9,
        "reward.pattern": "[0-9]+", "min_digits": 3,
    }  # fmt: skip
    row = _first(**options)
    assert row["question"] == plain["question"]
    assert row["verifier"] == f"{SHAPE}:length_shaped"
    item = {**row, "entry": json.dumps(row["entry"]), "finish_reason": "stop"}
    assert modules(item) == {SHAPE, "furlong.ops.tasks.scoring", "furlong.ops.tasks.scoring_math"}
    right = score_reply({**item, "reply": plain["answer"]})
    assert right["verdict"] == Verdict.CORRECT
    assert right["score"] == min(1.0, (9 - len(plain["answer"])) / 5)
    assert score_reply({**item, "reply": "a"})["score"] == 0.0
    gym = next(entries(TaskSpec(name="products", options={"min_digits": 2, "reward.verifier": "numeric"}), 0))
    assert gym["verifier"] == NUMERIC
    assert gym["entry"]["options"] == {"min_digits": 2}
    assert next(entries(TaskSpec(name="products"), 0))["verifier"] == LAST_INTEGER
    answered = {**gym, "entry": json.dumps(gym["entry"]), "reply": f"about {gym['answer']}", "finish_reason": "stop"}
    assert score_reply(answered)["verdict"] == Verdict.CORRECT


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"verifier": "exactly"}, "reward.verifier='exactly'"),
        ({"verifier": "nowhere:f"}, "nowhere"),
        ({"verifier": "json:nothing"}, "json:nothing"),
        ({"verifier": "much exact"}, "could not convert"),
        ({"verifier": ""}, "reward.verifier=''"),
        ({"otherwise": 0.5}, "goes with reward.pattern"),
        ({"free": 5}, "go together"),
    ],
)
def test_rewards_that_make_no_sense_are_refused(options: dict, says: str):
    row = {"question": "q", "answer": "a", "verifier": EXACT, "entry": {"answer": "a"}}
    with pytest.raises(SpecError, match=says):
        shaped(row, options)
