"""The whole way on a real engine: an agent library, HTTP, sessions, sampled tokens, and back to log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from chat_templates import call, make_template, small_tokenizer
from openai import OpenAI
from scripted import Script
from transformers import LlamaConfig, LlamaForCausalLM

from furlong.ops.protocols import GenerateRequest, Sample
from furlong.ops.rollouts.trajectory import Trajectory
from furlong.ops.sessions.matchers import replies_in_place
from furlong.ops.sessions.template import ChatTemplate
from furlong.resources.engines.local import LocalEngine
from furlong.resources.serving.endpoint import Defaults, Endpoint
from furlong.resources.serving.server import Server

VOCABULARY = 344
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=None,
    tie_word_embeddings=False,
)
ID = "run-00001.1-g000-s00"


class Recorder:
    """Passes requests on to an engine and remembers the samples."""

    def __init__(self, engine: LocalEngine):
        self.engine, self.samples = engine, {}

    def __call__(self, requests: list[GenerateRequest], key: str) -> list[Sample]:
        drawn = self.engine.generate(requests)
        self.samples.update(
            (request.request_id, (request, sample)) for request, sample in zip(requests, drawn, strict=True)
        )
        return drawn


def serve(template: ChatTemplate, draw, folder: Path, temperature: float = 1.0, matcher=replies_in_place) -> Endpoint:
    return Endpoint(template, draw, Defaults(temperature, 120, 60.0, 2048), folder, matcher, key="x")


def start_engine(model: LlamaForCausalLM, folder: Path, template: ChatTemplate) -> LocalEngine:
    model.save_pretrained(folder)
    return LocalEngine(str(folder), 4, "float32", 1, tuple(template.stop_ids))


@pytest.fixture(scope="module", params=["chatml", "headers", "speakers"])
def babbler(
    request, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LlamaForCausalLM, LocalEngine, ChatTemplate]]:
    """Random weights, and stop tokens that are likely enough for short replies; the vocabulary ends with unused ids."""
    template = make_template(request.param)
    torch.manual_seed(5)
    model = LlamaForCausalLM(CONFIG).eval()
    with torch.no_grad():
        model.lm_head.weight[small_tokenizer().get_vocab_size() :] = 0
        for token in template.stop_ids:  # a direction that most hidden states share
            model.lm_head.weight[token] += 3 * model.lm_head.weight.mean(0)
    engine = start_engine(model, tmp_path_factory.mktemp("model"), template)
    yield model, engine, template
    getattr(engine, "close", lambda: None)()


def check_logprobs(model: LlamaForCausalLM, trajectory: Trajectory, temperature: float) -> None:
    """Recompute every log-probability from the kept tokens alone, in one pass over the conversation.

    float32 against float64, two orders of summation: measured below 2e-5, asserted below 1e-3.
    """
    logits = model.double()(torch.tensor([trajectory.tokens])).logits[0]
    for column, heat in ((trajectory.model_logprobs, 1.0), (trajectory.logprobs, temperature)):
        rows = torch.log_softmax(logits / heat, -1)
        for at, value in enumerate(column):
            if value is not None:
                assert abs(rows[at - 1, trajectory.tokens[at]].item() - value) < 1e-3, at


def test_agents_at_once_on_a_real_engine_keep_exactly_what_was_sampled(babbler, tmp_path: Path) -> None:
    model, engine, template = babbler
    recorder = Recorder(engine)
    endpoint = serve(template, recorder, tmp_path, 0.9)

    def talk(number: int) -> list[Trajectory]:
        name = f"run-00001.1-g000-s{number:02d}"
        client = OpenAI(base_url=endpoint.open(name, 1000 + number), api_key="x", max_retries=0)
        history: list = [{"role": "user", "content": f"hello {number}"}]
        for turn in range(5):
            choice = client.chat.completions.create(
                model="policy", messages=history, n=1 + (turn == 1), stop=["e", "a"]
            ).choices[0]
            if choice.finish_reason == "length":
                break
            history += [choice.message.model_dump(), {"role": "user", "content": "and again"}]
        sampled[name] = endpoint.sampled(name)
        return endpoint.take(name)

    sampled: dict[str, int] = {}
    with Server(endpoint), ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(talk, range(4)))
    assert max(t.turns for leaves in taken for t in leaves) >= 3
    assert any(len(leaves) > 1 for leaves in taken)
    drawn = {request.request_id: (request, sample) for request, sample in recorder.samples.values()}
    for leaves in taken:
        name = leaves[0].trajectory_id
        mine = [pair for key, pair in drawn.items() if key.startswith(f"{name}:")]
        for leaf in leaves:
            begins = [at for at, (was, now) in enumerate(pairwise(leaf.logprobs), 1) if was is None and now is not None]
            assert 1 <= len(begins) <= leaf.turns  # fewer where a reply was but a stop token that the template replaces
            for at in begins:
                # the reply drawn for exactly these tokens, cut at most where a stop text or the template ends it
                end = next((i for i, v in enumerate(leaf.logprobs[at:], at) if v is None), len(leaf.tokens))
                same = [
                    s
                    for r, s in mine
                    if r.prompt == leaf.tokens[:at] and s.logprobs[: end - at] == leaf.logprobs[at:end]
                ]
                assert [s.tokens[: end - at] for s in same] == [leaf.tokens[at:end]]
            assert [v for v, _, _ in leaf.versions] == [4] * len(leaf.versions)
            check_logprobs(model, leaf, 0.9)
        kept = sum(sum(leaf.loss_mask) for leaf in leaves)
        distinct = {leaf.tokens[: at + 1] for leaf in leaves for at, v in enumerate(leaf.logprobs) if v is not None}
        # once each, whatever leaves share a token, but for stop tokens that the template replaces; equal is what siblings
        # happened to draw alike
        assert len(distinct) <= kept <= sampled[name]
        assert sampled[name] - kept <= sum(leaf.turns - 1 for leaf in leaves)


# --- smolagents --------------------------------------------------------------------------------------------------------

REPLIES = (call("add", '{"a": 40, "b": 2}'), call("final_answer", '{"answer": "42"}'))


def run_smolagents(base_url: str) -> tuple[str, list]:
    """Play the question with a ToolCallingAgent; its own system prompt is far too long for so small a model."""
    from smolagents import OpenAIModel, Tool, ToolCallingAgent
    from smolagents.agents import EMPTY_PROMPT_TEMPLATES

    class Add(Tool):
        name = "add"
        description = "adds"
        inputs = {"a": {"type": "integer", "description": "one"}, "b": {"type": "integer", "description": "other"}}  # noqa: RUF012
        output_type = "integer"

        def forward(self, a: int, b: int) -> int:
            return a + b

    model = OpenAIModel("policy", api_base=base_url, api_key="x", client_kwargs={"max_retries": 0})
    templates = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "be brief"}
    agent = ToolCallingAgent([Add()], model, prompt_templates=templates, max_steps=3, verbosity_level=-1)
    return agent.run("40 + 2?"), agent.memory.steps


def by_turn(prompt: str) -> str:
    return REPLIES["Observation" in prompt]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Trajectory:
    """What smolagents sends and a scripted policy answers."""
    template = make_template("chatml")
    endpoint = serve(template, Script(template, by_turn), tmp_path_factory.mktemp("journal"))
    with Server(endpoint):
        answer, _ = run_smolagents(endpoint.open(ID, 1))
        (trajectory,) = endpoint.take(ID)
    assert answer == "42"
    return trajectory


def test_smolagents_rewrites_its_history_and_the_conversation_stays_one(recorded: Trajectory) -> None:
    """It sends calls back as text of its own ("Calling tools: ..."), which the session knows to be the reply."""
    assert recorded.turns == 2
    assert [message["role"] for message in recorded.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [c["function"]["name"] for m in recorded.messages for c in m.get("tool_calls", [])] == [
        "add",
        "final_answer",
    ]
    assert recorded.messages[3]["content"] == "Observation:\n42"
    assert sum(recorded.loss_mask) == sum(value is not None for value in recorded.logprobs)


def imitate(trajectory: Trajectory, steps: int = 120) -> LlamaForCausalLM:
    """A model that has learnt the sampled tokens of one conversation by heart."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.tensor([trajectory.tokens])
    labels = ids.masked_fill(~torch.tensor([trajectory.loss_mask]), -100)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.05
    return model.eval()


def test_smolagents_plays_a_real_policy_token_for_token(recorded: Trajectory, tmp_path: Path) -> None:
    template = make_template("chatml")
    model = imitate(recorded)
    engine = start_engine(model, tmp_path / "model", template)
    recorder = Recorder(engine)
    endpoint = serve(template, recorder, tmp_path / "journal", 0.2)
    try:
        with Server(endpoint):
            answer, steps = run_smolagents(endpoint.open(ID, 1))
            (trajectory,) = endpoint.take(ID)
            assert endpoint.open(ID, 1).endswith("/v1")
            again, _ = run_smolagents(endpoint.open(ID, 1))
            assert endpoint.take(ID)[0].tokens == trajectory.tokens
    finally:
        getattr(engine, "close", lambda: None)()
    assert (answer, again) == ("42", "42")
    assert len([step for step in steps if getattr(step, "tool_calls", None)]) == 2
    first, second = sorted(list(recorder.samples.values())[:2], key=lambda pair: len(pair[0].prompt))
    whole = (*first[0].prompt, *first[1].tokens)
    assert second[0].prompt[: len(whole)] == whole
    assert trajectory.tokens == (*second[0].prompt, *second[1].tokens)
    assert trajectory.turns == 2
    assert all(
        value is not None and math.isfinite(value)
        for value, on in zip(trajectory.logprobs, trajectory.loss_mask, strict=True)
        if on
    )
    check_logprobs(model, trajectory, 0.2)
