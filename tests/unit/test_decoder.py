"""The engine's forward pass against transformers, and the folders it refuses."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from furlong.ops.policy.architecture import Architecture, read_architecture, read_stop_ids
from furlong.ops.policy.checkpoint import read_tensors
from furlong.ops.policy.decoder import Decoder, same_bits
from furlong.ops.policy.kv_cache import CachePool, KVCache, close_gaps
from furlong.ops.policy.manifest import ModelError
from furlong.ops.policy.shard import Shard, part_of, pieces
from furlong.ops.weights.layout import cut

SIZES = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=1e5),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False, eos_token_id=[5, 6]),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=16),
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


def teacher_forced(arch, decoder, rows, prompt_lengths):
    """Logits after prompt, and after each further token fed one by one: the same way replies are made."""
    with torch.inference_mode():
        pool = CachePool()
        pool.take((10**6,))[0].fill_(float("nan"))  # what an earlier batch may leave behind
        cache = KVCache(pool, arch, prompt_lengths, list(range(len(rows))), len(rows[0]) - prompt_lengths[0])
        out = [[] for _ in rows]
        for at, (row, length) in enumerate(zip(rows, prompt_lengths, strict=True)):
            logits = decoder.prefill(torch.tensor([row[:length]]), cache, slice(at, at + 1))
            out[at].append(logits[0])
        for step in range(len(rows[0]) - prompt_lengths[0]):
            tokens = torch.tensor([row[p + step] for row, p in zip(rows, prompt_lengths, strict=True)])
            logits = decoder.decode(tokens, torch.tensor(prompt_lengths) + step, cache, step)
            for at in range(len(rows)):
                out[at].append(logits[at])
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


def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16(saved):
    folder, _ = saved
    arch, decoder = make(folder, torch.bfloat16)
    row = torch.randint(arch.vocab, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    got = teacher_forced(arch, decoder, [row], [8])[0].float()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        theirs = rounded(torch.tensor([row])).logits[0, 7:].float()
        exact = rounded.float()(torch.tensor([row])).logits[0, 7:]
    assert (got - exact).square().mean().sqrt() <= 1.2 * (theirs - exact).square().mean().sqrt()


def test_shared_prompts_in_any_order_and_after_rows_left(saved):
    """Rows of unequal groups, then some of them only: each as if computed alone (within 1e-5 in float32)."""
    folder, _ = saved
    arch, decoder = make(folder)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(arch.vocab, (n,), generator=generator).tolist() for n in (4, 7, 7, 2)]
    owner = np.array([2, 0, 2, 1, 0, 3, 2])
    replies = torch.randint(arch.vocab, (7, 4), generator=generator)
    rows = np.arange(7)
    with torch.inference_mode():
        cache = KVCache(CachePool(), arch, [4, 7, 7, 2], owner.tolist(), 4)
        for at in (slice(0, 1), slice(1, 3), slice(3, 4)):
            decoder.prefill(torch.tensor(prompts[at]), cache, at)
        for step, alive in enumerate([range(7), (0, 2, 3, 4, 5, 6), (2, 4, 5, 6), (5,)]):
            order = close_gaps(np.isin(rows, alive))
            rows = rows[order]
            cache.keep(order, step)
            assert set(rows) == set(alive)
            positions = torch.tensor([len(prompts[o]) + step for o in owner[rows]])
            got = decoder.decode(replies[rows, step], positions, cache, step)
            for row, logits in zip(rows, got, strict=True):
                prompt = prompts[owner[row]]
                alone = teacher_forced(arch, decoder, [prompt + replies[row, : step + 1].tolist()], [len(prompt)])
                assert (logits - alone[0][-1]).abs().max() <= 1e-5


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
    assert new._layers[0] is old._layers[0]
    assert new._head is old._head
    assert new._layers[1] is not old._layers[1]
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
    down are added in another order. Against float64 with the same (rounded) weights: float32 within 1e-5, like one rank;
    bfloat16, whose parts are rounded before they are added, by root mean square at most 1.2 times one rank's error."""
    folder, _ = saved
    arch, decoder = make(folder, dtype)
    row = torch.randint(arch.vocab, (20,), generator=torch.Generator().manual_seed(4)).tolist()
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).double().eval()
    with torch.no_grad():
        want = exact(torch.tensor([row])).logits[0, 7:]
    one = teacher_forced(arch, decoder, [row], [8])[0]
    first, second = split_logits(arch, decoder.tensors, 2, row, 8)
    assert torch.equal(first, second)
    if dtype == torch.float32:
        assert (one - want).abs().max() <= 1e-5
        assert (first - want).abs().max() <= 1e-5
    else:
        assert (first - want).square().mean() <= 1.2**2 * (one - want).square().mean()


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
