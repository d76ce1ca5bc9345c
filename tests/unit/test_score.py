"""Scores of given tokens are the bits that the engine recorded when it drew them; what cannot be scored is refused."""

import math
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import VOCABULARY, make_folder, make_tiny_moe
from transformers import AutoModelForCausalLM, LlamaConfig

from furlong.ops.policy.generate import RequestError
from furlong.ops.policy.sampling import NonFiniteLogits
from furlong.ops.protocols import GenerateRequest
from furlong.resources.engines.local import LocalEngine
from furlong.resources.engines.step_gate import EngineError

KINDS = ("llama", "qwen2", "qwen3", "moe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {kind: (make_tiny_moe(root / kind) if kind == "moe" else make_folder(root / kind, kind)) for kind in KINDS}


def drawn(engine: LocalEngine, temperature: float) -> tuple[list, list]:
    """Rows to score, and the log-probabilities recorded of them."""
    asked = [
        GenerateRequest(
            f"{temperature}.{i}", tuple((7 * i + j) % VOCABULARY for j in range(1 + i % 9)), i, 40 - i, temperature
        )
        for i in range(20)
    ]
    samples = engine.generate(asked)
    rows = [((*r.prompt, *s.tokens), len(r.prompt)) for r, s in zip(asked, samples, strict=True)]
    return rows, [list(s.logprobs) for s in samples]


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("llama", "bfloat16"), ("moe", "bfloat16")]
)
def test_scores_are_the_recorded_bits(folders, kind, dtype):
    engine = LocalEngine(folders[kind], 0, dtype, 1, (3,))
    for temperature in (1.0, 0.7, 1.3):
        rows, recorded = drawn(engine, temperature)
        assert len({len(values) for values in recorded}) > 5, "rows of many lengths"
        assert engine.score(rows, temperature) == recorded
        backwards = engine.score(rows[::-1], temperature)[::-1]
        alone = [engine.score([row], temperature)[0] for row in rows]
        assert backwards == alone == recorded
        assert engine.score([(tokens, first + 1) for tokens, first in rows], temperature) == [v[1:] for v in recorded]
    assert engine.score(rows, 1.0) != recorded, "another temperature gives other numbers"
    assert engine.score([], 1.0) == []


def test_rows_longer_than_a_step_and_a_page_are_scored_beside_replies(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1500, initializer_range=0.3, eos_token_id=60,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = LocalEngine(str(tmp_path), 0, "float32", 1, (60,))
    long = GenerateRequest("long", tuple(i % 59 for i in range(1100)), 0, 300, 0.9)
    sample = engine.generate([long])[0]
    rows = [((1, 2, 3), 1), ((*long.prompt, *sample.tokens), 1100), ((4,), 1), (long.prompt[:257], 256)]
    quiet = engine.score(rows, 0.9)
    assert quiet[1] == list(sample.logprobs)
    assert [len(values) for values in quiet] == [2, len(sample.tokens), 0, 1]
    engine.submit([GenerateRequest(f"r{i}", (1, 2, i), i, 200, 1.0) for i in range(4)])
    found: list = []
    threads = [threading.Thread(target=lambda: found.append(engine.score(rows, 0.9))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [quiet, quiet]
    engine.close()


def test_a_token_that_the_model_would_never_draw_has_a_finite_score(folders, tmp_path):
    """Its share is below the smallest float32, so float64 tells: within 1e-4 nat of about -1000."""
    tensors = load_file(Path(folders["qwen3"]) / "model.safetensors")
    tensors["lm_head.weight"] *= 400
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((Path(folders["qwen3"]) / "config.json").read_text())
    tokens = (5, 9, 2, 40, 11, 30)
    scored = LocalEngine(str(tmp_path), 0, "float32", 1, (3,)).score([(tokens, 1)], 0.5)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double() / 0.5
    wanted = torch.log_softmax(logits, -1)[range(5), list(tokens[1:])]
    assert min(scored) < math.log(torch.finfo(torch.float32).smallest_normal) - 20
    assert scored == pytest.approx(wanted.tolist(), rel=1e-5, abs=1e-4)


def test_a_model_that_is_not_finite_is_named_not_scored(folders, tmp_path):
    tensors = load_file(Path(folders["qwen3"]) / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((Path(folders["qwen3"]) / "config.json").read_text())
    engine = LocalEngine(str(tmp_path), 0, "float32", 1, (3,))
    with pytest.raises(NonFiniteLogits, match="row 1 "):
        engine.score([((1, 2, 3), 1), ((1, 7, 3), 1)], 1.0)
    assert len(engine.score([((1, 2, 3), 1)], 1.0)[0]) == 2


@pytest.mark.parametrize(
    ("row", "temperature", "told"),
    [
        (((1, 2), 0), 1.0, "row 1: .* nothing comes before token 0"),
        (((1, 2), 3), 1.0, "row 1: .* no more than there are"),
        (((), 0), 1.0, "row 1: the first of its 0 tokens"),
        (((1, 61), 1), 1.0, "row 1: token id 61 is outside the vocabulary of 61"),
        (((1, -1), 1), 1.0, "row 1: token id -1"),
        (((1,) * 65, 1), 1.0, "row 1: its 65 tokens are more than the model's context of 64"),
        (((1, 2), 1), 0.0, "temperature=0"),
        (((1, 2), 1), math.nan, "temperature=nan"),
        (((1, 2), 1), math.inf, "temperature=inf"),
    ],
)
def test_what_cannot_be_scored_is_refused(folders, row, temperature, told):
    engine = LocalEngine(folders["llama"], 0, "float32", 1, (3,))
    with pytest.raises(RequestError, match=told):
        engine.score([((1, 2), 1), row], temperature)


def test_a_split_engine_says_that_it_does_not_score(folders):
    engine = LocalEngine(folders["llama"], 0, "float32", 1, (3,), tp=2)
    try:
        with pytest.raises(EngineError, match="start one of tp=1"):
            engine.score([((1, 2), 1)], 1.0)
    finally:
        engine.close()
