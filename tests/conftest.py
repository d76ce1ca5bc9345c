"""Shared by all tests: a spec small enough to train in seconds, and a folder that a test run owns."""

import os

import pytest
import yaml

from furlong.ops.spec import SPEC_FOLDER

QUICK = {
    "steps": 3,
    "model.scratch.config.hidden_size": 32,
    "model.scratch.config.intermediate_size": 64,
    "model.scratch.sft.steps": 80,
    "model.scratch.sft.batch": 64,
    "model.scratch.sft.learning_rate": 1.0e-2,
    "data.tasks": [{"name": "sort_digits", "options": {"min_digits": 2, "max_digits": 3}}],
    "data.train_prompts": 64,
    "data.eval_prompts": 8,
    "algorithm.prompts_per_step": 4,
    "algorithm.samples_per_prompt": 4,
    "algorithm.warmup_steps": 1,
    "trainer.save_every": 2,
    "evals.samples": 2,
}
"""The tiny spec, made smaller still: dotted keys over `pipelines/specs/tiny.yaml`."""


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Threads of many small processes on few cores only wait for each other."""
    os.environ["FURLONG_THREADS"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def quick_spec(tmp_path_factory) -> str:
    """Path of a spec file: 3 steps of 4 prompts x 4 replies."""
    spec = yaml.safe_load((SPEC_FOLDER / "tiny.yaml").read_text())
    for dotted, value in QUICK.items():
        *sections, name = dotted.split(".")
        target = spec
        for section in sections:
            target = target[section]
        target[name] = value
    path = tmp_path_factory.mktemp("specs") / "quick.yaml"
    path.write_text(yaml.safe_dump(spec | {"name": "quick"}))
    return str(path)
