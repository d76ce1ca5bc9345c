"""A reply is the same bits in any company: random schedules of whole engines, real layer shapes, and single products."""

import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from furlong.ops.policy import batch, packed_linear
from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.batch import Batch, Turn
from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.live import Live
from furlong.ops.policy.packed_linear import PackedLinear
from furlong.ops.policy.routing import decode, join
from furlong.ops.policy.row_bits import MOST, by_rows, cancelling, row_bits
from furlong.ops.protocols import GenerateRequest
from furlong.ops.weights.delta import encode
from furlong.ops.weights.digest import manifest
from furlong.resources.engines.local import LocalEngine

SIZES = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2, "eos_token_id": 7,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, tie_word_embeddings=False, head_dim=16, moe_intermediate_size=20, num_experts=7, num_experts_per_tok=3,
        norm_topk_prob=True, mlp_only_layers=[1],
    ),
}  # fmt: skip
CASES = [("llama", "float32", 1), ("llama", "bfloat16", 2), ("qwen3", "bfloat16", 1), ("qwen3_moe", "float32", 1)]
DEADLINE = 60.0


def save_model(kind, folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).float().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=CASES, ids=[f"{kind}-{dtype}-tp{tp}" for kind, dtype, tp in CASES])
def engine(request, tmp_path_factory):
    kind, dtype, tp = request.param
    made = LocalEngine(save_model(kind, tmp_path_factory.mktemp(kind)), 0, dtype, 1, [7, 40, 90], tp=tp)
    try:
        yield made
    finally:
        made.close()


def requests(count, seed):
    """Groups with one prompt, single ones, long and short; every way of drawing."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        prompt = tuple(rng.randrange(131) for _ in range(rng.choice([1, 2, 9, 63, 64, 65, 140])))
        for _ in range(rng.choice([1, 1, 3])):
            name = f"{seed}.{len(found)}"
            rules = {"top_k": rng.choice([0, 0, 5]), "top_p": rng.choice([1.0, 0.8]), "min_p": rng.choice([0.0, 0.05])}
            heat, new = rng.choice([1.0, 1.0, 0.7, 0.0]), rng.choice([1, 5, 40, 80])
            found.append(GenerateRequest(name, prompt, rng.getrandbits(60), new, heat, **rules))
    return found[:count]


def drawn(sample):
    return (
        sample.tokens,
        sample.logprobs,
        sample.model_logprobs,
        sample.versions,
        sample.finish_reason,
        sample.routing,
    )


def all_of(engine, names):
    """Collected samples by id, acknowledged one call later."""
    found, until = {}, time.monotonic() + DEADLINE
    while names - found.keys():
        assert time.monotonic() < until
        found |= {s.request_id: s for s in engine.collect(1.0, list(found))}
    engine.collect(0.0, list(found))
    return found


def test_random_company_changes_nothing(engine, monkeypatch):
    """Each request alone first; then all again, in other orders, in bursts that join a running batch, from two threads,
    with strangers that are aborted around them, in a cache so small that replies are put off, and in small chunks."""
    mine = requests(14, 1)
    alone = {r.request_id: drawn(engine.generate([r])[0]) for r in mine}
    assert {one[4] for one in alone.values()} == {"stop", "length"}
    for round_, (pages, chunk) in enumerate([(1000, 256), (9, 256), (1000, 23)]):
        rng = random.Random(round_)
        monkeypatch.setattr(batch, "PREFILL_TOKENS", chunk)
        if engine.health()["tp"] == 1:  # the other ranks of a split engine would have to be told
            part, size = engine._architecture, 4 if engine._dtype == "float32" else 2
            monkeypatch.setattr(batch, "CACHE_BYTES", pages * 2 * part.layers * part.kv_heads * 16 * 64 * size)
            engine._ranks.clear()
        elif chunk != 256:
            continue
        order, strangers = rng.sample(mine, len(mine)), requests(12, 100 + round_)
        aside = threading.Thread(target=engine.generate, args=(requests(4, 200 + round_),), daemon=True)
        aside.start()
        while order or strangers:
            burst = [order.pop() for _ in range(min(len(order), rng.randrange(4)))]
            burst += [strangers.pop() for _ in range(min(len(strangers), rng.randrange(4)))]
            engine.submit(rng.sample(burst, len(burst)))
            engine.abort([r.request_id for r in burst if r not in mine and rng.random() < 0.6])
            time.sleep(rng.choice([0.0, 0.01, 0.03]))
        found = all_of(engine, alone.keys())
        aside.join(DEADLINE)
        assert not aside.is_alive()
        assert {name: drawn(found[name]) for name in alone} == alone
        while engine.health()["running"]:
            time.sleep(0.01)
        engine.collect(0.0, [s.request_id for s in engine.collect(0.0, [])])


def test_a_resumed_reply_goes_on_as_if_never_interrupted(engine):
    whole = requests(10, 3)
    samples = engine.generate(whole)
    cuts = [(r, s, len(s.tokens) // 2) for r, s in zip(whole, samples, strict=True) if len(s.tokens) > 1]
    parts = [replace(r, request_id=f"again {r.request_id}", prefix=s.tokens[:at]) for r, s, at in cuts]
    assert len(parts) > 4
    for (r, s, at), rest in zip(cuts, engine.generate(parts), strict=True):
        got = (rest.tokens, rest.logprobs, rest.model_logprobs, rest.finish_reason)
        assert got == (s.tokens[at:], s.logprobs[at:], s.model_logprobs[at:], s.finish_reason)
        if s.routing is not None:
            first = len(r.prompt) + at - 1
            assert (rest.routing.first, rest.routing.rows) == (first, len(s.tokens) - at)
            assert (s.routing.first, s.routing.rows) == (0, len(r.prompt) + len(s.tokens) - 1)
            assert (decode(s.routing)[first:] == decode(rest.routing)).all()


def test_one_large_batch_is_the_same_as_small_ones(engine):
    many = [replace(r, max_new_tokens=min(r.max_new_tokens, 6)) for r in requests(150, 7)]
    together = [drawn(s) for s in engine.generate(many)]
    assert [drawn(engine.generate([r])[0]) for r in many[::15]] == together[::15]


def changed(engine, folder):
    tensors = load_file(f"{folder}/model.safetensors")
    kind = torch.float32 if engine._dtype == "float32" else torch.bfloat16
    old = {name: tensor.to(kind) for name, tensor in tensors.items()}
    new = {name: tensor * 1.25 if "k_proj" in name or "v_proj" in name else tensor for name, tensor in old.items()}
    digests = {row["name"]: row["digest"] for row in manifest(new)}
    return encode(1, 0, "run", old, new, digests)


@pytest.mark.parametrize("how", ["in_place", "retract"])
@pytest.mark.parametrize(("kind", "dtype", "tp"), CASES)
def test_replies_under_way_when_the_weights_change(kind, dtype, tp, how, tmp_path, monkeypatch):
    """Retracted: the rest equals that of a fresh engine of the new version that is given the first part as a prefix. In
    place: the rest differs from that, as keys and values are still the old ones. Tokens and experts recorded before
    the change stay what they are without one. `late` begins after it."""
    folder = save_model(kind, tmp_path)
    engine = LocalEngine(folder, 0, dtype, 1, [7], tp=tp)
    try:
        engine._stop_ids = ()
        asked = [GenerateRequest(str(i), tuple(range(1, 60 + 3 * (i // 2))), i, 40, 1.0) for i in range(6)]
        late = GenerateRequest("late", asked[0].prompt, 77, 20, 1.0)
        before = engine.generate(asked)
        engine.stage(1, 0, changed(engine, folder), 1)
        step, steps = engine._gate.step, []

        def counted(until):
            steps.append(engine._gate.live.version)
            if len(steps) == 14:
                engine.activate(1, 1, how)
                engine.submit([late])
            return step(until)

        monkeypatch.setattr(engine._gate, "step", counted)
        samples = engine.generate(asked)
        (after,) = all_of(engine, {"late"}).values()
        monkeypatch.setattr(engine._gate, "step", step)
        assert engine.attest().version == 1
        assert drawn(engine.generate([late])[0]) == drawn(after)
        assert after.versions == ((1, 0, 20),)
        same = 0
        for r, old, s in zip(asked, before, samples, strict=True):
            (zero, start, at), (one, also, end) = s.versions
            assert (zero, one, start, also, end) == (0, 1, 0, at, 40)
            assert (s.tokens[:at], s.logprobs[:at]) == (old.tokens[:at], old.logprobs[:at])
            (rest,) = engine.generate([replace(r, prefix=s.tokens[:at])])
            same += (rest.tokens, rest.logprobs) == (s.tokens[at:], s.logprobs[at:])
            if s.routing is not None:
                first = len(r.prompt) + at - 1
                assert (decode(s.routing)[:first] == decode(old.routing)[:first]).all()
                assert (s.routing.first, s.routing.rows) == (0, len(r.prompt) + 39)
                assert join([replace_rows(s.routing, first), rest.routing]).rows == s.routing.rows
        assert same == (6 if how == "retract" else 0)
    finally:
        engine.close()


def replace_rows(routing, rows):
    from furlong.ops.policy.routing import encode as pack

    return pack(routing.first, decode(routing)[:rows].astype(int), routing.layers, routing.experts)


SMOL = Architecture("llama", 49152, 576, 2, 9, 3, 64, 1536, 1e-5, 1e5, 8192, True)
"""Two layers of the shapes of SmolLM2-135M."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_real_shapes(dtype):
    """Prefilled together or alone, in a batch of 1 to 9: the same tokens and log-probabilities."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.06).to(dtype)
        for name, shape in SMOL.shapes().items()
    }
    live = Live(0, Decoder(SMOL, tensors))
    asked = tuple(
        GenerateRequest(str(i), tuple(torch.randint(49152, (n,), generator=generator).tolist()), i, 5, 1.0)
        for i, n in enumerate((70, 3, 40, 61, 1, 128, 5, 5, 17))
    )

    def run(some):
        here, found = Batch(SMOL, SMOL, invariant=True), {}
        ended = here.turn(Turn(some), live)
        while True:
            found |= {r.request.request_id: (r.tokens, r.logprobs) for r, _ in ended.replies}
            if not here.size:
                return found
            ended = here.turn(Turn(), live)

    together = run(asked)
    for request in asked:
        assert run((request,))[request.request_id] == together[request.request_id]
    assert run(asked[::-1]) == together


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (1536, 576), (48, 80), (33, 7), (1, 1)])
def test_products_keep_the_bits_of_rows(inputs, outputs, dtype, packed, monkeypatch):
    if not packed:
        monkeypatch.setattr(packed_linear, "kernel_name", lambda dtype: "aten")
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        linear = PackedLinear(torch.randn(outputs, inputs, generator=generator).to(dtype))
        x = torch.randn(MOST + 70, inputs, generator=generator).to(dtype)
        whole = linear(x)
        exact = x.double() @ linear.unpacked().double().T
        bound = (2e-2 if dtype == torch.bfloat16 else 1e-5) * exact.abs().max()
        assert (whole.double() - exact).abs().max() <= bound
        for rows in [*range(1, 40), 63, 64, 100, MOST]:
            start = (7 * rows) % 60
            assert torch.equal(linear(x[start : start + rows]), whole[start : start + rows]), rows
        assert linear(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("terms", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_terms_of_a_probe_cancel_exactly(terms, dtype):
    x, w = cancelling(5, 70, terms, dtype)
    assert (x.shape, w.shape) == ((5, terms), (70, terms))
    assert bool(x.all())
    assert bool(w.all())
    exact = x.double() @ w.double().T  # products of these are exact in 53 bits, sums within 1e-14
    assert exact.abs().max() <= (1e-13 if terms > 1 else 100)


def test_a_kernel_that_depends_on_the_number_of_rows_is_cut_into_tiles():
    """Order of additions by rows: forwards when there are 16 at most, else backwards. Counts above are found out."""
    seen = []

    def product(weight):
        def run(x):
            seen.append(len(x))
            terms = x[:, None, :] * weight
            terms = terms if len(x) <= 16 else terms.flip(-1)
            total = torch.zeros(terms.shape[:-1])
            for term in terms.unbind(-1):
                total = total + term
            return total

        return run

    def probe(rows):
        x, weight = cancelling(rows, 8, 20, torch.float32)
        return product(weight), x

    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(8, 20, generator=generator), torch.randn(50, 20, generator=generator)
    mine = product(weight)
    whole = by_rows(mine, x, "test of tiles", probe)
    for rows in (1, 5, 16, 17, 33, 49):
        assert torch.equal(by_rows(mine, x[:rows], "test of tiles", probe), whole[:rows])
    seen.clear()
    by_rows(mine, x, "test of tiles", probe)
    assert seen == [16] * 4
    seen.clear()
    by_rows(mine, x[:5], "test of tiles", probe)
    assert seen == [8]
    with row_bits(False):
        assert not torch.equal(by_rows(mine, x, "test of tiles", probe), whole)
