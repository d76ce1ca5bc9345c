"""Forward hooks that put what chosen modules return into a TapChannel, once per training forward."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from furlong.kernels.tap_channel import TapChannel
from furlong.kernels.tap_protocol import TapError, TapKey


class TapHooks:
    """Taps the modules of one model chunk; with several chunks on a stage, one of these per chunk, one channel for all.

    Call `begin` before each forward of the chunk, in the grad mode of that forward. The first time that a tapped module
    then returns, its output is put; nothing else is:
    - a forward-only pass begins with gradients off, so nothing is armed;
    - under activation checkpointing the module first returns with gradients off (put) and again, inside the backward,
      when it is recomputed (not put): what runs below autograd's engine is never a first forward, even where a schedule
      begins the next micro-batch before it has recomputed this one.
    """

    def __init__(self, channel: TapChannel, modules: Mapping[int, nn.Module]):
        self._channel = channel
        self._layers = frozenset(modules)
        self._step = self._micro_batch = 0
        self._armed: set[int] = set()
        self._handles = [module.register_forward_hook(self._hook(layer)) for layer, module in modules.items()]

    def begin(self, step: int, micro_batch: int) -> None:
        """Arm every tap for the forward that follows; without gradients, disarm them."""
        self.end()
        self._step, self._micro_batch = step, micro_batch
        self._armed = set(self._layers) if torch.is_grad_enabled() else set()

    def end(self) -> None:
        """Check that the last forward reached every tapped module. `begin` does it too."""
        missed, self._armed = sorted(self._armed), set()
        if missed:
            raise TapError(
                f"the forward of step {self._step}, micro-batch {self._micro_batch} never ran the modules of layers "
                f"{missed}; tap modules that every forward runs, or cancel a micro-batch whose forward failed"
            )

    def cancel(self) -> None:
        """Give up the micro-batch whose forward failed: disarm, and let the draft's stage know."""
        self._armed = set()
        self._channel.cancel(self._step, self._micro_batch)

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, layer: int):
        def put(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> None:
            # The engine's task number is how torch.utils.checkpoint itself tells a recompute from a forward.
            if layer not in self._armed or torch._C._current_graph_task_id() != -1:
                return
            self._armed.discard(layer)
            hidden = output[0] if isinstance(output, tuple) else output
            self._channel.put(TapKey(self._step, self._micro_batch, layer), hidden)

        return put
