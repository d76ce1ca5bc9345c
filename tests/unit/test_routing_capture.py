"""What a batch records of the experts that tokens went through, against the router of transformers.

Batches are driven step by step, so that flips, aborts and newcomers come where a test says.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import EXPERTS, VOCABULARY, experts_of, make_folder, make_tiny_moe
from transformers import AutoModelForCausalLM, DynamicCache

from furlong.ops.policy import batch as batches
from furlong.ops.policy.architecture import read_architecture
from furlong.ops.policy.batch import Batch, Turn
from furlong.ops.policy.checkpoint import read_tensors
from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.kv_cache import PAGE
from furlong.ops.policy.live import Live
from furlong.ops.policy.reply import Reply
from furlong.ops.policy.routing import decode, join
from furlong.ops.protocols import GenerateRequest, Routing, Sample

CONTEXT = 640
MOST_STEPS = 2000


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two versions: every matrix moves, attention's too."""
    first, second = (make_tiny_moe(tmp_path_factory.mktemp(n), max_position_embeddings=CONTEXT) for n in ("one", "two"))
    generator = torch.Generator().manual_seed(5)
    old = load_file(f"{first}/model.safetensors")
    new = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in old.items()}
    save_file(new, f"{second}/model.safetensors", {"format": "pt"})
    return first, second


@pytest.fixture(scope="module")
def models(folders):
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in folders]


@pytest.fixture(scope="module")
def lives(folders):
    return [make_live(path, version) for version, path in enumerate(folders)]


def make_live(folder: str, version: int) -> Live:
    arch = read_architecture(folder)
    return Live(version, Decoder(arch, read_tensors(folder, arch, torch.float32)), serial=version + 1)


def request(name: str = "a", prompt: tuple[int, ...] = (5, 3, 8, 1), length: int = 20, seed: int = 11):
    return GenerateRequest(name, prompt, seed, length, 1.0)


class Drive:
    """A batch, and the samples of what ended in it."""

    def __init__(self, live: Live):
        self._arch = live.decoder.architecture
        self.batch = Batch(self._arch, self._arch, True)
        self.samples: dict[str, Sample] = {}

    def turn(self, live: Live, *requests: GenerateRequest, **rest) -> None:
        ended = self.batch.turn(Turn(requests, **rest), live)
        assert not ended.broken
        for reply, reason in ended.replies:
            self.samples[reply.request.request_id] = reply.sample(reason, self._arch, 0.0)

    def steps(self, live: Live, count: int) -> None:
        for _ in range(count):
            self.turn(live)

    def rest(self, live: Live) -> dict[str, Sample]:
        for _ in range(MOST_STEPS):
            if not self.batch.size:
                return self.samples
            self.turn(live)
        raise AssertionError(f"{self.batch.size} requests have not ended after {MOST_STEPS} steps")


def drawn(live: Live, asked: list[GenerateRequest]) -> list[Sample]:
    drive = Drive(live)
    drive.turn(live, *asked)
    samples = drive.rest(live)
    return [samples[one.request_id] for one in asked]


def sets(routing: Routing | None) -> np.ndarray:
    assert routing is not None
    assert (routing.layers, routing.top_k, routing.experts) == ((0, 2), 2, EXPERTS["num_experts"])
    return np.sort(decode(routing), axis=-1)


def fed(asked: GenerateRequest, sample: Sample) -> tuple[int, ...]:
    """All tokens but the last, which had no forward pass."""
    return (asked.prompt + asked.prefix + sample.tokens)[:-1]


def test_every_token_has_the_experts_that_transformers_chooses(lives, models):
    """Prompts of one token, prompts that are shared, one that takes several steps, replies of one token."""
    shared = tuple(range(2, 40))
    asked = [
        request("a"), request("b", (7,)), request("c", shared, seed=1), request("d", shared, seed=2),
        request("e", length=1), request("f", shared[:-1], 33, 4), request("g", shared * 9),
    ]  # fmt: skip
    for one, sample in zip(asked, drawn(lives[0], asked), strict=True):
        rows = sets(sample.routing)
        assert sample.routing.first == 0
        assert len(rows) == len(one.prompt) + len(sample.tokens) - 1
        assert np.array_equal(rows, experts_of(models[0], fed(one, sample)))


def test_routing_is_the_same_in_any_company(lives):
    asked = [request(str(i), tuple(range(1, 2 + 5 * i)), seed=i) for i in range(6)]
    for one, sample in zip(asked, drawn(lives[0], asked), strict=True):
        (alone,) = drawn(lives[0], [one])
        assert alone == sample


@pytest.mark.parametrize("cut", [0, 1, 7, 18])
def test_a_resumed_reply_records_what_an_uninterrupted_one_does(lives, cut):
    whole_request = request(prompt=tuple(range(2, 40)))
    (whole,) = drawn(lives[0], [whole_request])
    drive = Drive(lives[0])
    drive.turn(lives[0], whole_request)
    drive.steps(lives[0], cut)
    drive.turn(lives[0], reasons={"a": "abort"})
    first = drive.rest(lives[0])["a"]
    assert (first.finish_reason, len(first.tokens)) == ("abort", cut + 1)
    (second,) = drawn(lives[0], [replace(whole_request, prefix=first.tokens)])
    assert first.tokens + second.tokens == whole.tokens
    assert second.routing.first == len(whole_request.prompt) + cut
    assert join([first.routing, second.routing]) == whole.routing


def test_interruptions_amid_prompt_and_prefix_leave_no_gap(lives):
    """A part without tokens has no rows, so that the next one, which feeds prompt or prefix again, begins where it ends."""
    long = request(prompt=tuple(np.random.default_rng(2).integers(VOCABULARY, size=400).tolist()), length=200)
    (whole,) = drawn(lives[0], [long])
    drive = Drive(lives[0])
    drive.turn(lives[0], long)
    drive.turn(lives[0], reasons={"a": "abort"})
    amid_prompt = drive.rest(lives[0])["a"]
    assert (amid_prompt.tokens, amid_prompt.routing.first, amid_prompt.routing.rows) == ((), 0, 0)
    assert join([amid_prompt.routing, whole.routing]) == whole.routing
    prefix = whole.tokens[:150]
    resumed = replace(long, prefix=prefix)
    drive.turn(lives[0], resumed)
    drive.turn(lives[0], reasons={"a": "abort"})
    amid_prefix = drive.rest(lives[0])["a"]
    assert (amid_prefix.tokens, amid_prefix.routing.first, amid_prefix.routing.rows) == ((), 549, 0)
    (second,) = drawn(lives[0], [resumed])
    assert np.array_equal(decode(join([amid_prefix.routing, second.routing])), decode(whole.routing)[549:])


@pytest.mark.parametrize("before", [0, 150])
def test_a_prompt_shared_with_a_resumed_reply_is_recorded_in_full(lives, models, before):
    """The resumed one records nothing of the prompt, and is still computing its prefix when the others could begin."""
    rng = np.random.default_rng(0)
    prompt, prefix = (tuple(rng.integers(VOCABULARY, size=size).tolist()) for size in (250 - before, 300))
    asked = [
        replace(request("resumed", prompt, 310), prefix=prefix),
        request("fresh", prompt, 8),
        replace(request("shorter", prompt, 110), prefix=prefix[:100]),
        request("last", prompt, 8, 3),
    ]
    for one, sample in zip(asked, drawn(lives[0], asked), strict=True):
        first = len(one.prompt) + len(one.prefix) - 1 if one.prefix else 0
        assert sample.routing.first == first
        assert np.array_equal(sets(sample.routing), experts_of(models[0], fed(one, sample))[first:])


@pytest.mark.parametrize("retract", [False, True])
@pytest.mark.parametrize("flip", [1, 9, 40])
def test_a_flip_amid_a_reply_changes_no_row_that_was_recorded(lives, models, flip, retract):
    """Rows until the flip are those of the old weights, whatever is computed again; later ones those of the new, over
    the keys and values of the old ones (in place) or over new ones (retract)."""
    asked = [
        request("a", length=60),
        request("b", tuple(range(2, 40)), 60, 3),
        request("c", tuple(range(2, 40)), 60, 4),
    ]
    drive = Drive(lives[0])
    drive.turn(lives[0], *asked)
    drive.steps(lives[0], flip)
    drive.turn(lives[1], retract=retract)
    samples = drive.rest(lives[1])
    for one in asked:
        sample = samples[one.request_id]
        assert [version for version, _, _ in sample.versions] == [0, 1]
        tokens = fed(one, sample)
        # The last token that the old weights drew is fed to the new ones.
        old = len(one.prompt) + sample.versions[0][2] - 1
        rows = sets(sample.routing)
        assert len(rows) == len(tokens)
        cache = DynamicCache()
        assert np.array_equal(rows[:old], experts_of(models[0], tokens[:old], cache))
        over_old, over_new = experts_of(models[1], tokens[old:], cache), experts_of(models[1], tokens)
        assert np.array_equal(rows[old:], over_new[old:] if retract else over_old)
        assert not np.array_equal(rows, over_new)


@pytest.mark.parametrize("retract", [False, True])
def test_a_newcomer_gets_no_rows_of_older_weights(lives, models, retract):
    """Its prompt is that of a reply whose keys and values were computed again after a flip, and whose rows were not."""
    shared = tuple(range(2, 40))
    drive = Drive(lives[0])
    drive.turn(lives[0], request("old", shared, 60))
    drive.steps(lives[0], 5)
    drive.turn(lives[1], retract=retract)
    newcomers = [request(name, shared, 5, seed) for seed, name in enumerate(("new", "next"))]
    drive.turn(lives[1], *newcomers)
    samples = drive.rest(lives[1])
    for one in newcomers:
        assert np.array_equal(
            sets(samples[one.request_id].routing), experts_of(models[1], fed(one, samples[one.request_id]))
        )


def test_a_flip_amid_a_prompt_records_each_token_once(lives, models):
    """The prompt's first part went through the old weights, whose rows stay when all is computed again."""
    prompt = tuple(np.random.default_rng(3).integers(VOCABULARY, size=400).tolist())
    asked = [request("a", prompt, 5), request("b", prompt, 5, 2)]
    drive = Drive(lives[0])
    drive.turn(lives[0], *asked)
    drive.turn(lives[1], retract=True)
    samples = drive.rest(lives[1])
    for one, part in zip(asked, (batches.PREFILL_TOKENS, 0), strict=True):
        sample = samples[one.request_id]
        assert sample.versions == ((1, 0, 5),)
        tokens = fed(one, sample)
        want = np.concatenate([experts_of(models[0], tokens)[:part], experts_of(models[1], tokens)[part:]])
        assert np.array_equal(sets(sample.routing), want)


def test_replies_put_off_for_want_of_memory_record_each_token_once(lives, models, monkeypatch):
    arch = lives[0].decoder.architecture
    page = 2 * arch.layers * arch.kv_heads * arch.head_dim * PAGE * torch.float32.itemsize
    monkeypatch.setattr(batches, "CACHE_BYTES", 5 * page)
    put_off: list[str] = []
    leave = Batch._put_off

    def put_off_and_tell(self: Batch, reply: Reply) -> None:
        put_off.append(reply.request.request_id)
        leave(self, reply)

    monkeypatch.setattr(Batch, "_put_off", put_off_and_tell)
    asked = [request(str(i), tuple(range(1, 30 + i)), 140, i) for i in range(4)]
    samples = drawn(lives[0], asked)
    assert put_off
    for one, sample in zip(asked, samples, strict=True):
        assert np.array_equal(sets(sample.routing), experts_of(models[0], fed(one, sample)))


def test_dense_models_record_nothing(tmp_path):
    live = make_live(make_folder(tmp_path), 0)
    assert drawn(live, [request(length=3)])[0].routing is None
