"""Master weights and AdamW behind megatron-core's model chunks, each cut over the data-parallel ranks.

Megatron-core's `DistributedOptimizer` decides who holds which elements, and its buffers carry gradients in and weights
out (Rajbhandari et al. 2020, "ZeRO", stage 1). What it computes in float32 only - copying, checking and clipping
gradients - is done here, in the masters' own number format, on the same shards.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from furlong.ops.spec import AlgorithmSpec
from furlong.resources.trainers.masters import MOMENTS, master_dtype


@dataclass(frozen=True)
class Shard:
    """The elements of one parameter that this rank updates."""

    parameter: nn.Parameter
    """As the model computes with it, complete on this rank."""
    start: int
    """First element of the flattened parameter that is updated here."""
    master: Shaped[Tensor, " some"] | None
    """Those elements in the masters' number format; None when there are none."""
    group: ProcessGroup
    """The ranks that update the parameter's elements, each its own."""

    @property
    def stop(self) -> int:
        return self.start + (0 if self.master is None else self.master.numel())


class ShardedAdamW:
    """Masters, gradient sums and AdamW of this rank's chunks; all ranks call every method together."""

    def __init__(self, modules: list[nn.Module], algorithm: AlgorithmSpec) -> None:
        """Wraps the chunks, after `schedule.prepare`, as `chunks`; their weights need not be there yet."""
        self.algorithm = algorithm
        compute = next(modules[0].parameters()).dtype
        self.dtype = master_dtype(compute)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.dtype == torch.float32, use_distributed_optimizer=True
        )
        self.chunks = [DistributedDataParallel(module.config, settings, module) for module in modules]
        self._optimizers = self._make(compute)
        self.shards = self._find_shards()
        self.masters = [shard.master for shard in self.shards if shard.master is not None]
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                group["fused"] = True
        self._states: dict[Tensor, dict[str, Tensor]] = {}
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                for master in group["params"]:
                    moments = {kind: torch.zeros_like(master) for kind in MOMENTS}
                    state = {"step": torch.zeros((), device=master.device), **moments}
                    optimizer.optimizer.state[master] = self._states[master] = state

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def collect(self) -> None:
        """Sum the gradients over all ranks that have a part of them, each shard's where it is updated."""
        finalize_model_grads(self.chunks)
        for shard in self.shards:
            if shard.master is not None:
                shard.master.grad = shard.parameter.main_grad.view(-1)[shard.start : shard.stop]

    def clip(self, norm: float) -> None:
        """Scale the gradients down to `max_grad_norm`, given their norm over all ranks."""
        if norm > self.algorithm.max_grad_norm and self.masters:
            torch._foreach_mul_([master.grad for master in self.masters], self.algorithm.max_grad_norm / norm)

    def update(self, learning_rate: float) -> None:
        """Move the masters by AdamW (Loshchilov & Hutter 2019) and round them into the model."""
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Copy the masters into the model, on every rank that computes with them."""
        for optimizer in self._optimizers:
            optimizer._copy_main_params_to_model_params()
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)

    def state(self, shard: Shard, kind: str) -> Shaped[Tensor, " some"]:
        """One of `masters.KINDS` of a shard that has a master; the tensor itself."""
        return shard.master if kind == "master" else self._states[shard.master][kind]

    @property
    def updates(self) -> int:
        """AdamW's own step count; 0 on a rank without a shard."""
        return int(next(iter(self._states.values()))["step"]) if self._states else 0

    def set_updates(self, updates: int) -> None:
        for state in self._states.values():
            state["step"].fill_(updates)

    def _make(self, compute: torch.dtype) -> list[DistributedOptimizer]:
        a = self.algorithm
        config = OptimizerConfig(
            optimizer="adam",
            lr=a.learning_rate,
            min_lr=0.0,
            weight_decay=a.weight_decay,
            adam_beta1=a.betas[0],
            adam_beta2=a.betas[1],
            adam_eps=1e-8,
            decoupled_weight_decay=True,
            bf16=compute == torch.bfloat16,
            params_dtype=compute,
            use_distributed_optimizer=True,
        )
        with _DoublesAsSingles(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            # No overrides: decay of every tensor, norms too, as AlgorithmSpec says.
            made = get_megatron_optimizer(config, self.chunks, config_overrides={}, use_gloo_process_groups=False)
        return [one for one in made.chained_optimizers if not one.is_stub_optimizer]

    def _find_shards(self) -> list[Shard]:
        found: dict[nn.Parameter, Shard] = {}
        for optimizer in self._optimizers:
            masters: dict[nn.Parameter, Tensor] = {}
            # The views of wide parameters still hang on the autograd graph; AdamW is to see plain tensors.
            for models, views in zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True):
                views[:] = [view.detach() for view in views]
                masters |= zip(models, views, strict=True)
            halves = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
            for models, copies in halves:
                masters |= zip(models, copies, strict=True)
            inner = optimizer.optimizer.param_groups
            for group, views, copies in zip(
                inner, optimizer.shard_fp32_groups, optimizer.shard_fp32_from_float16_groups, strict=True
            ):
                group["params"] = [*views, *copies]
            for buffer in optimizer.buffers:
                for parameter in buffer.params:
                    master = masters.get(parameter)
                    start = 0
                    if master is not None:
                        start = optimizer._get_model_param_range_map(parameter)["param"].start
                    found[parameter] = Shard(parameter, start, master, optimizer.data_parallel_group)
        return [found[p] for chunk in self.chunks for p in chunk.parameters() if p in found]


class _DoublesAsSingles(TorchFunctionMode):
    """Has megatron-core take float64 parameters, of which it knows nothing, the way it takes float32 ones: by view."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result.replace("Double", "Float") if func is torch.Tensor.type and isinstance(result, str) else result
