"""Run by SGLang's interpreter: its own EAGLE-3 model class, on the CPU, loads a draft's folder and shows what it holds.

Writes the parameters that were given a value to a safetensors file, and prints one line of JSON: the class, the parameters
that were given none, the policy's ids of the draft's tokens, and the tapped layers.
"""

import json
import sys

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs


def main(draft: str, policy: str, port: str, held_file: str) -> None:
    args = ServerArgs(model_path=policy, device="cpu", attention_backend="torch_native", dtype="float32")
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}", backend="gloo"
    )
    initialize_model_parallel(backend="gloo")
    initialize_dp_attention(args)
    config = ModelConfig(draft, is_draft_model=True, dtype="float32")
    kind, _ = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
    model = kind(config.hf_config)
    nan = float("nan")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, nan)
    model.load_weights(iter(load_file(f"{draft}/model.safetensors").items()))
    held = {name: p.detach() for name, p in model.named_parameters() if not p.isnan().any()}
    save_file(held, held_file)
    print(json.dumps({
        "class": kind.__name__,
        "empty": sorted(name for name, _ in model.named_parameters() if name not in held),
        "ids": None if model.hot_token_id is None else model.hot_token_id.tolist(),
        "taps": config.hf_config.eagle_config["eagle_aux_hidden_state_layer_ids"],
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
