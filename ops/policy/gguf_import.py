"""A GGUF file becomes a Hugging Face folder: de-quantised weights, tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

CONVERTER_VERSION = 1
"""Raised when the folder written from the same GGUF changes; part of the cache's key."""


def convert_gguf(source: Path, target: Path, dtype: str) -> None:
    """Write `source` as config, generation config, safetensors and tokenizer files into the existing folder `target`.

    The weights are written in `dtype`, the format in which versions are published. So the folder's bytes are
    already what the engine serves as version 0, the trainer's export before the first step equals them bitwise,
    and a bfloat16 folder is half as large to load.

    Args:
        source: a GGUF file of a Llama-like model that transformers can read.
        target: an empty folder.
        dtype: `bfloat16` or `float32`.
    Raises:
        ValueError: the file's tensors are not exactly those of the model its configuration describes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # from_pretrained(gguf_file=...) gives a model that refuses to be saved and insists on the accelerate package;
    # its own reader, called on a model built from the configuration, has neither trait.
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    config = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    del config._model_name_or_path  # the GGUF's title, which is no path
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = load_gguf_checkpoint(
        str(source), return_tensors=True, model_to_load=model, torch_dtype=getattr(torch, dtype)
    )["tensors"]
    result = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty or result.unexpected_keys:
        raise ValueError(
            f"{source.name}: tensors missing {empty}, unknown {result.unexpected_keys}; "
            "the file and this transformers version do not fit: install the pinned versions and convert again"
        )
    model.config.dtype = dtype
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
