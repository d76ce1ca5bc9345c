"""Tiny models with and without experts, and the slow reference for what an engine says of the tokens it has drawn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from furlong.ops.policy.routing import decode
from furlong.ops.protocols import Engine, GenerateRequest, Routing, Sample
from furlong.ops.weights.delta import encode
from furlong.ops.weights.digest import manifest, weights_digest

CONTEXT = 512
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {
    "dense": Qwen3Config(**SIZES),
    # SGLang pads an expert's width to a multiple of 32.
    "moe": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
}  # fmt: skip
EXPERT_LAYERS = {"dense": (), "moe": (0, 1, 2)}
STOP = 60
FENCES = count(1)
CLEAR = 1e-4
"""Experts are compared where the router's last choice is this much (logits) above the next."""


def make_folder(path: Path, kind: str) -> str:
    """Its token to stop at is always about average, so that replies are hundreds of tokens long."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    model.lm_head.weight.data[STOP] = 0.0
    model.save_pretrained(path)
    return str(path)


def weights(folder: str) -> dict[str, Tensor]:
    return load_file(Path(folder) / "model.safetensors")


@cache
def other_weights(folder: str) -> dict[str, Tensor]:
    """Other values for every tensor but the embedding, routers and experts included."""
    draw = torch.Generator().manual_seed(1)
    old = weights(folder)
    new = {n: t + 0.1 * torch.randn(t.shape, generator=draw) for n, t in old.items() if "embed" not in n}
    new["lm_head.weight"][STOP] = 0.0
    return old | new


def digest_of(tensors: dict[str, Tensor]) -> str:
    return weights_digest({row["name"]: row["digest"] for row in manifest(tensors)})


@cache
def deltas_of(folder: str) -> pa.Table:
    """From version 0 to 1."""
    old, new = weights(folder), other_weights(folder)
    return encode(1, 0, "run", old, new, {row["name"]: row["digest"] for row in manifest(new)})


@cache
def model_of(folder: str, version: int) -> PreTrainedModel:
    """Version 0 is the folder's, 1 the other one."""
    path = Path(folder)
    if version:
        # By way of a folder, as in memory the reference has experts in another form than in its files.
        path = path.parent / f"{path.name}-other"
        path.mkdir()
        save_file(other_weights(folder), path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text((Path(folder) / "config.json").read_text())
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@dataclass(frozen=True)
class Stand:
    """One engine and what may be asked of it."""

    engine: Engine
    folder: str
    kind: str
    company: float
    """Largest change (nat) of a log-probability when other requests run beside; 0 means the same bits."""
    close: float
    """Largest distance (nat) from the float32 reference."""

    def reset(self) -> None:
        """Version 0 live, nothing running, nothing to collect."""
        self.engine.resume()
        self.engine.abort()
        until(lambda: self.engine.health()["running"] == 0)
        while done := self.engine.collect(0.0, []):
            self.engine.collect(0.0, [sample.request_id for sample in done])
        self.engine.load_anchor(self.folder, 0, [], next(FENCES))

    def stage(self) -> None:
        """Version 1 beside version 0."""
        self.engine.stage(1, 0, deltas_of(self.folder), next(FENCES))

    def flip(self, inflight: str) -> None:
        """From version 0 to 1."""
        self.engine.activate(1, next(FENCES), inflight)

    def check(self, request: GenerateRequest, sample: Sample, inflight: str = "in_place") -> None:
        """Everything the engine says of the tokens is what the reference computes for them."""
        check_form(request, sample)
        assert (sample.routing is None) == (self.kind == "dense")
        own, model, routers, clear = reference(self.folder, request, sample, inflight)
        if sample.routing is not None:
            clear = min(clear, check_routing(request, sample, sample.routing, routers))
        for found, wanted in ((sample.logprobs, own), (sample.model_logprobs, model)):
            far = np.abs(np.array(found) - wanted)[:clear]
            assert far.max(initial=0) <= self.close, (
                f"{request}: {sample.versions}, from token {far.argmax()} of {clear}"
            )


def check_form(request: GenerateRequest, sample: Sample) -> None:
    assert sample.request_id == request.request_id
    assert len(sample.tokens) == len(sample.logprobs) == len(sample.model_logprobs)
    assert len(request.prefix) + len(sample.tokens) <= request.max_new_tokens
    edges = [0, *(end for _, _, end in sample.versions)]
    assert [start for _, start, _ in sample.versions] == edges[:-1]
    assert edges[-1] == len(sample.tokens)
    assert all(start < end for start, end in pairwise(edges))
    assert all(a[0] != b[0] for a, b in pairwise(sample.versions))
    assert all(0 <= token < SIZES["vocab_size"] for token in sample.tokens)
    full = len(request.prefix) + len(sample.tokens) == request.max_new_tokens
    assert (sample.finish_reason == "length") <= full
    stops = {STOP, *request.stop_ids}
    assert not stops & set(sample.tokens[:-1])
    assert (sample.finish_reason == "stop") == bool(stops & set(sample.tokens[-1:]))
    assert sample.seconds >= 0


def check_routing(request: GenerateRequest, sample: Sample, routing: Routing, routers: np.ndarray) -> int:
    """Of every prompt and sampled token but the last, or from the prefix's last on.

    Returns:
        Tokens before the first that depends on a choice of experts that rounding has made; usually all.
    """
    before = len(request.prompt) + len(request.prefix)
    assert routing.first == (before - 1 if request.prefix else 0)
    assert routing.layers == EXPERT_LAYERS["moe"]
    assert (routing.top_k, routing.experts) == (2, 6)
    assert routing.first + routing.rows == before + len(sample.tokens) - 1
    found = np.sort(decode(routing), axis=-1)
    logits = routers[routing.first : routing.first + routing.rows]
    order = np.sort(logits, axis=-1)
    clear = order[..., -2] - order[..., -3] > CLEAR
    assert clear.mean() > 0.95
    other = (found != np.sort(np.argsort(-logits, axis=-1)[..., :2], axis=-1)).any(-1)
    at = np.flatnonzero(other.any(-1))
    if not at.size:
        return len(sample.tokens)
    # What comes after that choice has other inputs; only the choice itself can be told to be a matter of rounding.
    assert not (other & clear)[at[0]].any(), (
        f"{request}: {sample.versions}, experts of position {routing.first + at[0]}"
    )
    return max(0, routing.first + int(at[0]) + 1 - before)


@torch.inference_mode()
def reference(
    folder: str, request: GenerateRequest, sample: Sample, inflight: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Log-probabilities of the tokens, with the request's rules and without, and the routers' logits of every position at
    its first pass, each by the weights that the sample names; and the tokens before the first that depends on a choice
    of experts that rounding makes when keys and values are computed again, which nobody records.

    In place, keys and values stay as the older weights made them; else the newer ones make them again.
    """
    feed, cache, own, plain, routers = [*request.prompt, *request.prefix], DynamicCache(), [], [], []
    clear = len(sample.tokens)
    for version, start, end in sample.versions:
        model = model_of(folder, version)
        asked = {"output_router_logits": True} if "Moe" in type(model).__name__ else {}
        tokens = list(sample.tokens[start:end])
        if inflight == "retract":
            feed, cache = [*request.prompt, *request.prefix, *sample.tokens[:start]], DynamicCache()
        fed, seen = feed + tokens[:-1], cache.get_seq_length()
        out = model(torch.tensor([fed]), cache=cache, use_cache=True, **asked)
        if asked:
            rows = torch.stack([layer.view(len(fed), -1) for layer in out.router_logits], dim=1)
            again = rows[: len(routers) - seen].sort(-1).values
            if len(again) and float((again[..., -2] - again[..., -3]).min()) < CLEAR:
                clear = min(clear, start)
            routers += list(rows.numpy()[len(routers) - seen :])
        for token, logits in zip(tokens, out.logits[0, len(feed) - 1 :].double(), strict=True):
            plain.append(float(logits.log_softmax(-1)[token]))
            own.append(plain[-1] if request.temperature == 0 else cut(logits / request.temperature, request, token))
        feed = tokens[-1:]
    return np.array(own), np.array(plain), np.array(routers), clear


def cut(logits: Tensor, request: GenerateRequest, token: int) -> float:
    """Log-probability of the token after top-k, then top-p of what that leaves, then min-p; -inf when it is cut off."""
    chances = sorted(((float(p), -i) for i, p in enumerate(logits.softmax(-1))), reverse=True)
    kept = chances[: request.top_k or None]
    total, running, stays = sum(p for p, _ in kept), 0.0, []
    for chance, place in kept:
        if running < request.top_p * total and chance >= request.min_p * kept[0][0]:
            stays.append((chance, -place))
        running += chance
    mass = sum(p for p, _ in stays)
    return float(np.log(next((p for p, i in stays if i == token), 0.0) / mass))


def in_thread(call: Callable) -> tuple[threading.Thread, list]:
    result: list = []
    thread = threading.Thread(target=lambda: result.append(call()), daemon=True)
    thread.start()
    return thread, result


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass in time"
        time.sleep(0.02)


def collect_all(engine: Engine, names: list[str], seconds: float = 60.0) -> dict[str, Sample]:
    """Samples of these requests, and of no others, taken."""
    found: dict[str, Sample] = {}
    end = time.monotonic() + seconds
    taken: list[str] = []
    while len(found) < len(names):
        assert time.monotonic() < end, f"{set(names) - found.keys()} did not finish"
        fresh = engine.collect(1.0, taken)
        taken = [sample.request_id for sample in fresh]
        assert not found.keys() & set(taken)
        found |= {sample.request_id: sample for sample in fresh}
    engine.collect(0.0, taken)
    assert found.keys() == set(names)
    return found
