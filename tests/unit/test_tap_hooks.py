"""TapHooks: each tap of a training forward is put once, whatever recomputes it; nothing else is."""

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from furlong.kernels.tap_channel import TapChannel
from furlong.kernels.tap_hooks import TapHooks
from furlong.kernels.tap_protocol import EMBEDDING, FINAL, TapError, TapKey

ROWS, HIDDEN = 5, 4
TAPS = {EMBEDDING: 0, 1: 0, FINAL: 0}


@pytest.fixture(autouse=True)
def no_cuda_generator(monkeypatch):
    """Megatron's checkpoint keeps the state of CUDA's generator, which a CPU has not."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.zeros(0, dtype=torch.uint8))
        monkeypatch.setattr(megatron_random, "_set_cuda_rng_state", lambda *_, **__: None)


class Layer(nn.Module):
    """Returns a pair, as Megatron's layers do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return hidden + torch.tanh(self.linear(hidden)), None


class Model(nn.Module):
    """An embedding, two layers and a norm; the layers run below `recompute`."""

    def __init__(self, recompute=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(11, HIDDEN), nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        return self.norm(self.recompute(self.run, hidden) if self.recompute else self.run(hidden))

    def run(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden, _ = layer(hidden)
        return hidden

    def taps(self, ids: Tensor) -> dict[int, Tensor]:
        with torch.no_grad():
            embedded = self.embedding(ids)
            return {EMBEDDING: embedded, 1: self.layers[0](embedded)[0], FINAL: self.norm(self.run(embedded))}


RECOMPUTE = {
    "none": None,
    "torch": lambda run, hidden: checkpoint(run, hidden, use_reentrant=False),
    "reentrant": lambda run, hidden: checkpoint(run, hidden, use_reentrant=True),
    "megatron": lambda run, hidden: tensor_parallel.checkpoint(run, False, hidden),
}


def ids(micro_batch: int) -> Tensor:
    return torch.randint(11, (ROWS, 1), generator=torch.Generator().manual_seed(micro_batch))


def tapped(model: Model, slots: int = 3) -> tuple[TapChannel, TapHooks]:
    channel = TapChannel(None, 0, 0, TAPS, ROWS, HIDDEN, torch.float32, [slots], 5.0)
    return channel, TapHooks(channel, {EMBEDDING: model.embedding, 1: model.layers[0], FINAL: model.norm})


def took(channel: TapChannel, model: Model, micro_batch: int) -> bool:
    """Whether a micro-batch's taps are those of the model, bit for bit."""
    found, expected = channel.take(0, micro_batch), model.taps(ids(micro_batch))
    same = list(found) == list(expected) and all(torch.equal(found[k], expected[k].flatten(0, 1)) for k in expected)
    channel.release(0, micro_batch)
    return same


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_tap_is_put_once_however_the_model_recomputes(recompute):
    # A second put of a key is an error of the channel, so it would not pass unseen.
    model = Model(RECOMPUTE[recompute])
    channel, hooks = tapped(model)
    losses = []
    for micro_batch in range(3):
        hooks.begin(0, micro_batch)
        losses.append(model(ids(micro_batch)).square().sum())
        if micro_batch:
            losses.pop(0).backward()
    losses.pop().backward()
    hooks.end()
    assert all(took(channel, model, micro_batch) for micro_batch in range(3))


@pytest.mark.parametrize("recompute", ["torch", "reentrant", "megatron"])
def test_a_recompute_between_begin_and_forward_is_not_mistaken_for_it(recompute):
    model = Model(RECOMPUTE[recompute])
    channel, hooks = tapped(model)
    hooks.begin(0, 0)
    loss = model(ids(0)).square().sum()
    hooks.begin(0, 1)
    loss.backward()
    model(ids(1)).square().sum().backward()
    assert took(channel, model, 0)
    assert took(channel, model, 1)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_forward_only_passes_put_nothing(recompute, off):
    model = Model(RECOMPUTE[recompute])
    channel, hooks = tapped(model)
    with off():
        hooks.begin(0, 0)
        model(ids(0))
        model(ids(0))
    hooks.end()
    # Nor does a forward that nobody announced.
    model(ids(0)).sum().backward()
    with pytest.raises(TapError, match="were not put"):
        channel.take(0, 0)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_policys_gradients_are_the_same_bits_with_taps(recompute):
    gradients = []
    for taps in (False, True):
        model = Model(RECOMPUTE[recompute])
        if taps:
            _, hooks = tapped(model)
            hooks.begin(0, 0)
        output = model(ids(0))
        output.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()] + [output.detach()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_what_was_put_is_a_copy_without_gradient():
    model = Model()
    channel, hooks = tapped(model)
    hooks.begin(0, 0)
    output = model(ids(0))
    expected = output.detach().clone()
    # What a pipeline does to an output once it is sent.
    output.data = torch.empty(1)
    found = channel.take(0, 0)
    assert torch.equal(found[FINAL], expected.flatten(0, 1))
    assert not any(tap.requires_grad for tap in found.values())


def test_modules_that_a_forward_does_not_reach_are_an_error_and_a_failed_forward_can_be_cancelled():
    model = Model()
    channel, hooks = tapped(model, slots=1)
    hooks.begin(0, 0)
    model.embedding(ids(0))
    with pytest.raises(TapError, match=r"never ran the modules of layers \[1, 2147483647\]"):
        hooks.begin(0, 1)
    channel.cancel(0, 0)
    for micro_batch in range(1, 9):
        hooks.begin(0, micro_batch)
        model.embedding(ids(0))
        hooks.cancel()
    hooks.begin(0, 9)
    model(ids(9))
    assert took(channel, model, 9)
    hooks.remove()
    hooks.begin(0, 10)
    model(ids(10))
    with pytest.raises(TapError, match="never ran"):
        hooks.end()


def test_a_backward_after_the_release_fails_instead_of_reading_what_came_next():
    channel = TapChannel(None, 0, 0, {1: 0}, ROWS, HIDDEN, torch.float32, [1], 5.0)
    weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
    for released in (False, True):
        channel.put(TapKey(0, int(released), 1), torch.randn(ROWS, HIDDEN))
        loss = (channel.take(0, int(released))[1] @ weight).sum()
        if released:
            channel.release(0, 1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
            channel.release(0, 0)


def test_a_channel_whose_arguments_do_not_fit_is_refused():
    good = {"group": None, "stage": 0, "draft_stage": 0, "taps": {1: 0}, "rows": 2, "hidden": 4,
            "dtype": torch.float32, "slots": [1], "deadline": 1.0}  # fmt: skip
    TapChannel(**good).close()
    for change, said in (
        ({"stage": 1}, "among the group's 1 stages"), ({"taps": {}}, "no taps"), ({"taps": {1: 1}}, "after the draft"),
        ({"slots": [1, 1]}, "2 slot counts for 1 stages"), ({"dtype": torch.int64}, "cannot travel"),
        ({"deadline": 0.0}, "could not wait"), ({"taps": {1: -1}}, "no stage"), ({"rows": -1}, "at least"),
        ({"hidden": 0}, "at least"), ({"slots": [0]}, "slots hold nothing"), ({"project": 0}, "at least"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            TapChannel(**good | change)


def test_local_taps_find_no_slot_when_the_draft_releases_none():
    channel = TapChannel(None, 0, 0, {1: 0, 2: 0}, ROWS, HIDDEN, torch.float32, [2], 5.0)
    for micro_batch in range(2):
        channel.put(TapKey(0, micro_batch, 1), torch.zeros(ROWS, HIDDEN))
    with pytest.raises(TapError, match="slots of the draft's own stage full"):
        channel.put(TapKey(0, 2, 1), torch.zeros(ROWS, HIDDEN))
    with pytest.raises(TapError, match="has 5 rows, but layer 2 has 3"):
        channel.put(TapKey(0, 0, 2), torch.zeros(3, HIDDEN))
    channel.cancel(0, 0)
    channel.put(TapKey(0, 2, 1), torch.zeros(0, HIDDEN))
    channel.put(TapKey(0, 2, 2), torch.zeros(0, HIDDEN))
    assert channel.take(0, 2)[2].shape == (0, HIDDEN)
