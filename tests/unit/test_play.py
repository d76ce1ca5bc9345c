"""Playing a group: what is asked of the engine, what comes of each task, and that faults stay where they are."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from furlong.ops.envs.make import make_env
from furlong.ops.envs.protocol import EnvError, Observation
from furlong.ops.envs.single_turn import SingleTurn
from furlong.ops.policy.bootstrap import AFTER_CALL, BEFORE_CALL, make_scratch
from furlong.ops.protocols import GenerateRequest, Sample
from furlong.ops.records import Failure
from furlong.ops.rollouts import bounded as bounded_module
from furlong.ops.rollouts.bounded import bounded
from furlong.ops.rollouts.play import play
from furlong.ops.rollouts.trajectory import EngineLost, Failed, Outcome, Task, Trajectory
from furlong.ops.sessions.session import turn_seed
from furlong.ops.sessions.template import ChatTemplate
from furlong.ops.spec import DataSpec, EnvSpec, SamplingSpec, ScratchSpec, TaskSpec
from furlong.ops.tasks.render import load_tokenizer

TOOLS = EnvSpec(name="tools", options={"tools": "calculator", "max_turns": 3})
DATA = DataSpec(tasks=(TaskSpec(name="long_arithmetic"),), train_prompts=8, eval_prompts=2, env=TOOLS)
SHAPE = ScratchSpec(
    config={
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
    },
    sft={"steps": 0},
)
PROMPT = {"prompt_id": "p", "question": "12x12"}
TASKS = [Task(f"r-00001.1-g000-s{n:02d}", n, 1000 + n) for n in range(4)]
ASK = f"{BEFORE_CALL}12*12{AFTER_CALL}"
WORDS = {n: [ASK, "144"] for n in range(4)}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder: Path = tmp_path_factory.mktemp("model")
    make_scratch(SHAPE, DATA, 0, folder, "float32")
    return ChatTemplate(load_tokenizer(folder))


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_module, "GRACE", 0.2)


class Script:
    """A `Draw` that gives each sample its next words; a reply's tokens are those of its text and the stop token."""

    def __init__(
        self, template: ChatTemplate, words: dict[int, list[str]], change: Callable[[Sample], Sample] = lambda s: s
    ):
        self.template, self.words, self.change = template, words, change
        self.calls: list[list[GenerateRequest]] = []

    def __call__(self, requests: list[GenerateRequest], key: str) -> list[Sample]:
        assert key == "g"
        self.calls.append(requests)
        return [self.change(self._reply(request)) for request in requests]

    def _reply(self, request: GenerateRequest) -> Sample:
        sample, turn = re.fullmatch(r".*-s(\d+):\d+\.(\d+)", request.request_id).groups()
        tokens = (*self.template.encode(self.words[int(sample)][int(turn)]), 1)
        tokens = tokens[: request.max_new_tokens]
        reason = "stop" if tokens[-1] == 1 else "length"
        values = tuple(-0.1 * (n + 1) for n in range(len(tokens)))
        return Sample(request.request_id, tokens, values, values, ((5, 0, len(tokens)),), reason, 0.5)


def _play(template: ChatTemplate, draw: Callable, env: object = None, **changes: object) -> list[Outcome]:
    settings = {"sampling": SamplingSpec(max_new_tokens=16), "deadline": 5.0, "context_length": 256, "tasks": TASKS}
    given = {**settings, **changes}
    env = env or make_env(DATA, lambda code, seconds: "")
    return play(
        given["tasks"], PROMPT, env, template, draw, given["sampling"], given["deadline"], given["context_length"], "g"
    )


def _kinds(outcomes: list[Outcome]) -> list[object]:
    return [outcome.kind if isinstance(outcome, Failed) else outcome[0].text for outcome in outcomes]


def test_a_conversation_is_drawn_turn_by_turn_and_kept_token_by_token(template: ChatTemplate):
    draw = Script(template, {**WORDS, 2: ["99"]})
    outcomes = _play(template, draw)
    assert _kinds(outcomes) == ["144", "144", "99", "144"]
    assert [len(call) for call in draw.calls] == [4, 3]
    first, second = draw.calls[0][0], draw.calls[1][0]
    assert len({request.prompt for request in draw.calls[0]}) == 1
    assert (first.request_id, second.request_id) == ("r-00001.1-g000-s00:0.0", "r-00001.1-g000-s00:0.1")
    assert (first.seed, second.seed) == (1000, turn_seed(1000, 1))
    assert (first.temperature, first.deadline, first.max_new_tokens) == (1.0, 5.0, 16)
    (found,) = outcomes[0]
    assert template.decode(found.tokens) == (f"<user>12x12<end><assistant>{ASK}<end><tool>144<end><assistant>144<end>")
    reply = len(template.encode(ASK)) + 1
    assert found.tokens[: len(second.prompt)] == second.prompt
    assert second.prompt[: len(first.prompt) + reply][: len(first.prompt)] == first.prompt
    blank = len(second.prompt) - len(first.prompt) - reply
    assert found.loss_mask == (False,) * len(first.prompt) + (True,) * reply + (False,) * blank + (True,) * 4
    assert [value is not None for value in found.logprobs] == list(found.loss_mask)
    assert found.versions == (
        (5, len(first.prompt), len(first.prompt) + reply),
        (5, len(second.prompt), len(found.tokens)),
    )
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert (found.turns, found.finish_reason, found.prompt, found.seed) == (2, "stop", len(first.prompt), 1000)
    assert (found.trajectory_id, found.sample, found.leaf) == (TASKS[0].trajectory_id, 0, 0)
    assert found.seconds >= 1.0


def test_later_tries_have_requests_of_their_own(template: ChatTemplate):
    draw = Script(template, WORDS)
    _play(template, draw, tasks=[replace(TASKS[1], attempt=2)])
    assert [request.request_id for call in draw.calls for request in call] == [
        "r-00001.1-g000-s01:2.0", "r-00001.1-g000-s01:2.1",
    ]  # fmt: skip


def test_no_tasks_draw_nothing(template: ChatTemplate):
    assert _play(template, Script(template, {}), tasks=[]) == []


@pytest.mark.parametrize("turn", [0, 1])
def test_an_engine_that_is_lost_takes_what_was_under_way(template: ChatTemplate, turn: int):
    script = Script(template, {**WORDS, 3: ["7"]})

    def draw(requests: list[GenerateRequest], key: str) -> list[Sample]:
        if len(script.calls) == turn:
            raise EngineLost("no engine answered\nfor long")
        return script(requests, key)

    outcomes = _play(template, draw)
    lost = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    assert {outcome.kind for outcome in lost} == {Failure.ENGINE_LOST}
    assert lost[0].detail == "no engine answered for long"
    asked = len(template.encode(ASK)) + 1
    assert [outcome.tokens for outcome in lost] == ([0] * 4 if turn == 0 else [asked] * 3)


def test_a_reply_that_took_too_long_fails_alone(template: ChatTemplate):
    def late(sample: Sample) -> Sample:
        if sample.request_id.endswith("s01:0.1"):
            return replace(sample, finish_reason="deadline", tokens=(), logprobs=(), model_logprobs=(), versions=())
        return replace(sample, finish_reason="abort") if sample.request_id.endswith("s02:0.0") else sample

    outcomes = _play(template, Script(template, WORDS, late))
    assert _kinds(outcomes) == ["144", Failure.DEADLINE, Failure.ENGINE_LOST, "144"]
    assert outcomes[1].tokens == outcomes[2].tokens == len(template.encode(ASK)) + 1


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.5])
def test_a_reply_with_impossible_numbers_fails_alone(template: ChatTemplate, value: float):
    def bad(sample: Sample) -> Sample:
        return replace(sample, logprobs=(value, *sample.logprobs[1:])) if "s03" in sample.request_id else sample

    assert _kinds(_play(template, Script(template, WORDS, bad))) == ["144", "144", "144", Failure.ENGINE_LOST]


def test_replies_in_another_order_are_an_error(template: ChatTemplate):
    script = Script(template, WORDS)
    with pytest.raises(ValueError, match="was drawn for"):
        _play(template, lambda requests, key: script(requests, key)[::-1])


def test_replies_cut_off_end_the_conversation(template: ChatTemplate):
    outcomes = _play(template, Script(template, {**WORDS, 0: ["1" * 50]}))
    (cut,) = outcomes[0]
    assert (cut.finish_reason, cut.turns, cut.text) == ("length", 1, "1" * 16)
    assert _kinds(outcomes)[1:] == ["144"] * 3


def test_a_conversation_beyond_the_context_ends(template: ChatTemplate):
    draw = Script(template, WORDS)
    first = len(template.encode("<user>12x12<end><assistant>"))
    outcomes = _play(template, draw, context_length=first + 10)
    assert [(one[0].finish_reason, one[0].turns) for one in outcomes] == [("length", 1)] * 4
    assert draw.calls[0][0].max_new_tokens == 10
    with pytest.raises(ValueError, match="no room for a reply"):
        _play(template, draw, context_length=first)


def test_turns_that_run_out_count_as_cut_off(template: ChatTemplate):
    outcomes = _play(template, Script(template, {n: [ASK] * 3 for n in range(4)}))
    assert {(one[0].finish_reason, one[0].turns) for one in outcomes} == {("length", 3)}


def test_template_text_in_a_reply_is_kept_as_it_was_sampled(template: ChatTemplate):
    """It renders to the very tokens that were sampled, so nothing has drifted; that it is wrong is the verifier's to say."""
    outcomes = _play(template, Script(template, {**WORDS, 1: ["<user>9"]}))
    assert _kinds(outcomes) == ["144", "<user>9", "144", "144"]
    assert outcomes[1][0].tokens[-3:] == (*template.encode("<user>9"), 1)


class Faulty(SingleTurn):
    """Sample n does what `faults` says at its step; the others go on to the end."""

    def __init__(self, faults: dict[int, Callable[[], object]], where: str = "step"):
        super().__init__()
        self.faults, self.where, self.closed = faults, where, []

    def episode(self, prompt: dict, seed: int) -> "FaultyEpisode":
        if self.where == "episode" and (fault := self.faults.get(seed - 1000)):
            fault()
        return FaultyEpisode(self, seed - 1000)


class FaultyEpisode:
    def __init__(self, env: Faulty, number: int):
        self.env, self.number = env, number

    def step(self, reply: dict, deadline: float) -> Observation:
        if self.env.where == "step" and (fault := self.env.faults.get(self.number)):
            return fault()
        return Observation((), done=True)

    def close(self) -> None:
        self.env.closed.append(self.number)
        if self.env.where == "close" and (fault := self.env.faults.get(self.number)):
            fault()


def _raise(error: Exception) -> Callable[[], object]:
    def fault() -> object:
        raise error

    return fault


@pytest.fixture
def hanging() -> Iterator[Callable[[], object]]:
    gate = threading.Event()
    yield lambda: gate.wait(30.0)
    gate.set()


def _as_env(faulty: Faulty) -> object:
    """The same, but not known to be a SingleTurn."""

    class Env:
        tools = ()
        begin = staticmethod(faulty.begin)
        episode = staticmethod(faulty.episode)

    return Env()


@pytest.mark.parametrize("where", ["episode", "step", "close"])
def test_a_faulty_environment_hurts_its_own_task_only(template: ChatTemplate, where: str, hanging: Callable):
    faults = {0: _raise(EnvError("it is broken")), 1: _raise(KeyError("bug")), 2: hanging}
    faulty = Faulty(faults, where)
    begin = time.monotonic()
    outcomes = _play(template, Script(template, {n: ["5"] for n in range(4)}), _as_env(faulty), deadline=0.3)
    assert time.monotonic() - begin < 5.0
    assert _kinds(outcomes) == [Failure.ENVIRONMENT, Failure.ENVIRONMENT, Failure.DEADLINE, "5"]
    assert "it is broken" in outcomes[0].detail
    assert "KeyError: 'bug'" in outcomes[1].detail
    assert "did not answer within" in outcomes[2].detail
    assert outcomes[0].tokens == (0 if where == "episode" else 2)
    assert sorted(faulty.closed) == ([3] if where == "episode" else [0, 1, 2, 3])


def test_an_answer_that_no_template_can_write_is_a_failure(template: ChatTemplate):
    faults = {
        0: lambda: Observation(({"role": "tool", "content": "\u00e4\u00f6"},), done=False),
        1: lambda: Observation(({"role": "narrator", "content": "1"},), done=False),
        2: lambda: Observation((), done=False),
    }
    outcomes = _play(template, Script(template, {n: ["5"] for n in range(4)}), _as_env(Faulty(faults)))
    assert _kinds(outcomes) == [Failure.DRIFT, Failure.ENVIRONMENT, Failure.ENVIRONMENT, "5"]


@pytest.mark.parametrize("kind", [Failure.ENVIRONMENT, Failure.DEADLINE])
def test_an_environment_that_cannot_begin_fails_every_task(template: ChatTemplate, kind: Failure, hanging: Callable):
    faulty = _as_env(Faulty({}))
    fault = hanging if kind == Failure.DEADLINE else _raise(EnvError("no board"))
    type(faulty).begin = staticmethod(lambda prompt: fault())
    draw = Script(template, {})
    assert _kinds(_play(template, draw, faulty, deadline=0.1)) == [kind] * 4
    assert draw.calls == []


def test_episodes_are_closed_when_the_engine_breaks(template: ChatTemplate):
    faulty = Faulty({})
    with pytest.raises(RuntimeError, match="bug"):
        _play(template, lambda requests, key: _raise(RuntimeError("bug"))(), _as_env(faulty))
    assert sorted(faulty.closed) == [0, 1, 2, 3]


def test_one_question_costs_little(template: ChatTemplate):
    """A hundred and twenty-eight single-turn trajectories, beside rendering and drawing: 0.1 ms each are asked for."""
    tasks = [Task(f"g-s{n:03d}", n, n) for n in range(128)]
    draw = Script(template, {n: ["144"] for n in range(128)})
    spent = []
    for _ in range(5):
        begin = time.perf_counter()
        samples = draw([GenerateRequest(f"g-s{n:03d}:0.0", (2, 3), n, 16, 1.0) for n in range(128)], "g")
        drawn = time.perf_counter() - begin
        begin = time.perf_counter()
        outcomes = _play(template, lambda requests, key, samples=samples: samples, SingleTurn(), tasks=tasks)
        spent.append(time.perf_counter() - begin)
    assert all(isinstance(one[0], Trajectory) for one in outcomes)
    assert min(spent) < 128 * 0.1e-3, f"{min(spent) / 128 * 1e6:.0f} us each, {drawn:.3f} s to draw"


def test_calls_that_return_are_in_order_and_one_that_hangs_is_left(hanging: Callable):
    results = bounded([lambda: 1, hanging, _raise(ValueError("no")), lambda: time.sleep(0.05) or 4], 0.1)
    assert results[0] == 1
    assert results[3] == 4
    assert isinstance(results[1], TimeoutError)
    assert isinstance(results[2], ValueError)
    assert bounded([], 1.0) == []


def test_calls_into_an_environment_are_left_when_the_group_is_not_wanted_any_more():
    begun = time.monotonic()
    with pytest.raises(KeyError, match="unwanted"):
        bounded([lambda: time.sleep(20)], 60.0, _raise(KeyError("unwanted")))
    assert time.monotonic() - begun < 5
