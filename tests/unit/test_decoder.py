"""The engine's forward pass against transformers, and the folders it refuses."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from furlong.ops.policy.architecture import Architecture, read_architecture, read_stop_ids
from furlong.ops.policy.checkpoint import read_tensors
from furlong.ops.policy.decoder import Decoder, same_bits
from furlong.ops.policy.kv_cache import PAGE, CacheFull, KVCache
from furlong.ops.policy.manifest import ModelError
from furlong.ops.policy.paged_attention import Plan, Span
from furlong.ops.policy.shard import Shard, part_of, pieces
from furlong.ops.weights.layout import cut

SIZES = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=1e5),
    "every_head_its_own_keys": LlamaConfig(**SIZES | {"num_key_value_heads": 6}, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False, eos_token_id=[5, 6]),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        tie_word_embeddings=False,
        head_dim=16,
        moe_intermediate_size=20,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
}


def save_model(kind: str, folder, seed: int = 0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).eval().float()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or "bias" in name:  # ones and zeros would hide a norm or bias that is left out
                value.add_(torch.randn(value.shape) * 0.3)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=list(CONFIGS))
def saved(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp(request.param))
    return folder, save_model(request.param, folder)


def make(folder, dtype=torch.float32) -> tuple[Architecture, Decoder]:
    arch = read_architecture(folder)
    return arch, Decoder(arch, read_tensors(folder, arch, dtype))


def feed(decoder, cache, parts):
    """Tokens of several replies in one step, as (held, first position, tokens): logits after each token, by reply."""
    parts = sorted(((place, *part) for place, part in enumerate(parts)), key=lambda part: len(part[3]) > 1)
    for _, held, first, tokens in parts:
        cache.extend(held, first + len(tokens))
    plan = Plan([Span(held, first, len(tokens)) for _, held, first, tokens in parts], cache)
    flat = torch.tensor([token for part in parts for token in part[3]])
    logits, chosen = decoder.step(flat, plan, torch.arange(len(flat)))
    sizes = [len(part[3]) for part in parts]
    places = [part[0] for part in parts]
    rows = dict(zip(places, logits.split(sizes), strict=True))
    experts = dict(zip(places, chosen.split(sizes), strict=True)) if chosen is not None else {}
    return [rows[place] for place in range(len(parts))], experts


def new_cache(arch, dtype, pages=64):
    page_bytes = 2 * arch.layers * arch.kv_heads * 16 * PAGE * dtype.itemsize  # rows of 8 numbers are filled up to 16
    cache = KVCache(arch, dtype, pages * page_bytes)
    cache._memory.fill_(float("nan"))  # what an earlier reply may leave behind
    return cache


def teacher_forced(arch, decoder, rows, prompt_lengths):
    """Logits after prompt, and after each further token fed one by one: the same way replies are made."""
    with torch.inference_mode():
        cache = new_cache(arch, decoder.dtype)
        held = [cache.open() for _ in rows]
        first = [(one, 0, row[:length]) for one, row, length in zip(held, rows, prompt_lengths, strict=True)]
        out = [[logits[-1]] for logits in feed(decoder, cache, first)[0]]
        for step in range(len(rows[0]) - prompt_lengths[0]):
            at = [length + step for length in prompt_lengths]
            parts = [(one, t, [row[t]]) for one, row, t in zip(held, rows, at, strict=True)]
            for column, logits in zip(out, feed(decoder, cache, parts)[0], strict=True):
                column.append(logits[0])
    return [torch.stack(row) for row in out]


def test_ragged_decode_matches_transformers(saved):
    """Prefill and cached decode of unequal rows against one full forward of each: within 1e-5 in float32."""
    folder, model = saved
    arch, decoder = make(folder)
    lengths, new = [5, 1, 12, 5], 9
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(arch.vocab, (p + new,), generator=generator).tolist() for p in lengths]
    for row, length, got in zip(rows, lengths, teacher_forced(arch, decoder, rows, lengths), strict=True):
        with torch.no_grad():
            want = model(torch.tensor([row])).logits[0, length - 1 :]
        assert want.abs().max() > 1
        assert (got - want).abs().max() <= 1e-5


def error(arch, difference):
    """Mean square; over a token's logits only, then the median token, where a router's near-ties may fall either way."""
    by_token = difference.square().mean(-1)
    return by_token.median() if arch.experts else by_token.mean()


def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16(saved):
    folder, _ = saved
    arch, decoder = make(folder, torch.bfloat16)
    row = torch.randint(arch.vocab, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    got = teacher_forced(arch, decoder, [row], [8])[0].float()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="eager").eval()
    with torch.no_grad():
        theirs = rounded(torch.tensor([row])).logits[0, 7:].float()
        exact = rounded.float()(torch.tensor([row])).logits[0, 7:]
    assert error(arch, got - exact) <= 1.2**2 * error(arch, theirs - exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_however_it_is_fed(saved, dtype):
    """In one chunk, token by token, or in odd chunks; alone or beside others, that come, end and share its prompt, over
    the edges of pages: every logit of every position is the same, and so are the experts."""
    folder, _ = saved
    arch = replace(read_architecture(folder), context=256)
    decoder = Decoder(arch, read_tensors(folder, arch, dtype))
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(arch.vocab, (n,), generator=generator).tolist() for n in (150, 64, 65, 5, 130, 1)]
    rng = random.Random(4)
    with torch.inference_mode():
        alone, chosen = [], []
        for row in rows:
            cache = new_cache(arch, decoder.dtype)
            logits, experts = feed(decoder, cache, [(cache.open(), 0, row)])
            alone.append(logits[0])
            chosen.append(experts.get(0))
        for _ in range(6):
            cache = new_cache(arch, decoder.dtype)
            held, fed = {}, {}
            while any(fed.get(i, 0) < len(row) for i, row in enumerate(rows)):
                parts, names = [], []
                for i, row in enumerate(rows):
                    if i in held and rng.random() < 0.1:
                        cache.close(held.pop(i))
                        fed.pop(i)
                    if i not in held and rng.random() < 0.5:
                        held[i], fed[i] = cache.open(), 0
                    if i in held and fed[i] < len(row) and rng.random() < 0.8:
                        count = rng.choice([1, 1, 2, 7, 63, 64, 100, 150])
                        parts.append((held[i], fed[i], row[fed[i] : fed[i] + count]))
                        names.append(i)
                if parts:
                    logits, experts = feed(decoder, cache, parts)
                    for place, i in enumerate(names):
                        span = slice(fed[i], fed[i] + len(logits[place]))
                        assert torch.equal(logits[place], alone[i][span]), (i, span)
                        assert place not in experts or torch.equal(experts[place], chosen[i][span])
                        fed[i] = span.stop
            assert sum(len(one.pages) for one in held.values()) == cache.used


def test_copied_pages_and_moved_ones_are_the_same_cache(saved):
    folder, _ = saved
    arch, decoder = make(folder)
    row = torch.randint(arch.vocab, (60,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.inference_mode():
        cache = new_cache(arch, decoder.dtype)
        first, second, other = cache.open(), cache.open(), cache.open()
        feed(decoder, cache, [(other, 0, row[::-1])])
        feed(decoder, cache, [(first, 0, row[:40])])
        cache.extend(second, 40)
        cache.copy(first, second, 40)
        cache.close(other)  # its page was the first, and is now the last one's
        assert sorted(first.pages + second.pages) == [0, 1]
        a, b = feed(decoder, cache, [(first, 40, row[40:]), (second, 40, row[40:])])[0]
        whole = feed(decoder, cache, [(cache.open(), 0, row)])[0][0]
    assert torch.equal(a, b)
    assert torch.equal(a, whole[40:])


def test_a_full_cache_says_so_and_one_reply_may_enlarge_it(saved):
    folder, _ = saved
    arch, decoder = make(folder)
    with torch.inference_mode():
        cache = new_cache(arch, decoder.dtype, pages=2)
        one, two = cache.open(), cache.open()
        cache.extend(one, 65)
        with pytest.raises(CacheFull, match="1 pages of 64 tokens are needed and 0 are free"):
            cache.extend(two, 1)
        assert (two.pages, cache.free) == ([], 0)
        cache.close(two)
        row = [3, 1, 4]
        before = feed(decoder, cache, [(one, 0, row)])[0][0]
        cache.enlarge(300)
        assert cache.free == 3
        assert torch.equal(feed(decoder, cache, [(one, 2, row[2:])])[0][0], before[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_served_tensors_are_the_files_bit_for_bit(saved, dtype):
    folder, _ = saved
    arch, decoder = make(folder, dtype)
    with torch.inference_mode():
        served = decoder.served()
    assert set(served) == set(arch.shapes())
    for name, tensor in load_file(f"{folder}/model.safetensors").items():
        assert same_bits(served[name], tensor.to(dtype)), name


def test_served_keeps_odd_bits(saved):
    """Negative zeros, subnormals and NaN payloads survive packing, in every kind of tensor."""
    folder, _ = saved
    arch = read_architecture(folder)
    tensors = read_tensors(folder, arch, torch.bfloat16)
    for tensor in tensors.values():
        bits = tensor.view(torch.int16).flatten()
        bits[:4] = torch.tensor([-0x8000, 1, 0x7FA5, -0x0001], dtype=torch.int16)
    with torch.inference_mode():
        served = Decoder(arch, tensors).served()
    assert all(same_bits(served[name], tensors[name]) for name in tensors)


def test_machines_that_cannot_pack_compute_the_same(saved, monkeypatch):
    """PyTorch's own linear in place of the packed one: within 1e-5 in float32, and the same bits served."""
    folder, _ = saved
    arch, packed = make(folder)
    monkeypatch.setattr("furlong.ops.policy.packed_linear.kernel_name", lambda dtype: "aten")
    _, plain = make(folder)
    assert packed._head._packed
    assert not plain._head._packed
    rows = [[3, 1, 4, 1, 5, 9]]
    a, b = (teacher_forced(arch, d, rows, [2])[0] for d in (packed, plain))
    assert (a - b).abs().max() <= 1e-5
    with torch.inference_mode():
        assert all(same_bits(packed.served()[name], tensor) for name, tensor in plain.served().items())


def test_new_version_shares_what_did_not_change(saved):
    folder, _ = saved
    arch, old = make(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = {**old.tensors, name: old.tensors[name] + 1}
    new = Decoder(arch, tensors, old)
    assert new.layers[0] is old.layers[0]
    assert new._head is old._head
    assert new.layers[1] is not old.layers[1]
    fresh = Decoder(arch, tensors)
    rows = [[3, 1, 4, 1, 5]]
    assert torch.equal(teacher_forced(arch, new, rows, [2])[0], teacher_forced(arch, fresh, rows, [2])[0])


class Meeting:
    """What a process group does, between threads of one process; each adds in the same order."""

    def __init__(self, size):
        self._parts, self._barrier = [None] * size, threading.Barrier(size)

    def all_in(self, rank, mine):
        self._parts[rank] = mine.clone()
        self._barrier.wait(30)
        parts = [part.clone() for part in self._parts]
        self._barrier.wait(30)
        return parts


class Seat:
    def __init__(self, meeting, rank):
        self._meeting, self._rank = meeting, rank

    def all_reduce(self, tensor):
        tensor.copy_(sum(self._meeting.all_in(self._rank, tensor)))

    def all_gather(self, parts, mine):
        for part, found in zip(parts, self._meeting.all_in(self._rank, mine), strict=True):
            part.copy_(found)


def split_logits(arch, tensors, size, row, prompt_length):
    """Teacher-forced logits of each of `size` ranks."""
    meeting = Meeting(size)

    def run(rank):
        part, mine = part_of(arch, rank, size), pieces(arch, rank, size)
        own = {name: cut(tensor, mine[name]).contiguous() for name, tensor in tensors.items()}
        assert {name: tuple(tensor.shape) for name, tensor in own.items()} == part.shapes()
        with torch.inference_mode():
            decoder = Decoder(part, own, share=Shard(arch, rank, size, Seat(meeting, rank)))
            assert all(same_bits(decoder.served()[name], tensor) for name, tensor in own.items())
        return teacher_forced(part, decoder, [row], [prompt_length])[0]

    with ThreadPoolExecutor(size) as pool:
        return [job.result(60) for job in [pool.submit(run, rank) for rank in range(size)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_split_model_is_as_near_to_float64_as_a_whole_one(saved, dtype):
    """131 tokens of vocabulary do not halve. All ranks get the same bits; not those of one rank, as the parts of o and
    down are added in another order. Against float64 with the same (rounded) weights: float32 within 2e-5, like one rank
    (the largest seen is 1.2e-5);
    bfloat16, whose parts are rounded before they are added, by root mean square at most 1.2 times one rank's error."""
    folder, _ = saved
    arch, decoder = make(folder, dtype)
    row = torch.randint(arch.vocab, (20,), generator=torch.Generator().manual_seed(4)).tolist()
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").double().eval()
    with torch.no_grad():
        want = exact(torch.tensor([row])).logits[0, 7:]
    one = teacher_forced(arch, decoder, [row], [8])[0]
    first, second = split_logits(arch, decoder.tensors, 2, row, 8)
    assert torch.equal(first, second)
    if dtype == torch.float32:
        assert (one - want).abs().max() <= 2e-5
        assert (first - want).abs().max() <= 2e-5
    else:
        assert error(arch, first - want) <= 1.2**2 * error(arch, one - want)


def test_stop_ids(saved):
    folder, model = saved
    want = model.config.eos_token_id
    if want is None:
        with pytest.raises(ModelError, match="no eos_token_id"):
            read_stop_ids(folder)
    else:
        assert read_stop_ids(folder) == (tuple(want) if isinstance(want, list) else (want,))


BAD_CONFIGS = [
    ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rotary embedding 'llama3'"),
    ({"rope_parameters": None}, "rope_theta is missing"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"intermediate_size": 96}, r"tensor model.layers.0.mlp.gate_proj.weight is .*\(80, 48\)"),
    ({"num_hidden_layers": 4}, "tensor model.layers.3.*is missing"),
    ({"num_hidden_layers": 2}, "tensor model.layers.2.* is not part of the model"),
    ({"tie_word_embeddings": False}, "tensor lm_head.weight is missing"),
    ({"model_type": "qwen2"}, r"tensor model.layers.0.self_attn.k_proj.bias is missing"),
]


@pytest.mark.parametrize(("change", "message"), BAD_CONFIGS)
def test_folders_that_do_not_fit_are_refused(tmp_path, change, message):
    save_model("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelError, match=message):
        make(str(tmp_path))


def test_older_rope_theta_is_read(tmp_path):
    save_model("llama", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps({**config, "rope_theta": 1e5}))
    assert read_architecture(str(tmp_path)).rope_theta == 1e5


def test_a_model_in_several_files_is_the_same(tmp_path):
    model = save_model("qwen3_moe", tmp_path / "one")
    many = tmp_path / "many"
    model.save_pretrained(many, max_shard_size="60KB")
    files = sorted(many.glob("*.safetensors"))
    assert len(files) > 2
    arch, decoder = make(str(tmp_path / "one"))
    mine = pieces(arch, 1, 2)
    whole = read_tensors(str(many), arch, torch.float32)
    parts = read_tensors(str(many), arch, torch.float32, mine)
    assert whole.keys() == decoder.tensors.keys()
    assert all(same_bits(whole[name], tensor) for name, tensor in decoder.tensors.items())
    assert all(same_bits(parts[name], cut(tensor, mine[name])) for name, tensor in whole.items())
    save_file(load_file(files[0]) | load_file(files[1]), files[1])
    with pytest.raises(ModelError, match=rf"is in .*{files[0].name} and in .*{files[1].name}"):
        make(str(many))
    files[1].unlink()
    with pytest.raises(ModelError, match=rf"{files[1].name} is missing"):
        make(str(many))
    (many / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ModelError, match=r"index.json cannot be read"):
        make(str(many))


def test_damaged_files_are_refused(tmp_path):
    save_model("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.norm.weight": torch.ones(48, dtype=torch.int32)}, path)
    with pytest.raises(ModelError, match=r"model.norm.weight is torch.int32"):
        make(str(tmp_path))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is damaged"):
        make(str(tmp_path))
    path.unlink()
    with pytest.raises(ModelError, match="is missing"):
        make(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_architecture(str(tmp_path))
