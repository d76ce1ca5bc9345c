"""megatron-core's GPTModel for the architectures the engines know, one chunk of it per stage that this rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from furlong.ops.policy.architecture import Architecture, read_architecture
from furlong.ops.policy.manifest import ModelError
from furlong.resources.trainers.megatron.core_attention import CoreAttention
from furlong.resources.trainers.megatron.experts import GATED, Experts, Layer
from furlong.resources.trainers.megatron.feed import Feed
from furlong.resources.trainers.megatron.norm import RMSNorm
from furlong.resources.trainers.megatron.parallel import Place
from furlong.resources.trainers.megatron.vocab_head import padded, vocab_logprobs


@dataclass
class Config(TransformerConfig):
    """megatron-core's settings and those of our own modules."""

    rotary_theta: float = 10000.0
    renormalised: bool = False
    """As in Architecture."""
    expert_layers: tuple[int, ...] = ()
    """As in Architecture."""


class Chunk(GPTModel):
    """Consecutive layers of the model; with the embedding in front or the head behind where its stage has them."""

    architecture: Architecture
    place: Place

    def forward(
        self, feed: Feed, temperature: float
    ) -> Float[Tensor, "width rows hidden"] | tuple[Float[Tensor, " tokens"], Float[Tensor, " places"]]:
        """What the next stage takes, or after the last one the log-probabilities of the rank's wanted tokens and the
        entropies at its places (see `vocab_logprobs`). A stage that is not the first takes what was given to
        `set_input_tensor`."""
        hidden = self.embedding(input_ids=feed.tokens, position_ids=None) if self.pre_process else None
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=feed)
        if not self.post_process:
            return hidden
        return vocab_logprobs(hidden, self.head_weight(), feed, self.place, self.architecture.vocab, temperature)

    def head_weight(self) -> Float[Tensor, "share hidden"]:
        """This rank's rows of the head, which is the embedding where both are tied and on one stage."""
        return self.shared_embedding_or_output_weight() if self.architecture.tied else self.output_layer.weight


def build(source: str | Architecture, place: Place, dtype: torch.dtype) -> list[Chunk]:
    """The chunks that `place` holds, in the order of their stages, with weights that are still to be filled in.

    Args:
        source: a folder with a config.json, or what was read from it.
        place: by `initialise`, in this process.
        dtype: of parameters, activations and what travels between stages.
    Raises:
        ModelError: an architecture that does not fit the layout.
    """
    from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage

    architecture = source if isinstance(source, Architecture) else read_architecture(source)
    check_fit(architecture, place)
    config = _config(architecture, place, dtype)
    chunks = []
    for stage in range(place.layout.vpp):
        named = {"ignore_virtual": False, "vp_stage": stage}
        chunk = Chunk(
            config=config,
            transformer_layer_spec=_block(architecture, place, stage),
            vocab_size=padded(architecture.vocab, place),
            max_sequence_length=architecture.context,
            pre_process=is_pipeline_first_stage(**named),
            post_process=is_pipeline_last_stage(**named),
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="none",
            vp_stage=stage if place.layout.vpp > 1 else None,
        )
        chunk.architecture, chunk.place = architecture, place
        if torch.cuda.is_available():
            chunk.cuda()
        chunks.append(chunk.train())
    return chunks


def check_fit(architecture: Architecture, place: Place) -> None:
    """Raise ModelError, saying what to change, where the layout cannot hold the architecture."""
    layout, stages = place.layout, place.layout.pp * place.layout.vpp
    sizes = {"attention heads": architecture.heads, "key/value heads": architecture.kv_heads}
    if len(architecture.expert_layers) < architecture.layers:
        sizes["feed-forward size"] = architecture.ffn
    fault = ""
    for name, size in sizes.items():
        if size % layout.tp:
            fault = f"tp{layout.tp} must divide its {name} ({size})"
    if architecture.layers % stages:
        fault = f"pp * vpp = {stages} must divide its {architecture.layers} layers"
    if layout.ep > 1 and (not architecture.expert_layers or architecture.experts % layout.ep):
        fault = f"ep{layout.ep} must divide its {architecture.experts} experts"
    if architecture.expert_layers and layout.tp > 1 and not layout.sp:
        # Every rank of tp would send the same tokens through the experts, and count their gradients once each.
        fault = "experts under tp need sequence parallelism: add sp"
    if fault:
        raise ModelError(
            f"trainer layout {layout} does not fit this {architecture.kind} model: {fault}; change the layout"
        )


def _config(architecture: Architecture, place: Place, dtype: torch.dtype) -> Config:
    layout = place.layout
    moe = {}
    if architecture.expert_layers:
        moe = {
            "num_moe_experts": architecture.experts,
            "moe_ffn_hidden_size": architecture.expert_ffn,
            "moe_router_topk": architecture.top_k,
            "moe_layer_freq": [int(layer in architecture.expert_layers) for layer in range(architecture.layers)],
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return Config(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        ffn_hidden_size=architecture.ffn,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim,
        layernorm_epsilon=architecture.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=layout.sp,
        # Micro-batches differ in rows and width, so each stage tells the next what it sends.
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",
        # Everything below needs CUDA or another package, or draws random weights that nobody reads.
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=False,
        rotary_theta=architecture.rope_theta,
        renormalised=architecture.renormalised,
        expert_layers=architecture.expert_layers,
        **moe,
        **(recompute if layout.recompute else {}),
    )


def _block(architecture: Architecture, place: Place, stage: int) -> TransformerBlockSubmodules:
    """The layers of one stage: stages follow each other over the pipeline's ranks, then over the chunks of a rank."""
    layout = place.layout
    count = architecture.layers // (layout.pp * layout.vpp)
    first = (stage * layout.pp + place.pp) * count
    layers = [_layer(architecture, layer) for layer in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer(architecture: Architecture, layer: int) -> ModuleSpec:
    feed_forward = Experts if layer in architecture.expert_layers else ModuleSpec(module=MLP, submodules=GATED)
    head_norm = RMSNorm if architecture.qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=CoreAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    parts = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=ModuleSpec(
            module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=feed_forward,
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=Layer, submodules=parts)
