"""A whole run in exact mode: between what engines recorded and what the trainer computes there is nothing left."""

import pytest

EXACT = {"trainer.exact": True}
COARSE = {"model.dtype": "bfloat16", "trainer.compute_dtype": "bfloat16"}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {
    "model.scratch.config": {
        **SIZES, "model_type": "qwen3_moe", "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}  # fmt: skip


def steps(place, run: str) -> list[dict]:
    return sorted(place.lake.read("steps", {"run": run}).to_pylist(), key=lambda row: row["step"])


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("fp32", {}),
        pytest.param("bf16", COARSE, marks=pytest.mark.slow),
        pytest.param("experts", COARSE | EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_every_trained_token_has_the_recorded_bits(place, name, overrides):
    run = f"exact-{name}"
    place.finish(run, overrides=EXACT | overrides)
    rows = steps(place, run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["mismatch_coverage"] == 1.0
        assert (row["mismatch_max"], row["mismatch_mean"], row["mismatch_k3"]) == (0.0, 0.0, 0.0)
        assert row["ess"] == 1.0
    assert len({digest for _, _, digest in place.digests(run)}) == 4, "the weights did not move, so nothing was shown"


def test_without_it_something_is_left(place, undisturbed):
    assert max(row["mismatch_max"] for row in steps(place, "calm")) > 0
