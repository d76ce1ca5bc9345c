"""Tiny models for SGLang servers, other weights for them, and the slow reference that replies are compared with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from furlong.ops.protocols import GenerateRequest
from furlong.ops.weights.delta import encode
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.resources.engines.sglang import SGLangEngine
from furlong.resources.engines.step_gate import EngineError

# Neither the vocabulary nor the inner width is a multiple of what SGLang pads to.
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
}
CLOSE = 1e-5
"""Nats between log-probabilities of two float32 programs; about 1e-6 was measured."""


def make_folder(path: Path, kind: str, dtype: torch.dtype = torch.float32) -> str:
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).to(dtype).save_pretrained(path)
    return str(path)


def weights(folder: str) -> dict[str, Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def changed(old: dict[str, Tensor], *names: str, seed: int = 1) -> dict[str, Tensor]:
    """Other weights for some tensors, or for all but the embedding."""
    generator = torch.Generator().manual_seed(seed)
    names = names or tuple(name for name in old if "embed" not in name)
    return old | {n: old[n] + (0.2 * torch.randn(old[n].shape, generator=generator)).to(old[n].dtype) for n in names}


def deltas(version: int, base: int, old: dict[str, Tensor], new: dict[str, Tensor]) -> pa.Table:
    return encode(version, base, "run", old, new, {row["name"]: row["digest"] for row in manifest(new)})


def ask(prompts: int = 3, new: int = 12) -> list[GenerateRequest]:
    return [GenerateRequest(f"r{i}", (1, 2 + i, 3)[: 1 + i % 3], i, new, 0.0) for i in range(prompts)]


def model_of(folder: str, tensors: dict[str, Tensor]) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.load_state_dict(tensors, strict=False)
    return model


@torch.inference_mode()
def greedy(models: list[PreTrainedModel], prompt: tuple[int, ...], lengths: list[int]) -> tuple[list[int], list[float]]:
    """The reference: each model in turn goes on from the keys and values that the ones before have left."""
    tokens, logprobs, cache, feed = [], [], None, list(prompt)
    for model, length in zip(models, lengths, strict=True):
        for _ in range(length):
            out = model(torch.tensor([feed]), cache=cache, use_cache=True)
            cache, row = out.past_key_values, out.logits[0, -1].log_softmax(-1)
            feed = [int(row.argmax())]
            tokens += feed
            logprobs.append(float(row.max()))
    return tokens, logprobs


def assert_serves(engine: SGLangEngine, folder: str, tensors: dict[str, Tensor], version: int) -> None:
    """Bytes and replies are those of `tensors`, by the server's own account."""
    proof = engine.attest()
    assert proof.version == version
    assert proof.tensors == {row["name"]: row["digest"] for row in manifest(tensors)}
    assert proof.digest == weights_digest(proof.tensors)
    model = model_of(folder, tensors)
    for request, sample in zip(ask(), engine.generate(ask()), strict=True):
        tokens, logprobs = greedy([model], request.prompt, [12])
        stop = tokens.index(60) + 1 if 60 in tokens else 12
        assert list(sample.tokens) == tokens[:stop]
        assert sample.finish_reason == ("stop" if 60 in tokens else "length")
        assert sample.logprobs == pytest.approx(logprobs[:stop], abs=CLOSE)
        assert sample.versions == ((version, 0, stop),)


def in_thread(call: Callable) -> tuple[threading.Thread, list]:
    result: list = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    return thread, result


def error_of(call: Callable) -> EngineError:
    with pytest.raises(EngineError) as caught:
        call()
    return caught.value


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def descendants(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
