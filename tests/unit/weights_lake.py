"""A lake with small synthetic weights: publishes versions as a run would, and remembers what each one was."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from blank_rows import blank_row
from safetensors.torch import save_file
from torch import Tensor

from furlong.ops import records
from furlong.ops.weights.delta import encode, full_bytes
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.resources.lake import Lake
from furlong.resources.weights.anchors import write_anchor

RUN = "r"


def small_tensors(seed: int = 0) -> dict[str, Tensor]:
    """A matrix, a vector, an empty tensor and a scalar, in bfloat16, with NaN and negative zero among them."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        "model.a": torch.randn(16, 8, generator=draw),
        "model.b": torch.randn(24, generator=draw),
        "model.empty": torch.zeros(0, 3),
        "model.scalar": torch.tensor(1.5),
    }
    tensors["model.b"][:2] = torch.tensor([float("nan"), -0.0])
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


class WeightsLake:
    """One run's versions in a lake under `root`, version 0 being a model folder beside it."""

    def __init__(self, root: Path, tensors: dict[str, Tensor] | None = None, run: str = RUN, base: str | None = None):
        self.lake, self.run = Lake(str(root / "lake")), run
        self.base = base or str(root / "base")
        self.truth: dict[int, dict[str, Tensor]] = {}
        self.parents: dict[int, int | None] = {}
        tensors = small_tensors() if tensors is None else tensors
        Path(self.base).mkdir(exist_ok=True)
        if not (Path(self.base) / "model.safetensors").exists():
            save_file(tensors, Path(self.base) / "model.safetensors")
            (Path(self.base) / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32"}))
            (Path(self.base) / "tokenizer.json").write_text("{}")
        self._commit(0, None, tensors, "live", "base", 0)

    def publish(
        self,
        parent: int | None = None,
        tensors: dict[str, Tensor] | None = None,
        state: str = "live",
        anchor: bool = False,
        share: float = 0.1,
    ) -> int:
        """The next version on `parent` (by default the newest): `tensors`, or the parent's with a share changed."""
        version = max(self.truth) + 1
        parent = version - 1 if parent is None else parent
        old = self.truth[parent]
        new = self.mutated(old, version, share) if tensors is None else tensors
        digests = {entry["name"]: entry["digest"] for entry in manifest(new)}
        deltas = encode(version, parent, self.run, old, new, digests)
        if deltas.num_rows:
            self.lake.commit_once("weight_deltas", {"run": self.run, "version": version}, deltas)
        place = write_anchor(self.lake.uri, self.run, version, new, weights_digest(digests)) if anchor else None
        size = sum(len(payload) for payload in deltas["data"].to_pylist())
        self._commit(version, parent, new, state, place, size)
        return version

    @staticmethod
    def mutated(old: dict[str, Tensor], seed: int, share: float) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        new = {}
        for name, tensor in old.items():
            hit = torch.rand(tensor.shape, generator=draw) < share
            bits = tensor.reshape(-1).view(torch.int16).reshape(tensor.shape)
            step = torch.randint(1, 9, tensor.shape, generator=draw).to(torch.int16)
            new[name] = torch.where(hit, bits + step, bits).reshape(-1).view(tensor.dtype).reshape(tensor.shape)
        return new

    def states(self) -> dict[int, str]:
        rows = self.lake.read("weight_versions", {"run": self.run}, ["version", "state"]).to_pylist()
        return {row["version"]: row["state"] for row in rows}

    def row(self, version: int) -> dict:
        return self.lake.read("weight_versions", {"run": self.run, "version": version}).to_pylist()[0]

    def alter(self, version: int, **columns: object) -> None:
        """Change columns of a version's row, as an outside hand would."""
        where = {"run": self.run, "version": version}
        self.lake.replace("weight_versions", where, records.rows("weight_versions", [self.row(version) | columns]))

    def _commit(
        self, version: int, parent: int | None, tensors: dict[str, Tensor], state: str, anchor: str | None, size: int
    ) -> None:
        entries = manifest(tensors)
        row = blank_row("weight_versions") | {
            "run": self.run, "version": version, "step": version, "attempt": 1, "state": state,
            "kind": "anchor" if anchor else "delta", "parent": parent,
            "digest": weights_digest({entry["name"]: entry["digest"] for entry in entries}), "tensors": entries,
            "anchor": anchor, "full_bytes": full_bytes(tensors), "delta_bytes": size, "transport": "disk_delta",
        }  # fmt: skip
        where = {"run": self.run, "version": version}
        self.lake.commit_once("weight_versions", where, records.rows("weight_versions", [row]))
        self.truth[version], self.parents[version] = tensors, parent


def same_bits(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """Equal names, dtypes, shapes and bits, NaN and the sign of zero included."""
    return bool(one) and manifest(one) == manifest(two)


def small_run(root: Path, spec: str, run: str = RUN, **overrides: object) -> WeightsLake:
    """A run as it is written down for people: identity, prompts, three steps and their versions, on a real tiny model
    that was never fine-tuned. Its placement is `Placement(root=root)`."""
    from furlong.ops.policy.architecture import read_architecture
    from furlong.ops.policy.checkpoint import read_tensors
    from furlong.ops.spec import Placement
    from furlong.ops.tasks.prompts import prompt_rows
    from furlong.resources.system import System
    from furlong.resources.weights.run_model import run_model

    placement = Placement(root=str(root), threads=1)
    overrides = {"model.scratch.sft.steps": 0, "model.dtype": "bfloat16"} | overrides
    System(placement).start_run(spec, overrides, run)
    lake = Lake(placement.lake_uri())
    row, parsed, model = run_model(lake, run, placement)
    tensors = read_tensors(str(model.path), read_architecture(str(model.path)), torch.bfloat16)
    made = WeightsLake(root, tensors, run, str(model.path))
    prompts = records.rows("prompts", prompt_rows(parsed.data, parsed.seed))
    made.lake.commit_once("prompts", {"dataset": row["dataset"]}, prompts)
    for step in (1, 2, 3):
        small_step(made, step, {n: (t.float() * (1 + 0.01 * step)).to(t.dtype) for n, t in tensors.items()})
    return made


def small_step(made: WeightsLake, step: int, tensors: dict[str, Tensor]) -> int:
    """The version that a step has made of these tensors, and the step's record."""
    version, run = made.publish(tensors=tensors), made.run
    key = {"run": run, "step": step, "attempt": 1}
    row = blank_row("steps") | key | {"digest_after": made.row(version)["digest"], "reward_mean": 0.5}
    row |= {"version_before": version - 1, "version_after": version, "batch_digest": "b"}
    made.lake.commit_once("steps", key, records.rows("steps", [row]))
    return version
