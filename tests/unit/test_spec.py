"""Specs: what is refused, and how the refusal reads."""

import pytest

from furlong.ops.identity import counter_seed, fingerprint
from furlong.ops.policy.bootstrap import check_scratch
from furlong.ops.policy.parallel import parse_layout
from furlong.ops.spec import Placement, SpecError, load_spec, parse_changes


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_shipped_specs_load_and_have_an_identity(name):
    spec = load_spec(name)
    assert spec.fingerprint() == load_spec(name).fingerprint()
    assert spec.fingerprint() != load_spec(name, {"seed": 1}).fingerprint()


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"algorithm.learning_rat": 1.0}, ["algorithm.learning_rat", "unknown key", "learning_rate"]),
        ({"staleness": 1, "algorithm.correction": "none"}, ["staleness=1", "older weights", "tis"]),
        ({"trainer.exact": True, "trainer.backend": "megatron"}, ["trainer.exact", "fsdp"]),
        ({"trainer.exact": True, "model.dtype": "bfloat16"}, ["trainer.exact", "compute_dtype"]),
        ({"trainer.exact": True, "staleness": 1}, ["trainer.exact", "on_update", "retract"]),
        ({"trainer.lora": {"rank": 4}, "engine": "sglang"}, ["trainer.lora", "engine=local"]),
        ({"trainer.lora": {"alpha": 4}}, ["trainer.lora", "rank", "e.g. 8"]),
        ({"trainer.lora": {"rank": 8, "alpha": -1}}, ["trainer.lora", "alpha above 0"]),
        ({"trainer.lora": {"rang": 8}}, ["trainer.lora", "rang", "rank"]),
        ({"algorithm.critic": {"lam": 0.9}}, ["algorithm.critic", "grpo", "ppo"]),
        ({"algorithm.name": "ppo", "algorithm.critic": {"lambda": 0.9}}, ["algorithm.critic", "lambda", "'lam'"]),
        ({"algorithm.name": "ppo", "algorithm.critic": {"lam": 1.5}}, ["algorithm.critic", "lam", "[0, 1]"]),
        ({"algorithm.teacher": "folder"}, ["teacher", "distill"]),
        ({"algorithm.betas": [0.9, 1.0]}, ["betas", "less than 1"]),
        ({"algorithm.correction_options": {"hight": 2.0}}, ["hight", "high"]),
        ({"algorithm.learning_rate": "fast"}, ["algorithm.learning_rate", "number", "fast"]),
        ({"algorithm.samples_per_prompt": 0}, ["samples_per_prompt", "1"]),
        ({"algorithm.samples_per_prompt": 1}, ["samples_per_prompt", "grpo", "2 or more", "ppo"]),
        (
            {"algorithm.samples_per_prompt": 1, "algorithm.name": "ppo", "rollout.filter": "zero_variance"},
            ["rollout.filter", "single reply", "samples_per_prompt"],
        ),
        ({"steps": 0}, ["steps", "1"]),
        ({"steps": 2.5}, ["steps", "integer"]),
        ({"staleness": -1}, ["staleness", "0"]),
        ({"rollout.window": 0.5}, ["rollout.window", "1"]),
        ({"rollout.on_update": "drop"}, ["rollout.on_update", "in_place", "retract", "abort"]),
        ({"model.source": "gpt-17"}, ["unknown model 'gpt-17'", "smollm2-135m-instruct"]),
        ({"data.tasks": []}, ["data.tasks", "1"]),
        ({"data.train_prompts": 0}, ["train_prompts", "1"]),
        ({"algorithm.warmup_steps": 10_000}, ["warmup_steps", "steps"]),
        ({"seed.deeper": 1}, ["seed", "section"]),
    ],
)
def test_a_bad_spec_names_field_reason_and_fix(overrides, parts):
    with pytest.raises(SpecError) as error:
        load_spec("tiny", overrides)
    for part in parts:
        assert part in str(error.value)


def test_scratch_settings_must_be_possible():
    with pytest.raises(SpecError, match="num_key_value_heads"):
        check_scratch(load_spec("tiny", {"model.scratch.config.num_key_value_heads": 3}).model.scratch)


def test_unknown_spec_suggests_a_known_one():
    with pytest.raises(SpecError, match="did you mean 'tiny'"):
        load_spec("tinny")


def test_a_broken_yaml_file_is_named(tmp_path):
    path = tmp_path / "odd.yaml"
    path.write_text("name: [")
    with pytest.raises(SpecError, match=r"odd\.yaml"):
        load_spec(str(path))


def test_placement_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("FURLONG_ROOT", "elsewhere")
    monkeypatch.setenv("FURLONG_THREADS", "3")
    placement = Placement.from_env()
    assert placement.root == "elsewhere"
    assert placement.threads == 3
    monkeypatch.setenv("FURLONG_THREADS", "many")
    with pytest.raises(SpecError, match="FURLONG_THREADS"):
        Placement.from_env()
    monkeypatch.setenv("FURLONG_THREADS", "-1")
    with pytest.raises(SpecError, match="threads"):
        Placement.from_env()


def test_fingerprint_ignores_order_and_refuses_what_is_not_plain():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.5})
    with pytest.raises(ValueError, match="set"):
        fingerprint({"a": {1, 2}})
    with pytest.raises(ValueError, match="finite"):
        fingerprint({"a": float("nan")})


def test_seeds_differ_by_coordinate_and_by_type():
    seeds = {counter_seed(0, step, sample) for step in range(50) for sample in range(50)}
    assert len(seeds) == 2500
    assert counter_seed(1, 23) != counter_seed(12, 3)
    assert counter_seed("1") != counter_seed(1)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("text", ["tp2", "tp2-pp2-vpp2-sp", "dp4-recompute", "cp2-ep2", ""])
def test_a_layout_is_written_as_it_is_read(text):
    assert parse_layout(str(parse_layout(text))) == parse_layout(text)


@pytest.mark.parametrize("text", ["tp", "tp0", "tp2-tp2", "sp", "vpp2", "zp2", "tp2,pp2", "ep3-dp2", "sp2-tp2"])
def test_a_layout_that_contradicts_itself_is_refused(text):
    with pytest.raises(SpecError, match="trainer layout"):
        parse_layout(text)


def test_changes_on_the_command_line_are_yaml_values():
    assert parse_changes(["steps=3", "algorithm.name=rloo", "model.scratch.sft={steps: 4}"]) == {
        "steps": 3, "algorithm.name": "rloo", "model.scratch.sft": {"steps": 4}
    }  # fmt: skip
    for text in ("steps", "=3", "steps={"):
        with pytest.raises(SpecError, match=r"steps|=3"):
            parse_changes([text])
