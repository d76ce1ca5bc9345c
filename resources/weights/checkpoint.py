"""The exported checkpoint of a step, and the proof that it loads as the model that was trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.ops.model_card import model_card
from furlong.ops.spec import Placement
from furlong.ops.stages.chain import committed_step, one_row
from furlong.ops.stages.context import StageError
from furlong.resources.lake import Lake
from furlong.resources.weights.draft_folder import draft_shape
from furlong.resources.weights.export import ExportError, check_export, export_digest, export_folder
from furlong.resources.weights.rebuild import full_row, rebuild
from furlong.resources.weights.run_model import run_model

if TYPE_CHECKING:
    from torch import Tensor

PROMPTS = 4
"""Questions whose logits are compared."""


@dataclass(frozen=True)
class Checkpoint:
    """An exported folder, verified tensor by tensor."""

    folder: Path
    version: int
    weights_digest: str
    files_digest: str
    """Over all its files."""
    size: int
    """Bytes of all its files."""
    wrote: bool
    """False when it was there already."""


@dataclass(frozen=True)
class Comparison:
    """Whether a folder reloads to the same logits."""

    passed: bool
    reason: str
    """What differs, or what was compared."""
    prompts: int
    logits: int
    """Numbers compared, each bit for bit."""


def export_checkpoint(placement: Placement, run: str, step: int) -> Checkpoint:
    """Export the version that a step published to `<root>/checkpoints/<run>/<version>`, unless it is there.

    Raises:
        StageError: the step has not published; RebuildError: the version was collected or damaged; ExportError: the
        folder holds something else, or cannot be written.
    """
    done = committed_step(Lake(placement.lake_uri()), run, step)
    if done is None:
        raise StageError(
            f"run {run}: step {step} has no record, so it has no weights to export; run its train_step first"
        )
    return export_version(placement, run, done["version_after"])


def export_version(placement: Placement, run: str, version: int, target: str = "") -> Checkpoint:
    """Export any version that was published, unless it is there.

    Args:
        target: the folder; empty for `<root>/checkpoints/<run>/<version>`.
    Raises:
        StageError: it was not published; the rest as `export_checkpoint`.
    """
    lake = Lake(placement.lake_uri())
    identity, spec, model = run_model(lake, run, placement)
    row = full_row(lake, run, version)
    if row["state"] == "staged":
        raise StageError(
            f"run {run}: step {row['step']} has not published its weights, version {version}; run its weight_publish "
            "first, or the job `publish`"
        )
    draft = draft_shape(spec, model.path)
    folder = Path(target).absolute() if target else placement.folder / "checkpoints" / run / str(version)
    wrote = not (folder.is_dir() and any(folder.iterdir()))
    if wrote:
        step = one_row(lake, "steps", {"run": run, "step": row["step"], "attempt": row["attempt"]})
        card = model_card(lake, lake.uri, identity, step, row) if step else None
        export_folder(lake, run, version, str(model.path), folder, card, draft)
    check_export(lake, row, str(model.path), folder, draft)
    digest, size = export_digest(folder)
    return Checkpoint(folder, version, row["digest"], digest, size, wrote)


def compare_logits(placement: Placement, run: str, checkpoint: Checkpoint) -> Comparison:
    """Load the folder as anybody would, and compare its logits with those of a module filled from the rebuilt tensors,
    adapters merged.

    Bit for bit, on questions of the evaluation split. Whatever is missing, left over, empty or not finite fails.
    """
    from furlong.ops.policy.lora import policy_of
    from furlong.ops.tasks.render import load_tokenizer, render_prompt

    lake = Lake(placement.lake_uri())
    identity, spec, model = run_model(lake, run, placement)
    where = {"dataset": identity["dataset"], "split": "eval"}
    rows = lake.read("prompts", where, ["position", "question"]).to_pylist()
    questions = [row["question"] for row in sorted(rows, key=lambda row: row["position"])[:PROMPTS]]
    tokenizers = load_tokenizer(checkpoint.folder), load_tokenizer(model.path)
    mine, wanted = ([render_prompt(t, spec.data.system, question) for question in questions] for t in tokenizers)
    if mine != wanted:
        return Comparison(
            False, "the exported tokenizer gives other token ids than the base model's", len(questions), 0
        )
    tensors = rebuild(lake, run, checkpoint.version, str(model.path))
    return compare_folder(checkpoint.folder, model.path, policy_of(tensors), mine)


def compare_folder(folder: Path, base: Path, tensors: dict[str, Tensor], prompts: list[list[int]]) -> Comparison:
    """The comparison itself.

    Args:
        folder: the exported one; base: a folder whose config.json describes the model.
        tensors: the policy's, rebuilt from the lake; prompts: token ids.
    """
    import torch

    if not prompts or not all(prompts):
        return Comparison(False, "there are no prompts to compare on; run `prompts` first", len(prompts), 0)
    try:
        loaded, reference = _loaded(folder), _filled(base, tensors)
    except (ExportError, OSError, RuntimeError, ValueError) as err:
        return Comparison(False, f"it cannot be loaded: {err}", len(prompts), 0)
    count = 0
    with torch.inference_mode():
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([prompt])
            one, two = (module(ids, use_cache=False).logits for module in (loaded, reference))
            if not (torch.isfinite(one).all() and torch.isfinite(two).all()):
                return Comparison(False, f"logits of prompt {number} are not finite", len(prompts), count)
            if one.dtype != two.dtype or one.shape != two.shape or not one.numel():
                odd = f"logits of prompt {number} are {one.dtype}{list(one.shape)} and {two.dtype}{list(two.shape)}"
                return Comparison(False, odd, len(prompts), count)
            if not torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8)):
                worst = (one.double() - two.double()).abs().max().item()
                return Comparison(False, f"logits of prompt {number} differ by up to {worst:.3g}", len(prompts), count)
            count += one.numel()
    return Comparison(True, "bit for bit the same", len(prompts), count)


def _loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    module, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    for kind, names in told.items():
        if names:
            raise ExportError(f"{folder} loads with {kind}: {sorted(map(str, names))[:3]}; export it again")
    return _settled(module)


def _filled(base: Path, tensors: dict[str, Tensor]) -> Any:
    """A module of the base's architecture in which every parameter is one of `tensors` or tied to one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base, local_files_only=True))
    missing = set(dict(module.named_parameters())) - tensors.keys()
    unknown = tensors.keys() - set(module.state_dict())
    if missing or unknown:
        odd = sorted(missing | unknown)[0]
        raise ExportError(f"the rebuilt tensors do not fit the model of {base}, first {odd}; the base model is another")
    module.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, strict=False, assign=True)
    module.tie_weights()
    return _settled(module)


def _settled(module: Any) -> Any:
    """Ready for inference, each parameter in memory of its own: matrix products may round by how memory is aligned,
    and what a loader mapped from a file lies anywhere."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    return module.eval()
