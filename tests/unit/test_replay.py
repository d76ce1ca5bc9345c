"""Routing replay in the Hugging Face module, against transformers' own blocks with the choice forced upon them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_records import EXPERTS, LAYERS, TOP_K, altered, with_partial_records, with_records
from forced_experts import file_gradients, forced_logprobs, forced_model, own_choice
from tiny_policy import VOCABULARY, make_batch, make_folder, make_tiny_moe
from torch import Tensor, nn

from furlong.ops.policy.architecture import read_architecture
from furlong.ops.policy.packing import MicroBatch, empty_like, pack
from furlong.ops.policy.replay import Replay, check_records, route
from furlong.ops.policy.routing import RoutingError, decode
from furlong.ops.protocols import TrainBatch
from furlong.resources.trainers import experts
from furlong.resources.trainers.module import PolicyModule, load_module

CLOSE = 1e-11
"""Relative to a tensor's largest entry: float64's rounding, 1e-16 a product, through sums over up to 100 terms and three
layers; at most 1e-13 was measured."""


@pytest.fixture(scope="module", params=[True, False], ids=["renormalised", "plain"])
def folder(request, tmp_path_factory):
    return make_tiny_moe(tmp_path_factory.mktemp("moe"), norm_topk_prob=request.param)


@pytest.fixture
def module(folder) -> PolicyModule:
    module = load_module(folder)
    for weight in module.parameters():
        weight.data = weight.data.double()
    module.widen()
    return module


def values(module: PolicyModule, batch: TrainBatch, budget: int = 512) -> dict[tuple[int, int], Tensor]:
    """Log-probability of each wanted token."""
    found = {}
    for micro in pack(batch, batch.masks, budget):
        logprobs, _ = module(micro, batch.temperature)
        found |= zip(zip(micro.trajectory.tolist(), micro.offset.tolist(), strict=True), logprobs, strict=True)
    return found


def gradients(module: PolicyModule) -> dict[str, Tensor]:
    found = {name: weight.grad.clone() for name, weight in module.named_weights().items()}
    module.zero_grad()
    return found


def slope(batch: TrainBatch, index: int, offset: int) -> float:
    """Some loss: each token's log-probability has a weight of its own."""
    return batch.advantages[index] * (1 + offset)


@pytest.mark.parametrize("records", [with_records, with_partial_records])
@pytest.mark.parametrize(("letters", "budget"), [(VOCABULARY, 512), (2, 512), (2, 20)])
def test_log_probabilities_and_all_gradients_are_those_of_the_forced_choice(folder, module, records, letters, budget):
    """Packed with shared prompts and beginnings, whose records agree or not, in one micro-batch or several."""
    batch = records(make_batch(3, letters=letters))
    found = values(module, batch, budget)
    model = forced_model(folder)
    wanted = forced_logprobs(model, batch)
    for (index, offset), value in found.items():
        assert value.item() == pytest.approx(wanted[index][offset].item(), abs=CLOSE)
    sum(value * slope(batch, *at) for at, value in found.items()).backward()
    sum(wanted[index][offset] * slope(batch, index, offset) for index, offset in found).backward()
    found, wanted = gradients(module), file_gradients(model)
    assert found.keys() == wanted.keys() == read_architecture(folder).shapes().keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=CLOSE, atol=CLOSE * float(wanted[name].abs().max()))
    for layer in LAYERS:
        assert wanted[f"model.layers.{layer}.mlp.gate.weight"].norm() > 1e-2, "the router must learn"


def test_one_altered_expert_of_one_token_is_noticed(folder, module):
    """That the comparison above could fail: another set for one token, in the first layer, moves what comes after it."""
    batch = with_records(make_batch(3))
    other = next(ids for ids in ((0, 1), (2, 3)) if set(decode(batch.routing[0])[0, 0].tolist()) != set(ids))
    changed = replace(batch, routing=(altered(batch.routing[0], 0, 0, other), *batch.routing[1:]))
    before, after = values(module, batch), values(module, changed)
    moved = {at for at in before if abs((before[at] - after[at]).item()) > 1e6 * CLOSE}
    assert moved == {at for at in before if at[0] == 0}


def test_its_own_choice_changes_no_bit(module):
    batch = make_batch(3)
    recorded = own_choice(module, batch)
    (plain,), (replayed,) = (pack(one, one.masks, 512) for one in (batch, recorded))
    assert torch.equal(plain.tokens, replayed.tokens), "no record, so no token, of a prompt may differ here"
    for one, other in zip(module(plain, 0.8), module(replayed, 0.8), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_go_through_the_same_experts(module, reentrant):
    """With two micro-batches in flight, of one shape: the backward of the first runs after the forward of the second."""
    one, two = (with_records(make_batch(3), seed) for seed in (1, 2))
    micros = [pack(batch, batch.masks, 512)[0] for batch in (one, two)]
    assert micros[0].tokens.shape == micros[1].tokens.shape
    total = sum(module(micro, 0.8)[0].sum() for micro in micros)
    total.backward()
    wanted = gradients(module)
    module.causal.activation_checkpointing_enable({"use_reentrant": reentrant})
    module.train()
    module.causal.get_input_embeddings().register_forward_hook(lambda m, a, out: out.requires_grad_())
    computed = []
    module.causal.model.layers[0].mlp.gate.register_forward_hook(lambda *_: computed.append(None))
    results = [module(micro, 0.8)[0].sum() for micro in micros]
    for result in results:
        result.backward()
    assert len(computed) == 4, "each micro-batch once in the forward and once in the backward"
    found = gradients(module)
    # Sums over the micro-batches are taken in another order: one rounding of float64 each.
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=1e-12 * float(wanted[name].abs().max()))


def straying(monkeypatch, layer_call: int, token: int) -> None:
    """Have the n-th routing, counted from 0, send one token elsewhere."""
    calls = []

    def wrong(logits, top_k, renormalised, recorded):
        shares, chosen = route(logits, top_k, renormalised, recorded)
        if len(calls) == layer_call:
            chosen[token] = torch.tensor([i for i in range(EXPERTS) if i not in chosen[token].tolist()][:TOP_K])
        calls.append(None)
        return shares, chosen

    monkeypatch.setattr(experts, "route", wrong)


@pytest.mark.parametrize(("call", "layer"), [(0, 0), (1, 2)])
def test_a_token_that_goes_elsewhere_is_named(module, monkeypatch, call, layer):
    batch = with_records(make_batch(3))
    (micro,) = pack(batch, batch.masks, 512)
    row, at = divmod(int(micro.places[int(micro.place[-1])]), micro.tokens.shape[1])
    straying(monkeypatch, call, row * micro.tokens.shape[1] + at)
    index, position = int(micro.trajectory[-1]), int(micro.positions[row, at])
    record = sorted(decode(batch.routing[index])[position, call].tolist())
    message = rf"layer {layer}, trajectory number {index} of the batch, token {position}: .*experts \{record[:1]}"[:-1]
    with pytest.raises(RoutingError, match=message + rf".*\(1 of {micro.tokens.numel()} tokens"):
        module(micro, 0.8)


def test_one_expert_of_two_is_not_enough(module, monkeypatch):
    batch = with_records(make_batch(3))
    (micro,) = pack(batch, batch.masks, 512)

    def half(logits, top_k, renormalised, recorded):
        shares, chosen = route(logits, top_k, renormalised, recorded)
        chosen[0, 1] = next(i for i in range(EXPERTS) if i not in chosen[0].tolist())
        return shares, chosen

    monkeypatch.setattr(experts, "route", half)
    assert int(micro.positions[0, 0]) == 0
    with pytest.raises(RoutingError, match=r"layer 0, trajectory number \d of the batch, token 0: .*\(1 of"):
        module(micro, 0.8)


def test_an_expert_without_tokens_has_a_gradient_of_zero(module):
    """Sharded over ranks, a weight without a gradient on one of them would leave the others waiting."""
    micro = empty_like(pack(with_records(make_batch(3)), make_batch(3).masks, 512)[0])
    logprobs, entropy = module(micro, 0.8)
    assert logprobs.numel() == entropy.numel() == 0
    logprobs.sum().backward()
    for name, grad in gradients(module).items():
        assert not grad.any(), name


class Deaf(nn.Module):
    """A block that computes, and hears of no record."""

    def __init__(self, block: experts.ExpertBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        self.block.replay = None
        return self.block(hidden)


def test_a_layer_that_is_left_out_is_noticed(module):
    module.causal.model.layers[2].mlp = Deaf(module.causal.model.layers[2].mlp)
    (micro,) = pack(batch := with_records(make_batch(3)), batch.masks, 512)
    with pytest.raises(RoutingError, match=r"layers \[2\] have not replayed"):
        module(micro, 0.8)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"layers": (0, 1)}, r"layers \[0, 1\], this model has 2 of 6 in \[0, 2\]"),
        ({"top_k": 3}, "recorded as 3 of 6"),
        ({"experts": 7}, "recorded as 2 of 7"),
    ],
)
def test_records_of_another_model_are_refused(shape, message):
    batch = make_batch(3)
    check_records(with_records(batch), LAYERS, TOP_K, EXPERTS)
    check_records(batch, LAYERS, TOP_K, EXPERTS)
    check_records(batch, (), 0, 0)
    with pytest.raises(RoutingError, match=f"trajectory trajectory-0: .*{message}"):
        check_records(with_records(batch, **shape), LAYERS, TOP_K, EXPERTS)


def test_a_dense_model_replays_nothing(tmp_path):
    module = load_module(make_folder(tmp_path))
    (micro,) = pack(batch := with_records(make_batch(3)), batch.masks, 512)
    with pytest.raises(RoutingError, match="experts of 2 layers are recorded, the model has experts in 0 layers"):
        module(micro, 0.8)


def test_equally_likely_experts_are_chosen_as_the_engine_chooses_them():
    shares, chosen = route(torch.zeros(1, 5), 2, False, None)
    assert chosen.tolist() == [[0, 1]]
    assert shares.tolist() == [[pytest.approx(0.2)] * 2]


def test_replay_takes_the_experts_in_the_order_recorded():
    """As the engine sums them, which rounding depends on."""
    micro = MicroBatch(*[torch.zeros(1, 1, dtype=torch.int64)] * 8, experts=torch.tensor([[[[4, 1]]]]))
    recorded = Replay.of(micro, (3,)).recorded(3)
    assert route(torch.randn(1, 6), 2, True, recorded)[1].tolist() == [[4, 1]]


def test_the_blocks_equal_transformers_own(folder):
    """In float32, without a record: other orders of the same sums."""
    from transformers import AutoModelForCausalLM

    ours = load_module(folder).causal
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.arange(2, 40)[None]
    wanted = theirs(tokens, use_cache=False).logits
    mask = torch.zeros(1, 1, 38, 38).masked_fill_(torch.ones(38, 38, dtype=torch.bool).triu(1), float("-inf"))
    found = ours(tokens, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.detach().abs().max()))
