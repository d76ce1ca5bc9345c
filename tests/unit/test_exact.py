"""Exact mode: what the engine recorded and what the trainer computes are the same bits, and gradients are the plain ones."""

import random
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.batch import Batch, Turn
from furlong.ops.policy.decoder import EMBEDDING, Decoder
from furlong.ops.policy.exact.forward import exact_logprobs
from furlong.ops.policy.exact.gradients import experts as experts_gradient
from furlong.ops.policy.exact.tree import unpacked
from furlong.ops.policy.live import Live
from furlong.ops.policy.packing import empty_like, pack
from furlong.ops.policy.routing import decode, encode
from furlong.ops.protocols import GenerateRequest, TrainBatch
from furlong.ops.spec import AlgorithmSpec
from furlong.resources.engines.local import LocalEngine
from furlong.resources.trainers.exact_module import exact_of, load_exact
from furlong.resources.trainers.masters import MasterWeights
from furlong.resources.trainers.module import load_module

SIZES = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2, "eos_token_id": 7,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, tie_word_embeddings=False, head_dim=16, moe_intermediate_size=20, num_experts=7, num_experts_per_tok=3,
        norm_topk_prob=True, mlp_only_layers=[1],
    ),
}  # fmt: skip
HEAT = 0.8
ALGORITHM = AlgorithmSpec(learning_rate=1e-2, prompts_per_step=6, samples_per_prompt=3)
PROMPTS = (1, 2, 9, 64, 65, 140)


def save_model(kind, folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).float().save_pretrained(folder)
    return str(folder)


def requests(seed, vocabulary=131, longest=150, samples=3):
    """Groups with one prompt; replies shorter and longer than a page, some with one token."""
    rng = random.Random(seed)
    found = []
    for group, length in enumerate(PROMPTS):
        prompt = tuple(rng.randrange(vocabulary) for _ in range(length))
        for sample in range(samples):
            new = longest if sample == 0 else rng.choice([1, 5, 40, 70])
            found.append(GenerateRequest(f"{group}.{sample}", prompt, rng.getrandbits(60), new, HEAT))
    return found


def batch_of(asked, drawn):
    """The batch of (tokens, logprobs, routing) that were drawn for these requests."""
    prompts = list(dict.fromkeys(r.prompt for r in asked))
    tokens, logprobs, routing = zip(*drawn, strict=True)
    return TrainBatch(
        step=1,
        temperature=HEAT,
        prompts=tuple(prompts),
        group=tuple(prompts.index(r.prompt) for r in asked),
        replies=tuple(map(tuple, tokens)),
        logprobs=tuple(map(tuple, logprobs)),
        masks=tuple((True,) * len(reply) for reply in tokens),
        sampled_by=tuple((0,) * len(reply) for reply in tokens),
        version=0,
        advantages=(0.0,) * len(asked),
        rewards=(0.0,) * len(asked),
        routing=tuple(routing),
        trajectory_ids=tuple(r.request_id for r in asked),
    )


def sampled(folder, dtype, asked):
    engine = LocalEngine(folder, 0, dtype, 1, [7])
    try:
        return batch_of(asked, [(s.tokens, s.logprobs, s.routing) for s in engine.generate(asked)])
    finally:
        engine.close()


def values(rows, micro):
    """Of a batch's rows, at the micro-batch's tokens."""
    where = zip(micro.trajectory.tolist(), micro.offset.tolist(), strict=True)
    return torch.tensor([rows[i][t] for i, t in where], dtype=torch.float64)


def differing(module, batch, budget=2048):
    """Tokens whose log-probability has other bits than the recorded one, which the lake keeps in float32; of how many."""
    wrong = total = 0
    for micro in pack(batch, batch.masks, budget):
        with torch.no_grad():
            logprobs, _ = module(micro, HEAT)
        recorded = values(batch.logprobs, micro).float()
        wrong, total = wrong + int((logprobs != recorded).sum()), total + len(recorded)
    return wrong, total


def rounded(module, dtype):
    for parameter in module.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return module


QUICK = [("llama", "bfloat16"), ("qwen3", "float32"), ("qwen3_moe", "float32"), ("qwen3_moe", "bfloat16")]
OTHERS = [("llama", "float32"), ("qwen2", "float32"), ("qwen2", "bfloat16"), ("qwen3", "bfloat16")]


@pytest.fixture(
    scope="module", params=[*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)], ids="-".join
)
def case(request, tmp_path_factory):
    """A model's folder, its number format, and a batch that an engine drew with it."""
    kind, dtype = request.param
    folder = save_model(kind, tmp_path_factory.mktemp(kind))
    batch = sampled(folder, dtype, requests(1))
    lengths = [len(reply) for reply in batch.replies]
    assert min(lengths) == 1
    assert max(lengths) > 128
    return folder, dtype, batch


@pytest.mark.parametrize("budget", [8192, 700, 345])
def test_what_the_engine_recorded_comes_out_bit_for_bit(case, budget):
    """Groups in one row with their prompt once, or spread over rows and micro-batches."""
    folder, dtype, batch = case
    wrong, total = differing(rounded(load_exact(folder), dtype), batch, budget)
    assert (wrong, total) == (0, sum(map(len, batch.replies)))
    plain = rounded(load_module(folder), dtype)
    assert differing(plain, batch, budget)[0] > total / 2, "the comparison sees no difference at all"


def test_any_number_of_threads(case):
    """The engine had one."""
    folder, dtype, batch = case
    module, before = rounded(load_exact(folder), dtype), torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert differing(module, batch)[0] == 0
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_tokens_that_are_left_out_change_nothing(case):
    """Another mask cuts sequences short and asks for other places; and a token alone, and nothing at all."""
    folder, dtype, batch = case
    module, rng = rounded(load_exact(folder), dtype), random.Random(5)
    for share in (0.5, 0.03):
        masks = tuple(tuple(rng.random() < share for _ in reply) for reply in batch.replies)
        assert differing(module, replace(batch, masks=masks))[0] == 0
    micro = empty_like(pack(batch, batch.masks, 2048)[0])
    logprobs, entropy = module(micro, HEAT)
    assert (len(logprobs), len(entropy)) == (0, 0)
    logprobs.sum().backward()
    assert all(not p.grad.any() for p in module.parameters() if p.grad is not None)


def test_a_step_later_they_are_equal_again(case, tmp_path):
    """Masters move by an optimiser step; an engine that loads what is published then agrees with the same module."""
    folder, dtype, batch = case
    module = load_exact(folder)
    masters = MasterWeights(module.named_weights(), ALGORITHM, getattr(torch, dtype))
    assert differing(module, batch)[0] == 0
    masters.begin()
    micros = pack(batch, batch.masks, 700)
    for micro in micros:
        masters.expect(micro is micros[-1])
        logprobs, _ = module(micro, HEAT)
        (logprobs * 1e-3).sum().backward()
    masters.update(1e-2, masters.gradient_norm())
    new = shutil.copytree(folder, tmp_path / "new")
    save_file(masters.export(getattr(torch, dtype)), new / "model.safetensors", {"format": "pt"})
    again = sampled(str(new), dtype, requests(2))
    assert differing(module, again) == (0, sum(map(len, again.replies)))
    wrong, total = differing(module, batch)
    assert wrong > total / 2, "the step changed nothing"


def reference(folder, batch, slopes):
    """Log-probabilities, and gradients of their sum weighted by `slopes`, one unpacked sequence at a time in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    total, found = 0.0, []
    for index, reply in enumerate(batch.replies):
        prompt = batch.prompts[batch.group[index]]
        logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
        row = torch.log_softmax(logits / HEAT, -1)[range(len(reply)), list(reply)]
        found.append(row.tolist())
        total = total + (row * torch.tensor(slopes[index], dtype=torch.float64)).sum()
    total.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        if "experts.gate_up_proj" in name or "experts.down_proj" in name:
            for expert, grad in enumerate(parameter.grad):
                parts = {"down": grad} if "down" in name else dict(zip(("gate", "up"), grad.chunk(2), strict=True))
                base = re.sub(r"\.\w+$", f".{expert}.", name)
                grads |= {f"{base}{part}_proj.weight": value for part, value in parts.items()}
        else:
            grads[name] = parameter.grad
    return found, grads


def gradients(module, batch, slopes):
    for micro in pack(batch, batch.masks, 700):
        logprobs, _ = module(micro, HEAT)
        (logprobs * values(slopes, micro).float()).sum().backward()
    return {name: parameter.grad.double() for name, parameter in module.named_weights().items()}


def distance(found, exact):
    """Over all tensors: the largest norm of the difference as a share of the gradient's own."""
    assert found.keys() == exact.keys()
    return max(float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact)


def test_gradients_are_the_plain_ones(case):
    """float32: within 2e-5 of float64, by norm, in every tensor, some 50 roundings. bfloat16, whose products round to
    2^-9: no further off, over all tensors together, than 1.3 times the plain module in the same format."""
    folder, dtype, batch = case
    rng = random.Random(3)
    batch = replace(batch, routing=(None,) * len(batch.routing))
    short = tuple(reply[:90] for reply in batch.replies)
    batch = replace(
        batch,
        replies=short,
        masks=tuple((True,) * len(r) for r in short),
        logprobs=tuple(row[:90] for row in batch.logprobs),
        sampled_by=tuple(row[:90] for row in batch.sampled_by),
    )
    slopes = [[rng.gauss(0, 1) for _ in reply] for reply in short]
    _, want = reference(folder, batch, slopes)
    found = gradients(rounded(load_exact(folder), dtype), batch, slopes)
    if dtype == "float32":
        assert distance(found, want) < 2e-5
    else:
        plain = gradients(rounded(load_module(folder), dtype), batch, slopes)
        error, usual = (sum(float((g[n] - want[n]).norm() ** 2) for n in want) ** 0.5 for g in (found, plain))
        assert error < 1.3 * usual


def test_recorded_experts_are_replayed(tmp_path):
    """Other experts than the router's own are taken when the record says so; without a record the router chooses what
    it chose in the engine. Either way the router learns."""
    folder = save_model("qwen3_moe", tmp_path)
    batch = sampled(folder, "float32", requests(1))
    module = load_exact(folder)
    assert differing(module, replace(batch, routing=(None,) * len(batch.routing)))[0] == 0
    turned = tuple(encode(r.first, (decode(r).astype(int) + 1) % 7, r.layers, r.experts) for r in batch.routing)
    other = replace(batch, routing=turned)
    wrong, total = differing(module, other)
    assert wrong > 0.9 * total
    slopes = [[1.0] * len(reply) for reply in batch.replies]
    found = gradients(module, other, slopes)
    plain = gradients(load_module(folder), other, slopes)
    assert distance(found, plain) < 1e-4
    assert found["model.layers.0.mlp.gate.weight"].norm() > 0


@pytest.mark.parametrize("renormalised", [True, False])
def test_experts_gradient(renormalised):
    """Against autograd in float64, for a given choice; shares that do not sum to 1 have a gradient of their own."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    x, router, slope = numbers(9, 8), numbers(5, 8), numbers(9, 8)
    weights = [(numbers(6, 8), numbers(6, 8), numbers(8, 6)) for _ in range(5)]
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])  # the last one is nobody's
    leaves = [t.double().requires_grad_() for t in (x, router, *(w for three in weights for w in three))]
    likely = torch.softmax(leaves[0] @ leaves[1].T, dim=-1).gather(1, chosen)
    shares = likely / likely.sum(dim=-1, keepdim=True) if renormalised else likely
    total = 0.0
    for token in range(9):
        for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
            gate, up, down = leaves[2 + 3 * expert : 5 + 3 * expert]
            out = down @ (torch.nn.functional.silu(gate @ leaves[0][token]) * (up @ leaves[0][token]))
            total = total + share * (out @ slope[token].double())
    want = torch.autograd.grad(total, leaves, allow_unused=True)
    grad_x, found = experts_gradient(x, router, weights, chosen, renormalised, slope)
    for got, exact in zip((grad_x, *found), want, strict=True):
        exact = torch.zeros_like(got) if exact is None else exact
        torch.testing.assert_close(got.double(), exact.double(), rtol=1e-4, atol=1e-4)


def test_the_decoder_is_made_anew_only_for_new_weights(tmp_path):
    module = load_exact(save_model("llama", tmp_path))
    first = module._current(module.named_weights())
    assert module._current(module.named_weights()) is first
    name, weight = next(iter(module.named_weights().items()))
    held = first.tensors[name].clone()
    with torch.no_grad():
        weight.view(-1)[0] += 1.0
    second = module._current(module.named_weights())
    assert second is not first
    assert torch.equal(first.tensors[name], held)
    assert torch.equal(second.tensors[name], weight)
    fresh = exact_of(module.architecture())
    assert fresh._architecture == module._architecture


def test_a_tree_is_taken_apart_into_sequences():
    """Every node is computed by exactly one segment, and a segment's path is the sequence's own tokens."""
    asked = [GenerateRequest(str(i), (5, 6), i, 9, HEAT) for i in range(4)]
    replies = [(1, 2, 3, 4), (1, 2, 9), (8,), (7, 7, 7, 7)]
    batch = batch_of(asked, [(reply, (0.0,) * len(reply), None) for reply in replies])
    (micro,) = pack(batch, batch.masks, 64)
    tree = unpacked(micro)
    computed = [node for s in tree.segments for node in s.path[s.first :]]
    assert computed == list(range(len(tree.tokens)))
    assert [s.count for s in tree.segments] == sorted([s.count for s in tree.segments], key=lambda count: count > 1)
    paths = {tuple(tree.tokens[list(s.path)].tolist()) for s in tree.segments}
    assert paths == {(5, 6, 1, 2, 3), (5, 6, 7, 7, 7)}  # (1, 2) and () are beginnings of these
    assert all(tree.positions[list(s.path)].tolist() == list(range(len(s.path))) for s in tree.segments)


SMOL = Architecture("llama", 49152, 576, 2, 9, 3, 64, 1536, 1e-5, 1e5, 8192, True)
"""Two layers of the shapes of SmolLM2-135M."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_real_shapes(dtype):
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.06).to(dtype)
        for name, shape in SMOL.shapes().items()
    }
    decoder, here = Decoder(SMOL, tensors), Batch(SMOL, SMOL, invariant=True)
    asked, drawn = requests(4, 49152, 30, 2), {}
    ended = here.turn(Turn(tuple(asked)), Live(0, decoder))
    while len(drawn) < len(asked):
        drawn |= {r.request.request_id: (r.tokens[len(r.request.prompt) :], r.logprobs, None) for r, _ in ended.replies}
        ended = here.turn(Turn(), Live(0, decoder))
    batch = batch_of(asked, [drawn[r.request_id] for r in asked])

    def module(micro, heat):
        return exact_logprobs(decoder, tensors, lambda tokens: tensors[EMBEDDING][tokens], micro, heat)

    assert differing(module, batch, 1024) == (0, sum(map(len, batch.replies)))
