"""A policy made from nothing that knows how a conversation with a calculator goes, faults included."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from furlong.ops.envs.make import make_env
from furlong.ops.policy.bootstrap import END, IGNORED, PAD, encode_turns, make_scratch
from furlong.ops.policy.bootstrap_tools import AFTER_CALL, ALPHABET, BEFORE_CALL, ROLES, check_tools, converse
from furlong.ops.sessions.parse import parse_reply
from furlong.ops.sessions.template import ChatTemplate
from furlong.ops.spec import DataSpec, EnvSpec, ScratchSpec, SpecError, TaskSpec, load_spec
from furlong.ops.tasks.prompts import prompt_rows
from furlong.ops.tasks.render import load_tokenizer

TOOLS = EnvSpec(name="tools", options={"tools": "calculator"})
DATA = DataSpec(tasks=(TaskSpec(name="long_arithmetic"),), train_prompts=64, eval_prompts=8, env=TOOLS)
SHAPE = ScratchSpec(
    config={
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
    },
    sft={"steps": 2, "batch": 8},
)
ROW = {"question": "12x34", "answer": "408", "entry": json.dumps({"answer": "408", "expression": "12*34"})}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder: Path = tmp_path_factory.mktemp("model")
    make_scratch(SHAPE, DATA, 0, folder, "float32")
    return ChatTemplate(load_tokenizer(folder))


def test_faults_are_as_frequent_as_asked_and_of_four_kinds():
    rng = random.Random(0)
    found = Counter()
    for _ in range(4000):
        turns = converse("", ROW, 0.6, rng)
        if len(turns) == 1:
            found["no call"] += 1
            assert len(turns[0][1]) == 3
            continue
        expression, result = "".join(turns[0][1][1:-1]), "".join(turns[1][0][1:-2])
        answer = "".join(turns[1][1])
        if expression != "12*34":
            found["sign" if expression[2] != "*" else "digit"] += 1
            assert answer == result != "408"
        else:
            assert result == "408"
            found["none" if answer == result else "copy"] += 1
    assert set(found) == {"none", "no call", "sign", "digit", "copy"}
    assert abs(found["none"] / 4000 - 0.4) < 0.03  # 4 standard errors of 0.008
    assert all(abs(found[kind] / 4000 - 0.15) < 0.025 for kind in ("no call", "sign", "digit", "copy"))


def test_without_noise_every_demonstration_earns_the_reward():
    rng = random.Random(1)
    for row in prompt_rows(DATA, 0):
        turns = converse("", row, 0.0, rng)
        assert len(turns) == 2
        assert "".join(turns[1][1]) == row["answer"]


def test_demonstrations_are_what_the_template_and_the_environment_make(template: ChatTemplate):
    """Token by token: what the policy learns to follow is what it will be given."""
    env = make_env(DATA.model_copy(update={"system": "Use it."}), lambda code, seconds: "")
    for row in prompt_rows(DATA, 0)[:20]:
        turns = converse("Use it.", row, 0.0, random.Random(0))
        tokens = [t for given, reply in turns for t in (*given, *reply, END)]
        call, answer = ("".join(reply) for _, reply in turns)
        reply = parse_reply(call, "0")
        said = [*env.begin(row), reply]
        observed = env.episode(row, 0).step(reply, 1.0)
        said += [*observed.messages, {"role": "assistant", "content": answer}]
        assert template.text(said, env.tools, prompt=False) == "".join(tokens)
        assert template.encode("".join(tokens)) == [template.tokenizer.encoder.token_to_id(t) for t in tokens]
        first = len(turns[0][0])
        assert template.prompt_ids(env.begin(row), env.tools) == template.encode("".join(tokens))[:first]


def test_a_call_is_three_special_parts_and_its_digits(template: ChatTemplate):
    assert len(template.encode(f"{BEFORE_CALL}12*34{AFTER_CALL}")) == 7
    assert template.decode(template.encode("".join(ROLES) + PAD)) == "".join(ROLES) + PAD
    assert len(template.encode(ALPHABET)) == len(ALPHABET)
    assert template.stop_ids == {1}


def test_replies_and_their_ends_alone_carry_loss():
    vocabulary = {token: n for n, token in enumerate([PAD, END, "a", "b", "c"])}
    inputs, labels = encode_turns([[(["a"], ["b"]), (["c", "c"], ["a", "b"])], [(["a", "b"], ["c"])]], vocabulary)
    assert inputs.tolist() == [[2, 3, 1, 4, 4, 2, 3], [2, 3, 4, 0, 0, 0, 0]]
    i = IGNORED
    assert labels.tolist() == [[3, 1, i, i, 2, 3, 1], [i, 4, 1, i, i, i, i]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tasks": (TaskSpec(name="sort_digits"),)}, "long_arithmetic, not on sort_digits"),
        ({"env": EnvSpec(name="tools", options={"tools": "python"})}, "name it in data.env.options.tools"),
        ({"system": "R\u00e9ponds"}, "knows no"),
    ],
)
def test_what_it_cannot_be_taught_is_refused(change: dict, says: str):
    data = DATA.model_copy(update=change)
    with pytest.raises(SpecError, match=says):
        check_tools(data, prompt_rows(data, 0))


def test_questions_have_their_answers():
    rows = prompt_rows(DATA, 0)
    signs = Counter()
    for row in rows:
        expression = json.loads(row["entry"])["expression"]
        assert str(eval(expression)) == row["answer"]
        assert row["question"].replace("x", "*") == expression
        signs[next(sign for sign in "+-x" if sign in row["question"])] += 1
    assert min(signs.values()) > 10


def test_the_spec_that_ships_fits_together():
    spec = load_spec("tools")
    rows = prompt_rows(spec.data, spec.seed)
    assert Counter(row["split"] for row in rows) == {"train": spec.data.train_prompts, "eval": spec.data.eval_prompts}
    check_tools(spec.data, rows)
    assert make_env(spec.data, lambda code, seconds: "").tools[0]["function"]["name"] == "calculator"
