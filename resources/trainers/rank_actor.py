"""One rank of a trainer, in whatever process: it joins the others, then does what it is told together with them."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from furlong.ops.policy.parallel import Layout
from furlong.ops.spec import parse_spec
from furlong.resources.trainers.make import make_rank


class Rank:
    """Rank 0 is made by the group itself; the others are made by `ActorHost` in processes of their own."""

    def __init__(self, spec_json: str, threads: int, layout: Layout, rank: int) -> None:
        self._spec = parse_spec(json.loads(spec_json), f"trainer rank {rank}")
        self._threads, self._layout, self._rank = threads, layout, rank

    def join(self, address: str, deadline: float) -> None:
        """Meet the other ranks at the store of `address` (host:port) and make the trainer.

        Args:
            deadline: seconds for this and for each later wait for another rank.
        """
        host, _, port = address.rpartition(":")
        limit = timedelta(seconds=deadline)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=limit)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._layout.world, timeout=limit)
        self.trainer = make_rank(self._spec, self._threads, self._layout, self._rank, deadline)

    def follow(self, method: str, args: tuple[Any, ...]) -> None:
        """Call a method of the trainer for its part in what rank 0 does; its result is not asked for."""
        self.lead(method, args)

    def lead(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the trainer."""
        return getattr(self.trainer, method)(*args)
