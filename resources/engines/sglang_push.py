"""Three ways to put tensors into a running SGLang server, through its own update calls.

The server tells policy and draft apart by a selector, not by names: `draft.*` go to its draft, without that prefix, and
all others to the policy, in one session. Each way has a part that is done while the server generates (`pack`) and one that
is done while it is paused (`push`).
"""

from __future__ import annotations

import base64
import io
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, Protocol

import torch.multiprocessing
from safetensors.torch import save_file
from torch import Tensor

from furlong.ops.draft.shape import PREFIX
from furlong.ops.weights.digest import dtype_name
from furlong.resources.engines.sglang_http import ServerClient
from furlong.resources.engines.step_gate import EngineError
from furlong.resources.weights.group import Group, PeerLost, open_store

Push = Literal["auto", "tensor", "distributed", "disk"]
PUSH_DEADLINE = 120.0
"""Seconds for one update call: a copy, or a read of what was just written."""
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Parcel:
    """Tensors by their names in a weights version, ready to be pushed."""

    tensors: dict[str, Tensor]
    folder: Path | None = None

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Selector of the server's model -> its tensors, by its names; only models that have any."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            selector = "draft" if name.startswith(PREFIX) else "target"
            found.setdefault(selector, {})[name.removeprefix(PREFIX)] = tensor
        return dict(sorted(found.items(), reverse=True))


class Pusher(Protocol):
    """One way."""

    def pack(self, tensors: dict[str, Tensor]) -> Parcel:
        """Make ready; the server does not notice. EngineError when there is no room, or no such way for a draft."""

    def push(self, parcel: Parcel, version: int) -> None:
        """Change the server's weights and the version it reports. It must be paused. EngineError when it refuses:
        then its weights are undefined."""

    def drop(self, parcel: Parcel) -> None:
        """Give back what `pack` took."""

    def close(self) -> None:
        """Give back everything; harmless when the server has ended."""


def make_pusher(push: Push, server: ServerClient, scratch: Path) -> Pusher:
    """The way called `push`, `auto` being shared memory for a server on this machine; EngineError when there is none."""
    if push == "auto":
        push = "tensor" if server.local else "distributed"
    if push == "tensor":
        return TensorPush(server)
    if push == "distributed":
        return DistributedPush(server)
    if push == "disk":
        return DiskPush(server, scratch)
    raise EngineError(f"push {push!r} is unknown; give auto, tensor, distributed or disk")


@contextmanager
def update_session(server: ServerClient, selectors: Iterable[str]) -> Iterator[None]:
    """What SGLang wants around updates from tensors and process groups; closed also when an update failed.

    Args:
        selectors: of the models that are updated in it.
    """
    one, *more = selectors
    server.post("/begin_weight_update", {"selector": "all" if more else one}, PUSH_DEADLINE)
    try:
        yield
    finally:
        server.post("/end_weight_update", {}, PUSH_DEADLINE)


class TensorPush:
    """Shared memory: the server copies from the pages that the staged tensors lie in."""

    # The strategy is one setting for the whole process.
    _sharing = threading.Lock()

    def __init__(self, server: ServerClient):
        self._server = server

    def pack(self, tensors: dict[str, Tensor]) -> Parcel:
        need = sum(tensor.nbytes for tensor in tensors.values() if not tensor.is_shared())
        free = shutil.disk_usage(SHARED_MEMORY).free
        # A page that cannot be had is a signal that ends the process, not an error that could be caught.
        if need > free:
            raise EngineError(
                f"{need} bytes of changed tensors do not fit into the {free} free bytes of {SHARED_MEMORY}; "
                "enlarge it, or start the engine with push='disk'"
            )
        with self._by_name():
            for tensor in tensors.values():
                tensor.share_memory_()
        return Parcel(tensors)

    def push(self, parcel: Parcel, version: int) -> None:
        parts = parcel.parts()
        with update_session(self._server, parts):
            for selector, tensors in parts.items():
                buffer = io.BytesIO()
                with self._by_name():
                    # Handles of shared memory, in the form the server reads; the bytes are not in it.
                    ForkingPickler(buffer).dump(list(tensors.items()))
                body = {
                    "serialized_named_tensors": [base64.b64encode(buffer.getvalue()).decode()],
                    "flush_cache": False,
                    "weight_version": str(version),
                    "selector": selector,
                }
                self._server.post("/update_weights_from_tensor", body, PUSH_DEADLINE)

    def drop(self, parcel: Parcel) -> None:
        """Nothing: the memory goes with the tensors."""

    def close(self) -> None:
        """Nothing: the memory goes with the tensors."""

    @classmethod
    @contextmanager
    def _by_name(cls) -> Iterator[None]:
        """Share memory by file name: a file descriptor can only be handed to children, and the server ends when it is
        refused one."""
        with cls._sharing:
            before = torch.multiprocessing.get_sharing_strategy()
            torch.multiprocessing.set_sharing_strategy("file_system")
            try:
                yield
            finally:
                torch.multiprocessing.set_sharing_strategy(before)


class DistributedPush:
    """A gloo group of this process, rank 0, and the server, rank 1; one broadcast per tensor."""

    def __init__(self, server: ServerClient):
        self._server = server
        self._group: Group | None = None
        self._met = 0
        self._meet()

    def pack(self, tensors: dict[str, Tensor]) -> Parcel:
        return Parcel({name: tensor.contiguous() for name, tensor in tensors.items()})

    def push(self, parcel: Parcel, version: int) -> None:
        group, parts = self._group or self._meet(), parcel.parts()
        try:
            with update_session(self._server, parts), ThreadPoolExecutor(1) as pool:
                for selector, tensors in parts.items():
                    body = self._announced(tensors, version) | {"selector": selector}
                    answer = pool.submit(self._server.post, "/update_weights_from_distributed", body, PUSH_DEADLINE)
                    for tensor in tensors.values():
                        group.broadcast(tensor, 0)
                    answer.result()
        except (PeerLost, EngineError) as err:
            # A group that failed once is of no more use; the next push makes another.
            self._group = None
            raise EngineError(f"the server did not take the tensors broadcast to it: {err}") from err

    def drop(self, parcel: Parcel) -> None:
        """Nothing: the tensors are where they were."""

    def close(self) -> None:
        self._group = None

    def _announced(self, tensors: dict[str, Tensor], version: int) -> dict[str, Any]:
        """The body of the call during which the tensors are broadcast, in this order."""
        return {
            "names": list(tensors),
            "dtypes": [dtype_name(tensor) for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": self._name,
            "flush_cache": False,
            "weight_version": str(version),
        }

    def _meet(self) -> Group:
        self._met += 1
        self._name = f"furlong-{self._met}"
        store, address = open_store()
        host, _, port = address.rpartition(":")
        body = {
            "master_address": host, "master_port": int(port), "rank_offset": 1, "world_size": 2,
            "group_name": self._name, "backend": "gloo",
        }  # fmt: skip
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._server.post, "/init_weights_update_group", body, PUSH_DEADLINE)
            # The server's key prefixes: its own, and the two that PyTorch adds for a group and for its devices.
            self._group = Group(address, f"{self._name}/{self._name}//cpu/", 0, 2, PUSH_DEADLINE)
            answer.result()
        self._store = store
        return self._group


class DiskPush:
    """A safetensors file with the changed tensors, written before the pause and read by the server during it."""

    def __init__(self, server: ServerClient, scratch: Path):
        self._server, self._scratch = server, scratch

    def pack(self, tensors: dict[str, Tensor]) -> Parcel:
        if any(name.startswith(PREFIX) for name in tensors):
            raise EngineError(
                "SGLang loads a file into policy and draft alike, so a draft cannot be pushed by one; start the engine with "
                "push='tensor' or push='distributed'"
            )
        need, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(self._scratch).free
        if need > free:
            raise EngineError(f"{need} bytes do not fit into the {free} free ones at {self._scratch}; make room there")
        folder = Path(tempfile.mkdtemp(prefix="shadow-", dir=self._scratch))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return Parcel(tensors, folder)

    def push(self, parcel: Parcel, version: int) -> None:
        need = sum(tensor.nbytes for tensor in parcel.tensors.values())
        path = parcel.folder / "model.safetensors"
        # A server that meets a damaged file in the middle of an update ends.
        if not path.is_file() or path.stat().st_size < need:
            raise EngineError(f"{path} is gone or shorter than the {need} bytes written to it; stage the version again")
        body = {
            "model_path": str(parcel.folder), "load_format": "safetensors", "flush_cache": False,
            "weight_version": str(version),
        }  # fmt: skip
        self._server.post("/update_weights_from_disk", body, PUSH_DEADLINE)

    def drop(self, parcel: Parcel) -> None:
        shutil.rmtree(parcel.folder)

    def close(self) -> None:
        """Nothing: the scratch folder belongs to the engine."""
