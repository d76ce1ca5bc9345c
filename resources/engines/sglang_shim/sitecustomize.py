"""Runs at the start of every Python process of an SGLang server on a CPU, before any import; found by PYTHONPATH.

The packaged torchvision is a CUDA build. Its Python part describes two operators at import, which exist only when its
compiled part was loaded, and that needs CUDA libraries; SGLang imports torchvision for image models in any case.
"""

import sys


class _DefineOperators:
    """An import finder that finds nothing: it declares the operators just before torchvision is imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return None


sys.meta_path.insert(0, _DefineOperators())
