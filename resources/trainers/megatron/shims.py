"""What megatron-core 0.16.1 needs to run without CUDA. Nothing here is switched on where there is a GPU.

megatron-core names CUDA in literals, asks for the current CUDA device, seeds CUDA generators and compares tensor type
names. Its own modules are given a stand-in for `torch` that answers for the CPU; everybody else's `torch` stays as it is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

VERSION = "0.16.1"
"""The release these shims were made for, and the newest that supports Python 3.11."""
_MENDED: list[str] = []


class ShimError(RuntimeError):
    """megatron-core is missing or is not the release that was tested; the message says what to install."""


def require() -> None:
    """Refuse, before anything is built, to go on without the tested megatron-core.

    Raises:
        ShimError: it is not installed, or is another release.
    """
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as err:
        raise ShimError(
            f"the megatron trainer needs megatron-core, which is not installed; run: pip install megatron-core=={VERSION}"
        ) from err
    if found != VERSION:
        raise ShimError(
            f"megatron-core {found} is installed, but the trainer reaches into parts of it that move between releases and "
            f"was tested with {VERSION}, the newest for Python 3.11; run: pip install megatron-core=={VERSION}"
        )


def install() -> None:
    """Make megatron-core usable in this process; harmless when done before.

    Raises:
        ShimError: see `require`.
    """
    require()
    if torch.cuda.is_available() or _MENDED:
        return
    for part in ("distributed", "optimizer", "pipeline_parallel.schedules", "models.gpt"):
        importlib.import_module(f"megatron.core.{part}")  # so that all its modules are there to be mended
    stand_in = _cpu_torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and isinstance(module, ModuleType):
            _uncompile(module)
            if getattr(module, "torch", None) is torch:
                module.torch = stand_in
                _MENDED.append(name)
    _mend_random()
    _mend_experts()
    _mend_optimizer()


class _Delegate(ModuleType):
    """A module that answers as another one does, except for the names it was given."""

    def __init__(self, of: ModuleType, **own: Any) -> None:
        super().__init__(of.__name__)
        self.__dict__["_of"] = of
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_of"], name)


class _NoStream:
    """A CUDA stream or event: work on a CPU is done when the call returns, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, *args: Any, **kwargs: Any) -> _NoStream:
        return self

    wait_stream = wait_event = synchronize = record = wait = _nothing


def _cpu_torch() -> ModuleType:
    nothing = lambda *args, **kwargs: None  # noqa: E731
    cuda = _Delegate(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        synchronize=nothing,
        manual_seed=nothing,
        get_rng_state=lambda *args, **kwargs: torch.zeros(0, dtype=torch.uint8),
        Stream=_NoStream,
        Event=_NoStream,
        stream=_NoStream,
        current_stream=_NoStream,
        default_stream=_NoStream,
    )
    factories = ("tensor", "zeros", "ones", "empty", "full", "rand", "randn", "arange", "zeros_like", "empty_like")
    return _Delegate(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in factories})


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def _uncompile(module: ModuleType) -> None:
    """Compiling for the CPU needs a C++ compiler and minutes; what it would fuse here is a few small functions."""
    for owner in [module, *(value for value in vars(module).values() if isinstance(value, type))]:
        if getattr(owner, "__module__", module.__name__) != module.__name__:
            continue
        for name, value in list(vars(owner).items()):
            plain = getattr(value, "_torchdynamo_orig_callable", None)
            if plain is not None:
                setattr(owner, name, plain)


def _mend_random() -> None:
    """No generator on the device to fork: nothing the trainer builds draws random numbers."""
    from megatron.core.tensor_parallel import random

    @contextmanager
    def fork(self: Any, name: str = "") -> Iterator[None]:
        yield

    random.CudaRNGStatesTracker.add = lambda self, name, seed: self.states_.setdefault(name, torch.tensor(seed))
    random.CudaRNGStatesTracker.fork = fork
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.zeros(0, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *args, **kwargs: None


def _mend_experts() -> None:
    """A name that exists only beside Transformer Engine, and split sizes that gloo wants as a list."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None
    exchange = token_dispatcher.all_to_all

    def listed(group: Any, tensor: Any, out: Any = None, into: Any = None, *rest: Any, **named: Any) -> Any:
        sizes = [None if s is None else [int(n) for n in s] for s in (out, into)]
        return exchange(group, tensor, *sizes, *rest, **named)

    token_dispatcher.all_to_all = listed


class _CudaTypeNames(TorchFunctionMode):
    """`Tensor.type()` as the optimizer expects it, and `Tensor.cuda()` that stays where it is."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _mend_optimizer() -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    owners = (
        (distrib_optimizer.DistributedOptimizer, "__init__"),
        (optimizer.Float16OptimizerWithFloat16Params, "__init__"),
        (optimizer.FP32Optimizer, "__init__"),
        (LanguageModule, "setup_embeddings_and_output_layer"),
    )
    for owner, name in owners:
        setattr(owner, name, _with_type_names(getattr(owner, name)))
    clip = _with_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    for module in (clip_grads, optimizer):
        module.clip_grad_by_total_norm_fp32 = clip


def _with_type_names(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _CudaTypeNames():
            return call(*args, **kwargs)

    return called
