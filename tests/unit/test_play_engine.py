"""Groups played together on the real engine: the same conversations, bit for bit, as each task played alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from furlong.ops.envs.make import make_env
from furlong.ops.identity import counter_seed
from furlong.ops.policy.bootstrap import make_scratch
from furlong.ops.rollouts.play import play
from furlong.ops.rollouts.trajectory import Outcome, Task, Trajectory
from furlong.ops.sessions.template import ChatTemplate
from furlong.ops.spec import DataSpec, EnvSpec, SamplingSpec, ScratchSpec, TaskSpec
from furlong.ops.tasks.prompts import prompt_rows
from furlong.ops.tasks.render import load_tokenizer
from furlong.resources.engines.local import LocalEngine

TOOLS = EnvSpec(name="tools", options={"tools": "calculator", "max_turns": 3})
ONE_DIGIT = TaskSpec(name="long_arithmetic", options={"min_digits": 1, "max_digits": 1})
DATA = DataSpec(tasks=(ONE_DIGIT,), train_prompts=64, eval_prompts=4, env=TOOLS)
SHAPE = ScratchSpec(
    config={
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    },
    sft={"steps": 60, "batch": 32, "demo_noise": 0.3},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has learnt the form of a conversation, and little else."""
    path = tmp_path_factory.mktemp("model")
    make_scratch(SHAPE, DATA, 0, path, "float32")
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LocalEngine]:
    made = LocalEngine(str(folder), 3, "float32", 1)
    yield made
    made.abort()


def test_conversations_are_the_same_alone_and_in_company(folder: Path, engine: LocalEngine):
    template, env = ChatTemplate(load_tokenizer(folder)), make_env(DATA, lambda code, seconds: "")
    rows = prompt_rows(DATA, 0)[:6]

    def together(index: int, tasks: list[Task]) -> list[Outcome]:
        sampling = SamplingSpec(max_new_tokens=12)
        return play(
            tasks, rows[index], env, template, lambda r, _: engine.generate(r), sampling, 60.0, 256, f"g{index}"
        )

    groups = [[Task(f"g{i}-s{s}", s, counter_seed("t", i, s)) for s in range(4)] for i in range(len(rows))]
    with ThreadPoolExecutor(len(rows)) as pool:
        outcomes = [one for found in pool.map(together, range(len(rows)), groups) for one in found]
    assert all(isinstance(one[0], Trajectory) for one in outcomes), outcomes
    assert max(one[0].turns for one in outcomes) >= 2
    alone = [
        together(i, [replace(task, trajectory_id=f"{task.trajectory_id}-alone")])[0]
        for i, tasks in enumerate(groups)
        for task in tasks
    ]
    for (one,), (other,) in zip(outcomes, alone, strict=True):
        assert replace(other, trajectory_id=one.trajectory_id, seconds=one.seconds) == one
        assert {version for version, _, _ in one.versions} == {3}
