"""A draft learns beside the policy in one process: from the right states, with its own state, and unseen by the policy."""

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from draft_cases import Case, Truth
from lora_samples import with_adapters
from test_fsdp_trainer import assert_bitwise, everything, folder, folders  # noqa: F401 - fixtures
from tiny_policy import VOCABULARY, make_batch, make_folder, make_spec, make_tiny_moe
from torch import Tensor
from transformers import AutoModelForCausalLM

from furlong.kernels.layout import Rows
from furlong.ops.draft.inputs import DraftInputs, anchor_offsets
from furlong.ops.draft.layouts import write_draft
from furlong.ops.draft.shape import DraftError
from furlong.ops.draft.tensors import of_version
from furlong.ops.policy.parallel import Layout
from furlong.ops.protocols import OtherLogprobs, StepMetrics, TrainBatch
from furlong.resources.trainers.fsdp import FSDPTrainer
from furlong.resources.trainers.snapshots import SnapshotError

ALONE = OtherLogprobs()
EXACT = 1e-11
"""Bound between two float64 computations, relative to each tensor's norm: sums of a few hundred products in another order;
1e-15 was measured."""
DRAFT = ("draft_loss", "draft_agreement", "draft_acceptance", "draft_tokens", "draft_grad_norm")
KINDS = {"eagle3": {"kind": "eagle3"}, "block": {"kind": "block", "layers": 2, "proposals": 3}}
QUICK = {"learning_rate": 1e-2, "warmup_steps": 0}


def loaded(
    folder: str,  # noqa: F811
    draft: dict[str, Any] | None,
    compute: str = "float32",
    layout: Layout = Layout(),  # noqa: B008 - immutable
    dtype: str = "bfloat16",
    **more: Any,
) -> FSDPTrainer:
    spec = make_spec(folder, compute, **{"budget": 24, **more}).model_copy(update={"draft": draft or {}})
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": dtype})})
    trainer = FSDPTrainer(spec, 1, layout)
    trainer.load(folder)
    return trainer


def batch_at(step: int, letters: int = 4) -> TrainBatch:
    """Replies share beginnings, one has one token, some tokens are masked."""
    return make_batch(step, (4, 1, 3), step, letters)


def taken(trainer: FSDPTrainer, steps: range) -> list[StepMetrics]:
    return [trainer.step(batch_at(step), ALONE) for step in steps]


def draft_state(trainer: FSDPTrainer) -> dict[str, Tensor]:
    return {piece.name: tensor.clone() for piece, tensor in trainer.draft.state().items()}


def of_policy(metrics: StepMetrics) -> dict[str, Any]:
    return {name: value for name, value in asdict(metrics).items() if not name.startswith("draft_")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_not_a_bit_of_the_policy_depends_on_the_draft(folder, kind, compute):  # noqa: F811
    found = []
    for draft in (None, {**KINDS[kind], **QUICK, "max_grad_norm": 1e-3}):
        torch.manual_seed(99)
        trainer = loaded(folder, draft, compute, max_grad_norm=0.5)
        metrics = taken(trainer, range(1, 4))
        gradients = {name: weight.grad.clone() for name, weight in trainer.masters.weights.items()}
        exported = {name: t for name, t in trainer.export().items() if not name.startswith("draft.")}
        found.append((metrics, gradients, everything(trainer), exported, torch.get_rng_state(), trainer.fingerprint()))
    without, beside = found
    assert [of_policy(one) for one in without[0]] == [of_policy(one) for one in beside[0]]
    for one, other in zip(without[1:4], beside[1:4], strict=True):
        assert_bitwise(one, other)
    assert torch.equal(without[4], beside[4])
    assert all(metrics.grad_norm > 0.5 for metrics in beside[0]), "clipped"
    assert all(metrics.draft_grad_norm > 1e-3 and metrics.draft_seconds > 0 for metrics in beside[0]), "clipped"
    assert all(getattr(metrics, name) is None for metrics in without[0] for name in (*DRAFT, "draft_skipped"))


def fp64_norms(model: torch.nn.Module) -> torch.nn.Module:
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = lambda x, n=norm: (
                n.weight * x * (x.square().mean(-1, keepdim=True) + n.variance_epsilon).rsqrt()
            )
    return model


def unpacked(folder: str, batch: TrainBatch, trainer: FSDPTrainer) -> Case:  # noqa: F811
    """Every trajectory by itself through transformers' own model in float64."""
    model = fp64_norms(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa"))
    shape, settings = trainer.draft.shape, trainer.draft.settings
    seen: dict[int, Tensor] = {}
    for layer in shape.taps:
        model.model.layers[layer].register_forward_hook(lambda m, a, out, layer=layer: seen.update({layer: out[0]}))
    parts: list[tuple[Tensor, ...]] = []
    for index, reply in enumerate(batch.replies):
        prompt = batch.prompts[batch.group[index]]
        tokens = torch.tensor(prompt + reply)
        with torch.no_grad():
            final = model.model(tokens[None]).last_hidden_state[0]
        trained = torch.tensor([False] * (len(prompt) - 1) + list(batch.masks[index]) + [False])
        parts.append((torch.cat([seen[layer] for layer in shape.taps], 1), final, trained, tokens))
    taps, final, trained, tokens = (torch.cat(column) for column in zip(*parts, strict=True))
    lengths = [len(part[3]) for part in parts]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rows = Rows(document, torch.cat([torch.arange(length) for length in lengths]))
    offsets = None
    if shape.kind == "block":
        offsets = anchor_offsets(trainer.spec.seed, batch.step, batch.trajectory_ids, shape.block - 1)
    inputs = DraftInputs(rows, tokens, taps, final, trained, batch.temperature, offsets)
    tensors = {name: weight.detach().clone() for name, weight in trainer.draft.masters.weights.items()}
    maps = {name: tensor.clone() for name, tensor in trainer.draft.module.named_buffers()}
    embedding, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    return Case(shape, settings, tensors | maps, embedding, head, inputs)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_loss_and_gradients_are_those_of_a_decoder_on_unpacked_states(folders, family, kind, reduced, tmp_path):  # noqa: F811
    """Prompts that several replies share, replies that begin alike, masked tokens, replies cut by the mask."""
    place = folders[family]
    settings = {**KINDS[kind], "depths": 4, **({"proposals": 4} if kind == "block" else {})}
    if reduced:
        place = make_folder(tmp_path / "m", family)
        (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": 60}')
        settings["vocabulary"] = 20
    trainer = loaded(place, settings, "float64")
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in trainer.draft.masters.weights.items():
            noise = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
            weight.copy_(1 + 0.1 * noise if "norm" in name else 0.3 * noise)
        trainer.draft.masters.round()
    batch = batch_at(1)
    case = unpacked(place, batch, trainer)
    loss, sums, wanted = Truth(case).solve()
    metrics = trainer.step(batch, ALONE)
    assert metrics.draft_loss == pytest.approx(loss, rel=EXACT)
    assert metrics.draft_tokens == int(sums[0, 0])
    assert metrics.draft_agreement == pytest.approx(float(sums[3, 0] / sums[0, 0]))
    kept = (sums[2] / sums[0]).tolist()
    length = 1 + sum(math.prod(kept[:depth]) for depth in range(1, len(kept) + 1))
    assert metrics.draft_acceptance == pytest.approx(length, rel=EXACT)
    assert metrics.draft_grad_norm == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in wanted.values())))
    found = {name: weight.grad for name, weight in trainer.draft.masters.weights.items()}
    clip = min(1.0, 1.0 / metrics.draft_grad_norm)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((found[name] - clip * gradient).norm()) <= EXACT * float(gradient.norm() + 1e-9), name
    if reduced:
        assert 60 in case.tensors["t2d"].nonzero().flatten().tolist(), "what ends a reply can be proposed"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_two_and_two_steps_equal_four_bitwise(folder, tmp_path, kind, compute):  # noqa: F811
    straight = loaded(folder, {**KINDS[kind], **QUICK, "warmup_steps": 3}, compute)
    taken(straight, range(1, 3))
    straight.save(str(tmp_path / "two"))
    halfway, exported = straight.master_digest(), straight.export()
    last = taken(straight, range(3, 5))
    other = FSDPTrainer(straight.spec, 1)
    assert other.restore(str(tmp_path / "two")) == 2
    assert other.master_digest() == halfway
    assert_bitwise(other.export(), exported)
    assert taken(other, range(3, 5)) == last
    assert_bitwise(draft_state(other) | everything(other), draft_state(straight) | everything(straight))
    assert other.master_digest() == straight.master_digest() != halfway
    assert {name.split("/")[1] for name in draft_state(other)} >= {"master", "exp_avg", "exp_avg_sq", "updates"}


def test_a_state_with_another_draft_or_none_is_refused(folder, tmp_path):  # noqa: F811
    trainers = [loaded(folder, draft) for draft in (None, {"kind": "eagle3"}, {"kind": "eagle3", "taps": "1"})]
    for number, trainer in enumerate(trainers):
        trainer.save(str(tmp_path / str(number)))
    for number, trainer in enumerate(trainers):
        before = trainer.master_digest()
        for other in {0, 1, 2} - {number}:
            with pytest.raises(SnapshotError, match="draft/"):
                trainer.restore(str(tmp_path / str(other)))
        assert trainer.master_digest() == before
        trainer.restore(str(tmp_path / str(number)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_is_published_with_the_policy_from_step_one_on(tmp_path, dtype):
    home = make_folder(tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [3, 50]}')
    trainer = loaded(home, {"kind": "eagle3", "vocabulary": 20, **QUICK}, dtype=dtype)
    assert not of_version(trainer.export()), "version 0 is the model as it was found"
    first = trainer.master_digest()
    exported = []
    for step in (1, 2):
        taken(trainer, range(step, step + 1))
        exported.append(of_version(trainer.export()))
    for draft in exported:
        assert {name: tuple(tensor.shape) for name, tensor in draft.items()} == trainer.draft.shape.shapes()
        assert (draft["d2t"].dtype, draft["t2d"].dtype) == (torch.int64, torch.bool)
        assert {draft[name].dtype for name in trainer.draft.shape.parameters()} == {getattr(torch, dtype)}
        assert {3, 50} <= set(draft["t2d"].nonzero().flatten().tolist())
    assert torch.equal(exported[0]["d2t"], exported[1]["d2t"])
    assert any(not torch.equal(exported[0][name], exported[1][name]) for name in exported[0])
    assert trainer.master_digest() != first
    before = trainer.master_digest()
    with torch.no_grad():
        trainer.draft.masters.weights["fc.weight"][0, 0] += 1
    assert trainer.master_digest() != before, "it is digested"


def test_a_frozen_one_is_published_as_it_was_made(folder, tmp_path):  # noqa: F811
    trainer, plain = loaded(folder, {"kind": "eagle3", "train": False}), loaded(folder, None)
    made = trainer.draft.export(torch.bfloat16)
    for step in (1, 2):
        metrics = taken(trainer, range(step, step + 1))
        assert metrics == taken(plain, range(step, step + 1)), "nothing is measured of it, as nothing is computed"
        exported = trainer.export()
        assert_bitwise({name: t for name, t in exported.items() if name.startswith("draft.")}, made)
    trainer.save(str(tmp_path / "state"))
    other = FSDPTrainer(trainer.spec, 1)
    other.restore(str(tmp_path / "state"))
    assert_bitwise(other.export(), trainer.export())
    assert other.master_digest() == trainer.master_digest() != plain.master_digest()


def test_it_starts_from_a_folder(folder, tmp_path):  # noqa: F811
    source = loaded(folder, {"kind": "eagle3", **QUICK})
    taken(source, range(1, 3))
    tensors = of_version(source.draft.export(torch.float32))
    write_draft(tmp_path / "draft", tensors, source.draft.shape, "sglang")
    trainer = loaded(folder, {"kind": "eagle3", "start": str(tmp_path / "draft")})
    assert_bitwise(of_version(trainer.draft.export(torch.float32)), tensors)
    assert taken(trainer, range(1, 2))[0].draft_loss > 0
    with pytest.raises(DraftError, match="taps"):
        loaded(folder, {"kind": "eagle3", "start": str(tmp_path / "draft"), "taps": "0"})


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_what_it_sees_again_and_again(folder, kind):  # noqa: F811
    trainer = loaded(folder, {**KINDS[kind], **QUICK}, learning_rate=1e-5)
    found = [trainer.step(replace(batch_at(1), step=step), ALONE) for step in range(1, 9)]
    assert found[-1].draft_loss < 0.9 * found[0].draft_loss
    assert found[-1].draft_acceptance > found[0].draft_acceptance
    # A block's anchors lie elsewhere in every step.
    assert all(m.draft_tokens > 0 and (kind == "block" or m.draft_tokens == found[0].draft_tokens) for m in found)


def test_no_number_depends_on_split_or_order(folder):  # noqa: F811
    found = []
    for budget, reverse in ((512, False), (16, False), (40, True)):
        batch = batch_at(1)
        if reverse:
            names = ("group", "replies", "logprobs", "masks", "sampled_by", "advantages", "rewards", "routing",
                     "trajectory_ids")  # fmt: skip
            batch = replace(batch, **{name: getattr(batch, name)[::-1] for name in names})
        trainer = loaded(folder, {"kind": "block", "proposals": 3}, "float64", budget=budget)
        metrics = trainer.step(batch, ALONE)
        grads = {name: weight.grad for name, weight in trainer.draft.masters.weights.items()}
        found.append(([getattr(metrics, name) for name in DRAFT], grads))
    for numbers, grads in found[1:]:
        assert numbers == pytest.approx(found[0][0], rel=EXACT)
        for name, gradient in grads.items():
            assert float((gradient - found[0][1][name]).norm()) <= EXACT * float(gradient.norm() + 1e-9), name


@pytest.mark.parametrize("what", ["gradient", "weight", "loss"])
def test_a_number_that_is_not_finite_is_told_and_costs_the_draft_its_step_alone(folder, what, monkeypatch):  # noqa: F811
    trainer, plain = loaded(folder, {"kind": "eagle3", **QUICK}), loaded(folder, None)
    for each in (trainer, plain):
        taken(each, range(1, 2))
    masters = trainer.draft.masters
    if what == "weight":
        with torch.no_grad():
            masters.weights["midlayer.mlp.up_proj.weight"][1, 1] = math.nan
        masters.round()
    before, handle = draft_state(trainer), None
    if what == "gradient":
        handle = trainer.draft.module.get_parameter("norm.weight").register_hook(lambda g: g * math.inf)
    if what == "loss":
        from furlong.resources.trainers import draft_trainer as file

        original = file.draft_gradients
        monkeypatch.setattr(file, "draft_gradients", lambda *a, **k: replace(original(*a, **k), loss=math.inf))
    metrics = trainer.step(batch_at(2), ALONE)
    told = {
        "gradient": "of the draft, gradient of norm.weight is not finite",
        "weight": "draft weight midlayer.mlp.up_proj.weight has a NaN or an infinity, so: gradient of ",
        "loss": "of the draft, loss inf is not finite",
    }
    assert metrics.draft_skipped.startswith(told[what])
    assert [getattr(metrics, name) for name in DRAFT] == [None, None, None, 0, None]
    after = draft_state(trainer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].nan_to_num(7.0), after[name].nan_to_num(7.0)) for name in before)
    assert of_policy(metrics) == of_policy(plain.step(batch_at(2), ALONE))
    assert_bitwise(everything(trainer), everything(plain))
    if handle:
        handle.remove()
        assert taken(trainer, range(3, 4))[0].draft_skipped is None
        assert float(draft_state(trainer)["draft/updates"]) == 2


def test_a_policy_that_is_not_finite_stops_both_and_changes_nothing(folder):  # noqa: F811
    trainer = loaded(folder, {"kind": "eagle3", **QUICK})
    taken(trainer, range(1, 2))
    before = draft_state(trainer) | everything(trainer)
    batch = batch_at(2)
    bad = replace(batch, advantages=(math.inf, *batch.advantages[1:]))
    with pytest.raises(ValueError, match="not finite"):
        trainer.step(bad, ALONE)
    assert_bitwise(draft_state(trainer) | everything(trainer), before)
    clean = loaded(folder, {"kind": "eagle3", **QUICK})
    assert taken(trainer, range(2, 3)) == taken(clean, range(1, 3))[1:]
    assert trainer.master_digest() == clean.master_digest()


def test_nothing_to_learn_is_told(folder):  # noqa: F811
    """No trained token; or none behind which an anchor could stand: a prompt and a reply of one token."""
    trainer = loaded(folder, {"kind": "eagle3", **QUICK})
    taken(trainer, range(1, 2))
    before, batch = draft_state(trainer), batch_at(2)
    empty = replace(batch, masks=tuple((False,) * len(mask) for mask in batch.masks))
    short = replace(batch, step=3, prompts=tuple(prompt[:1] for prompt in batch.prompts),
                    masks=tuple((True, *(False,) * (len(mask) - 1)) for mask in batch.masks))  # fmt: skip
    for one in (empty, short):
        metrics = trainer.step(one, ALONE)
        assert metrics.draft_skipped == "no token to learn in this step"
        assert metrics.draft_tokens == 0
        assert metrics.draft_loss is None
        assert_bitwise(draft_state(trainer), before)


def test_a_trajectory_learnt_twice_or_never_is_noticed(folder):  # noqa: F811
    trainer = loaded(folder, {"kind": "eagle3", **QUICK})
    before, learn = draft_state(trainer), trainer.draft.learn
    for times in (0, 2):
        trainer.draft.learn = lambda *args, times=times: [learn(*args) for _ in range(times)]
        with pytest.raises(ValueError, match=r"draft learnt from|were counted in the whole step"):
            trainer.step(batch_at(1), ALONE)
        assert_bitwise(draft_state(trainer), before)


def test_weights_with_a_draft_can_be_compared_with(folder):  # noqa: F811
    """Older versions, which tokens were sampled by, and the base model."""
    trainer = loaded(folder, {"kind": "eagle3", **QUICK})
    taken(trainer, range(1, 2))
    exported = trainer.export()
    policy = {name: t for name, t in exported.items() if not name.startswith("draft.")}
    assert len(policy) < len(exported)
    batch = batch_at(2)
    assert trainer.logprobs(batch, None, exported) == trainer.logprobs(batch, None, policy)


@pytest.mark.parametrize("kind", ["adapters", "critic", "exact", "experts", "recompute", "untied"])
def test_beside_every_kind_of_policy(tmp_path, kind):
    home = make_tiny_moe(tmp_path / "m") if kind == "experts" else make_folder(
        tmp_path / "m", "qwen3" if kind == "untied" else "llama"
    )  # fmt: skip
    found = []
    for draft in (None, {"kind": "eagle3", "learning_rate": 2e-3, "warmup_steps": 2}):
        more = {"name": "ppo"} if kind == "critic" else {}
        spec = make_spec(home, "float32", 24, learning_rate=1e-4, **more).model_copy(update={"draft": draft or {}})
        spec = with_adapters(spec, dtype="float32") if kind == "adapters" else spec
        if kind == "exact":
            spec = spec.model_copy(
                update={
                    "model": spec.model.model_copy(update={"dtype": "float32"}),
                    "trainer": spec.trainer.model_copy(update={"exact": True}),
                }
            )
        trainer = FSDPTrainer(spec, 1, Layout(recompute=kind == "recompute"))
        trainer.load(home)
        metrics = [trainer.step(replace(batch_at(1), step=step), ALONE) for step in range(1, 7)]
        found.append(([of_policy(one) for one in metrics], everything(trainer)))
    assert found[0][0] == found[1][0]
    assert_bitwise(found[0][1], found[1][1])
    assert metrics[-1].draft_loss < metrics[0].draft_loss
    assert len(of_version(trainer.export())) == len(trainer.draft.shape.shapes())
    assert trainer.draft.shape.vocab == VOCABULARY
