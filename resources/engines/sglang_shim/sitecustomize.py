"""Runs at the start of every Python process of an SGLang server, before any import; found by PYTHONPATH.

It makes SGLang draw tokens as Furlong does and, on a CPU, takes the place of CUDA packages that it imports.
"""

import os
import sys
import types


def _declare_torchvision_operators():
    """The packaged torchvision is a CUDA build. Its Python part describes two operators at import, which exist only when
    its compiled part was loaded, and that needs CUDA libraries; SGLang imports torchvision for image models anyway."""
    import torch

    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _leave_host_memory_alone(module):
    """The cache of routed experts registers its memory with CUDA, also where there is none."""
    import torch

    if not torch.cuda.is_available():
        module._cuda_host_register = lambda *args, **kwargs: None


def _draw_as_furlong_does(module):
    """Instead of SGLang's own way of adding a sampling backend, as on a CPU it overrides the choice of backend."""
    import furlong_sampler

    module.create_sampler = furlong_sampler.make(module)


_BEFORE = {"torchvision": _declare_torchvision_operators}
_AFTER = {
    "sglang.srt.mem_cache.pool_host.common": _leave_host_memory_alone,
    "sglang.srt.layers.sampler": _draw_as_furlong_does,
}


class _Watch:
    """An import finder that finds nothing by itself: it acts before or after a module is imported."""

    def find_spec(self, name, path=None, target=None):
        if act := _BEFORE.pop(name, None):
            act()
        if not (act := _AFTER.pop(name, None)):
            return None
        import importlib.util

        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_act(module):
            execute(module)
            act(module)

        spec.loader.exec_module = execute_and_act
        return spec


# Furlong is not installed here; the sampler needs this one part of it, which needs nothing else of it.
_furlong = types.ModuleType("furlong")
_furlong.__path__ = [os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))]
sys.modules["furlong"] = _furlong
sys.meta_path.insert(0, _Watch())
