import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_policy import CONFIGS, make_batch, make_folder, make_spec, near_policy, reference

from furlong.ops.policy.loss import NonFiniteError
from furlong.ops.policy.packing import PackingError, pack
from furlong.ops.policy.parallel import Layout
from furlong.ops.protocols import OtherLogprobs
from furlong.resources.trainers.fsdp import FSDPTrainer

ALONE = OtherLogprobs()
"""Log-probabilities under no other weights."""
RECOMPUTE = Layout(recompute=True)
LOW, HIGH = 0.2, 0.28
CLOSE = 2e-5
"""Bound on gradients between two float32 computations, or float32 and the float64 reference, relative to the tensor's
norm (a hundredth of the global one for tensors that nearly cancel). Rounding is 6e-8 a product; sums over up to 60
terms, two layers and exp magnify it: at most 6e-6 was measured."""
SAME = 1e-5
"""Absolute bound on means over tokens whose terms are of order 1, such as the loss; at most 2e-6 was measured."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: make_folder(tmp_path_factory.mktemp(name), name) for name in CONFIGS}


@pytest.fixture(scope="module")
def folder(folders):
    return folders["llama"]


def loaded(folder, **settings) -> FSDPTrainer:
    trainer = FSDPTrainer(make_spec(folder, **settings), threads=1)
    trainer.load(folder)
    return trainer


def near(trainer, batch):
    return near_policy(batch, trainer.logprobs(batch))


def gradients(trainer) -> dict[str, torch.Tensor]:
    return {name: w.grad.clone() for name, w in trainer.masters.weights.items()}


def everything(trainer) -> dict[str, torch.Tensor]:
    """A copy of what a step reads and changes."""
    state = {piece.name: tensor.clone() for piece, tensor in trainer.masters.state().items()}
    return state | {"step": torch.tensor([trainer.completed])}


def assert_bitwise(one, other):
    assert one.keys() == other.keys()
    assert one
    for name in one:
        assert torch.equal(one[name], other[name]), name


def assert_close(one, other, bound=CLOSE):
    assert one.keys() == other.keys()
    norms = {name: other[name].double().norm() for name in other}
    whole = torch.stack(list(norms.values())).norm()
    assert whole > 0
    for name in one:
        gap = (one[name].double() - other[name].double()).norm()
        assert gap <= bound * max(norms[name], whole / 100), name


@pytest.mark.parametrize("architecture", list(CONFIGS))
@pytest.mark.parametrize("budget", [512, 24])
@pytest.mark.parametrize(("letters", "mean"), [(61, "sequence"), (2, "token")])
def test_packed_step_equals_the_unpacked_reference(folders, architecture, budget, letters, mean):
    """Different lengths, one-token replies, a group of one, masked tokens, shared beginnings, split groups."""
    trainer = loaded(folders[architecture], budget=budget, loss_mean=mean)
    batch = near(trainer, make_batch(1, letters=letters))
    assert min(map(len, batch.replies)) == 1
    loss, logprobs, grads = reference(folders[architecture], batch, LOW, HIGH, mean)
    for got, want in zip(trainer.logprobs(batch), logprobs, strict=True):
        assert got == pytest.approx(want, abs=2e-5)
    metrics = trainer.step(batch, ALONE)
    assert metrics.loss == pytest.approx(loss, abs=SAME)
    assert_close(gradients(trainer), grads)
    assert metrics.grad_norm == pytest.approx(math.sqrt(sum(g.square().sum() for g in grads.values())), rel=CLOSE)
    assert metrics.tokens_trained == sum(map(sum, batch.masks))
    assert 0 < metrics.clip_fraction < 1


def test_metrics_by_hand(folder):
    trainer = loaded(folder)
    batch = near(trainer, make_batch(4))
    pairs = zip(trainer.logprobs(batch), batch.logprobs, batch.masks, strict=True)
    d = torch.tensor([a - b for row in pairs for a, b, on in zip(*row, strict=True) if on], dtype=torch.float64)
    metrics = trainer.step(batch, ALONE)
    # Engine values are rounded to float32 in the step, and the two forwards pack differently.
    assert metrics.mismatch_mean == pytest.approx(float(d.abs().mean()), abs=2e-6)
    assert metrics.mismatch_max == pytest.approx(float(d.abs().max()), abs=1e-5)
    assert metrics.mismatch_k3 == pytest.approx(float((d.exp() - 1 - d).mean()), abs=1e-5)
    assert 0 < metrics.entropy < math.log(61)
    assert metrics.learning_rate == 1e-3


def test_adamw_over_two_steps_by_hand(folder):
    """m and v as running means of g and g^2, both divided by 1 - beta^t; decay pulls before the move."""
    b1, b2, decay = 0.7, 0.9, 0.1
    trainer = loaded(folder, betas=(b1, b2), weight_decay=decay, warmup_steps=2, learning_rate=0.02)
    want = {name: w.detach().double() for name, w in trainer.masters.weights.items()}
    m, v = ({name: torch.zeros_like(w) for name, w in want.items()} for _ in range(2))
    for t, rate in ((1, 0.01), (2, 0.02)):
        assert trainer.step(near(trainer, make_batch(t, step=t)), ALONE).learning_rate == rate
        for name, grad in gradients(trainer).items():
            m[name] = b1 * m[name] + (1 - b1) * grad.double()
            v[name] = b2 * v[name] + (1 - b2) * grad.double() ** 2
            move = (m[name] / (1 - b1**t)) / ((v[name] / (1 - b2**t)).sqrt() + 1e-8)
            want[name] = want[name] * (1 - rate * decay) - rate * move
    for name, weight in trainer.masters.weights.items():
        torch.testing.assert_close(weight.detach().double(), want[name], rtol=1e-5, atol=1e-6)


def test_gradient_is_clipped_to_the_global_norm(folder):
    trainer = loaded(folder, max_grad_norm=1e-3)
    metrics = trainer.step(near(trainer, make_batch(2)), ALONE)
    assert metrics.grad_norm > 1e-3
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients(trainer).values()))
    assert norm == pytest.approx(1e-3, rel=1e-5)


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 1000), budget=st.integers(16, 300), data=st.data())
def test_loss_and_gradients_do_not_depend_on_layout(folder, seed, budget, data):
    """Micro-batch split, order of groups and trajectories, padding, added masked trajectories."""
    batch = make_batch(seed, (3, 2, 4), letters=3)
    batch = near(loaded(folder), batch)
    trainer = loaded(folder)
    want = trainer.step(batch, ALONE)
    groups = data.draw(st.permutations(range(len(batch.prompts))))
    order = data.draw(st.permutations(range(len(batch.group))))
    pick = lambda values: tuple(values[i] for i in order)  # noqa: E731
    extra = batch.replies[0]
    moved = replace(
        batch,
        prompts=(*(batch.prompts[g] for g in groups), (1, 2, 3)),
        group=(*(groups.index(batch.group[i]) for i in order), len(groups)),
        replies=(*pick(batch.replies), extra),
        logprobs=(*pick(batch.logprobs), (math.nan,) * len(extra)),
        masks=(*pick(batch.masks), (False,) * len(extra)),
        sampled_by=(*pick(batch.sampled_by), (0,) * len(extra)),
        rewards=(*pick(batch.rewards), 0.0),
        routing=(*pick(batch.routing), None),
        advantages=(*pick(batch.advantages), math.nan),
        trajectory_ids=(*pick(batch.trajectory_ids), "masked"),
    )
    other = loaded(folder, budget=budget)
    got = other.step(moved, ALONE)
    assert_close(gradients(other), gradients(trainer))
    assert got.tokens_trained == want.tokens_trained
    assert got.clip_fraction == want.clip_fraction
    for name in ("loss", "grad_norm", "entropy", "mismatch_mean", "mismatch_max", "mismatch_p99", "mismatch_k3"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=CLOSE, abs=SAME), name


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_same_step_twice_is_bitwise_the_same(folder, compute):
    one, other = (loaded(folder, compute=compute, budget=40) for _ in range(2))
    batch = near(one, make_batch(6))
    assert one.step(batch, ALONE) == other.step(batch, ALONE)
    assert_bitwise(everything(one), everything(other))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_recomputed_activations_change_no_bit(folder, compute):
    one, other = loaded(folder, compute=compute, budget=40), FSDPTrainer(make_spec(folder, compute, 40), 1, RECOMPUTE)
    other.load(folder)
    batch = near(one, make_batch(6))
    runs = []
    for layer in other.module.layers():
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    assert one.step(batch, ALONE) == other.step(batch, ALONE)
    assert_bitwise(everything(one), everything(other))
    micros = len(pack(batch, batch.masks, 40))
    assert len(runs) == 2 * 2 * micros, "each of two layers once forward and once again in the backward pass"


def test_bfloat16_arithmetic_is_near_float32_and_masters_stay_float32(folder):
    rough, fine = loaded(folder, compute="bfloat16"), loaded(folder)
    batch = near(fine, make_batch(6))
    want, got = fine.step(batch, ALONE), rough.step(batch, ALONE)
    # 8 bits of mantissa through two layers; the loss itself is a difference of large terms.
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=0.1)
    assert_close(gradients(rough), gradients(fine), bound=0.2)
    assert {w.dtype for w in rough.masters.weights.values()} == {torch.float32}
    rounded = {name: w.bfloat16() for name, w in rough.masters.weights.items()}
    assert_bitwise(dict(rough.masters.computing), rounded)
    inv_freq = rough.module.causal.model.rotary_emb.inv_freq
    assert inv_freq.dtype == torch.float32, "rotary frequencies are never rounded"


@pytest.mark.parametrize("what", ["logprobs", "advantages"])
def test_nan_at_an_active_token_names_the_trajectory_and_changes_nothing(folder, what):
    trainer = loaded(folder)
    batch = near(trainer, make_batch(3))
    trainer.step(batch, ALONE)
    before = everything(trainer)
    index = next(i for i, mask in enumerate(batch.masks) if i and any(mask))
    values = list(getattr(batch, what))
    row = [math.nan if on else v for v, on in zip(batch.logprobs[index], batch.masks[index], strict=True)]
    values[index] = tuple(row) if what == "logprobs" else math.nan
    said = {"logprobs": "log-probability of the engine", "advantages": "advantage"}[what]
    with pytest.raises(NonFiniteError, match=f"{said} .*{batch.trajectory_ids[index]};"):
        trainer.step(replace(batch, step=2, **{what: tuple(values)}), ALONE)
    assert_bitwise(everything(trainer), before)
    again, other = replace(batch, step=2), loaded(folder)
    other.step(batch, ALONE)
    assert trainer.step(again, ALONE) == other.step(again, ALONE), "the failed step left no trace"
    assert_bitwise(everything(trainer), everything(other))


def test_nan_at_a_masked_token_changes_nothing(folder):
    one, other = loaded(folder), loaded(folder)
    batch = near(one, make_batch(3))
    assert not all(map(all, batch.masks))
    holes = zip(batch.logprobs, batch.masks, strict=True)
    spoilt = tuple(tuple(v if on else math.nan for v, on in zip(*row, strict=True)) for row in holes)
    assert one.step(batch, ALONE) == other.step(replace(batch, logprobs=spoilt), ALONE)
    assert_bitwise(everything(one), everything(other))


def test_overflowing_ratio_names_the_trajectory(folder):
    trainer = loaded(folder)
    batch = near(trainer, make_batch(3))
    rows = list(batch.logprobs)
    rows[0] = (-1e4,) * len(rows[0])
    with pytest.raises(NonFiniteError, match=r"ratio.*trajectory-0;"):
        trainer.step(replace(batch, logprobs=tuple(rows)), ALONE)


def test_nan_weights_are_named_and_nothing_changes(folder):
    trainer = loaded(folder)
    batch = near(trainer, make_batch(3))
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        trainer.masters.weights[name][0, 0] = math.nan
    trainer.masters.round()
    before = {n: t for n, t in everything(trainer).items() if n != f"master/{name}"}
    with pytest.raises(NonFiniteError, match=name):
        trainer.step(batch, ALONE)
    with pytest.raises(NonFiniteError, match=name):
        trainer.logprobs(batch)
    assert_bitwise({n: t for n, t in everything(trainer).items() if n != f"master/{name}"}, before)
    assert trainer.completed == 0


def test_non_finite_gradient_names_the_tensor_and_changes_nothing(folder):
    trainer = loaded(folder)
    batch = near(trainer, make_batch(3))
    before = everything(trainer)
    poison = trainer.module.causal.model.layers[0].self_attn.q_proj.weight.register_hook(lambda g: g * math.inf)
    with pytest.raises(NonFiniteError, match=r"gradient of model\.layers\.0\.self_attn\.q_proj\.weight"):
        trainer.step(batch, ALONE)
    poison.remove()
    assert_bitwise(everything(trainer), before)


def test_empty_batch_counts_as_a_step_and_changes_no_weight(folder):
    trainer = loaded(folder)
    batch = near(trainer, make_batch(3))
    silent = replace(batch, masks=tuple((False,) * len(mask) for mask in batch.masks))
    before = everything(trainer)
    metrics = trainer.step(silent, ALONE)
    assert all(math.isfinite(value) for value in asdict(metrics).values() if isinstance(value, float))
    assert (metrics.mismatch_coverage, metrics.mismatch_mean) == (0.0, None), "nothing was compared, and that is said"
    assert (metrics.loss, metrics.tokens_trained, metrics.grad_norm) == (0.0, 0, 0.0)
    assert_bitwise(everything(trainer), before | {"step": torch.tensor([1])})
    nothing = replace(
        batch, step=2, prompts=(), **dict.fromkeys(("group", "replies", "logprobs", "masks", "sampled_by"), ())
    )
    assert (
        trainer.step(replace(nothing, advantages=(), rewards=(), routing=(), trajectory_ids=()), ALONE).tokens_trained
        == 0
    )
    fresh = loaded(folder)
    fresh.completed = 2
    assert trainer.step(replace(batch, step=3), ALONE) == fresh.step(replace(batch, step=3), ALONE), (
        "AdamW's count did not move"
    )


def test_steps_come_in_order(folder):
    trainer = loaded(folder)
    batch = near(trainer, make_batch(3))
    for step in (0, 2):
        with pytest.raises(ValueError, match=f"asked for step {step} after step 0"):
            trainer.step(replace(batch, step=step), ALONE)
    trainer.step(batch, ALONE)
    with pytest.raises(ValueError, match="asked for step 1 after step 1"):
        trainer.step(batch, ALONE)


@pytest.mark.parametrize("architecture", list(CONFIGS))
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_export_has_the_files_names_and_rounded_masters(folders, architecture, compute):
    trainer = loaded(folders[architecture], compute=compute)
    stored = load_file(Path(folders[architecture]) / "model.safetensors")
    exported = trainer.export()
    assert_bitwise(exported, {name: tensor.bfloat16() for name, tensor in stored.items()})
    assert ("lm_head.weight" in exported) == (architecture == "qwen3")
    assert all(tensor.is_contiguous() for tensor in exported.values())
    trainer.step(make_batch(1), ALONE)
    assert_bitwise(exported, {name: tensor.bfloat16() for name, tensor in stored.items()})


def test_export_in_float32_is_a_copy(folder):
    spec = make_spec(folder)
    trainer = FSDPTrainer(spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": "float32"})}), 1)
    trainer.load(folder)
    exported = trainer.export()
    stored = load_file(Path(folder) / "model.safetensors")
    trainer.step(make_batch(1), ALONE)
    assert_bitwise(exported, stored)


def test_master_digest_follows_the_weights(folder):
    trainer = loaded(folder)
    first = trainer.master_digest()
    assert first == loaded(folder, compute="bfloat16").master_digest()
    trainer.step(make_batch(1), ALONE)
    assert trainer.master_digest() != first


def spoil(folder, tmp_path, change):
    target = tmp_path / "model"
    target.mkdir()
    for path in Path(folder).iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    change(target)
    return str(target)


def without_a_tensor(target):
    tensors = load_file(target / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def with_nan(target):
    tensors = load_file(target / "model.safetensors")
    tensors["model.norm.weight"][3] = math.nan
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def truncated(target):
    path = target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])


def other_architecture(target):
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_tensor, "model.norm.weight"),
        (with_nan, "model.norm.weight has a NaN"),
        (truncated, "cannot be loaded"),
        (lambda target: (target / "model.safetensors").unlink(), "cannot be loaded"),
        (other_architecture, "gpt2"),
    ],
)
def test_bad_model_folder_is_refused(folder, tmp_path, change, message):
    bad = spoil(folder, tmp_path, change)
    with pytest.raises(ValueError, match=message):
        loaded(bad)


def test_prompt_longer_than_the_context_is_refused(folder):
    trainer = loaded(folder)
    batch = make_batch(1)
    with pytest.raises(PackingError, match="the model takes 64"):
        trainer.step(replace(batch, prompts=((1,) * 64, *batch.prompts[1:])), ALONE)


def test_nothing_works_before_load(folder):
    trainer = FSDPTrainer(make_spec(folder), threads=1)
    for call in (trainer.export, trainer.master_digest, trainer.fingerprint, lambda: trainer.save("nowhere")):
        with pytest.raises(RuntimeError, match="call load"):
            call()
    with pytest.raises(ValueError, match="threads=-1"):
        FSDPTrainer(make_spec(folder), threads=-1)


def test_fingerprint_says_what_decides_the_bits(folder):
    name = loaded(folder, compute="bfloat16").fingerprint()
    for part in ("FSDPTrainer", "llama-L2-H32-V61", "compute=bfloat16", "threads=1", torch.__version__):
        assert part in name
