"""SmolLM2-135M, bfloat16, with a draft that was only made from it: the same bits as without."""

from dataclasses import replace

import pytest
import torch
from speculation_samples import ALWAYS, recorded, run

from furlong.ops.draft.drafter import Drafter
from furlong.ops.draft.start import start_draft
from furlong.ops.policy.architecture import read_architecture
from furlong.ops.policy.checkpoint import read_tensors
from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.live import Live
from furlong.ops.protocols import GenerateRequest
from furlong.ops.spec import DataSpec, ModelSpec, TaskSpec
from furlong.ops.tasks.render import load_tokenizer
from furlong.resources.models import resolve

DATA = DataSpec(tasks=(TaskSpec(name="sort_digits"),), train_prompts=1, eval_prompts=1)
SETTINGS = replace(ALWAYS, vocabulary=8192)
TEXTS = ("The capital of France is", "Once upon a time, there was a", "1 2 3 4 5 6 7 8 9 10 11", "def add(a, b):")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = resolve(ModelSpec(source="smollm2-135m-instruct"), DATA, 0, tmp_path_factory.mktemp("root")).path
    arch = read_architecture(folder)
    tensors = read_tensors(folder, arch, torch.bfloat16)
    made, shape = start_draft(SETTINGS, arch, tensors, 0)
    weights = Live(0, Decoder(arch, tensors), serial=1, drafter=Drafter(shape, made, torch.bfloat16))
    tokenizer = load_tokenizer(folder)
    asked = [
        GenerateRequest(f"{i} {heat}", tuple(tokenizer.encoder.encode(text).ids), i, 32, heat)
        for i, text in enumerate(TEXTS)
        for heat in (0.0, 1.0)
    ]
    return weights, asked


def test_the_same_bits_with_any_draft(model, monkeypatch):
    weights, asked = model
    plain = run(asked, weights, None)[0]
    found, batch, _ = run(asked, weights, SETTINGS)
    assert found == plain
    assert batch.speculation()["verifies"] > 50
    recorded(monkeypatch, plain, 0.2)
    found, batch, _ = run(asked, weights, SETTINGS)
    assert found == plain
    assert batch.speculation()["acceptance_length"] > 2
