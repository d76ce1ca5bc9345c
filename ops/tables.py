"""One Arrow schema per table of the lake.

A field marked *measured* (a time, a place) may differ between two identical runs; `records.row_digest` leaves those out.
"""

from __future__ import annotations

import pyarrow as pa


def _measured(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, metadata={b"measured": b"1"})


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_STR, _I32, _I64, _F32, _F64 = pa.string(), pa.int32(), pa.int64(), pa.float32(), pa.float64()
_STEP_KEY = [_required("run", _STR), _required("step", _I64), _required("attempt", _I32)]
_SPAN = pa.struct([("version", _I64), ("start", _I32), ("end", _I32)])
_TENSOR = pa.struct([("name", _STR), ("dtype", _STR), ("shape", pa.list_(_I64)), ("digest", _STR)])
_OUTCOME = pa.struct(
    [
        ("trajectory_id", _STR),
        ("group_id", _STR),
        ("reward", _F64),
        ("advantage", _F64),
        ("disposition", _STR),
        ("tokens_trained", _I64),
        ("tokens_reached", _I64),
    ]
)
_GROUP = pa.struct([("step", _I64), ("attempt", _I32), ("group_id", _STR)])
_ROUTING = [
    _required("first", _I64),
    _required("rows", _I64),
    _required("layers", pa.list_(_I32)),
    _required("top_k", _I32),
    _required("experts", _I32),
    _required("data", pa.large_binary()),
]
_REPLIES = pa.struct([("tokens", _I64), ("seconds", _F64)])
_SPECULATION = pa.struct(
    [
        ("engines", _I32),
        ("verifies", _I64),
        ("tokens", _I64),
        ("proposed", pa.list_(_I64)),
        ("accepted", pa.list_(_I64)),
        ("positions", pa.list_(pa.struct([("below", _I64), ("verifies", _I64), ("tokens", _I64)]))),
        ("tasks", pa.list_(pa.struct([("task", _STR), ("verifies", _I64), ("tokens", _I64)]))),
        (
            "decode_steps",
            pa.list_(
                pa.struct([("kind", _STR), ("replies", _I64), ("count", _I64), ("tokens", _I64), ("seconds", _F64)])
            ),
        ),
        ("draft_seconds", _F64),
        ("drafted", _REPLIES),
        ("shadow", _REPLIES),
    ]
)
_ATTESTATION = pa.struct([("engine", _STR), ("version", _I64), ("digest", _STR)])

TABLES: dict[str, pa.Schema] = {
    # One row per run: its identity, written before anything else.
    "runs": pa.schema(
        [
            _required("run", _STR),
            _required("spec_fingerprint", _STR),
            _required("spec", _STR),
            _required("dataset", _STR),
            _required("base_digest", _STR),
            _measured("code_version", _STR),
            _measured("created_at", _F64),
        ]
    ),
    # One row per question. `entry` is what the verifier needs, as JSON.
    "prompts": pa.schema(
        [
            _required("dataset", _STR),
            _required("prompt_id", _STR),
            _required("split", _STR),
            _required("position", _I64),
            _required("task", _STR),
            _required("question", _STR),
            _required("answer", _STR),
            _required("entry", _STR),
            _required("verifier", _STR),
        ]
    ),
    # One row per time that a prompt was drawn. (step, attempt) is the step it was drawn for; `batches` tells which one
    # it is part of. `position` counts prompts over the whole run; groups that take the same prompt again share it.
    # `weights_version` is the newest when it was drawn; its tokens tell their own (`trajectories.version_spans`).
    "groups": pa.schema(
        [
            *_STEP_KEY,
            _required("group_id", _STR),
            _required("position", _I64),
            _required("dataset", _STR),
            _required("prompt_id", _STR),
            _required("prompt_tokens", pa.list_(_I32)),
            _required("samples", _I32),
            _required("weights_version", _I64),
        ]
    ),
    # What became of a group, event by event; the one with the highest `seq` tells where it stands. `step` is that of the
    # batch it was admitted to or trained in.
    "ledger": pa.schema(
        [
            _required("run", _STR),
            _required("seq", _I64),
            _required("group_id", _STR),
            _required("state", _STR),
            _required("reason", _STR),
            pa.field("step", _I64),
            _measured("at", _F64),
        ]
    ),
    # The groups that a step trains on, in order of position. `staleness` counts optimiser steps between the weights that
    # sampled a token and those that the step starts from, over all sampled tokens of the batch; `passed_over` counts
    # unfinished groups of lower position, `waiting_tokens` is the mean reply of groups that were finished but left.
    # `speculation` is what the engines counted while the step's batch was drawn (since the batch before, in an asynchronous
    # run); null without a draft. `verifies` counts verified replies, step by step, `tokens` what those gave; `proposed`
    # and `accepted` are by depth, `positions` by place in the reply, `decode_steps` are the engines' own steps by what
    # became of speculation and by size; `drafted` and `shadow` are replies with and without the draft.
    "batches": pa.schema(
        [
            *_STEP_KEY,
            _required("version", _I64),
            _required("groups", pa.list_(_GROUP)),
            _required("staleness_mean", _F64),
            _required("staleness_max", _I64),
            _required("passed_over", _I64),
            _required("waiting_groups", _I64),
            pa.field("waiting_tokens", _F64),
            _measured("waited_seconds", _F64),
            _measured("speculation", _SPECULATION),
        ]
    ),
    # One row per trajectory: a conversation from its first token to its last. Per-token lists run over all of it, prompt
    # and tool answers included; log-probabilities are null where nothing was sampled. `logprobs` are those of the
    # distribution that was sampled from (temperature and cut-offs applied), `model_logprobs` those of the unmodified
    # model. A sample that branched has several leaves; tokens that leaves share are trained in the first only. `routing`,
    # for models with experts, holds rows x layers x top_k expert ids of the tokens from `first` on, recorded at the forward
    # pass that used them (`ops.protocols.Routing`). `drafted` marks sampled tokens that the draft had proposed; null without
    # a draft.
    "trajectories": pa.schema(
        [
            *_STEP_KEY,
            _required("trajectory_id", _STR),
            _required("group_id", _STR),
            _required("prompt_id", _STR),
            _required("sample", _I32),
            _required("leaf", _I32),
            _required("turns", _I32),
            _required("messages", _STR),
            _required("tokens", pa.list_(_I32)),
            _required("logprobs", pa.list_(_F32)),
            _required("model_logprobs", pa.list_(_F32)),
            _required("loss_mask", pa.list_(pa.bool_())),
            pa.field("routing", pa.struct(_ROUTING)),
            _measured("drafted", pa.list_(pa.bool_())),
            _required("version_spans", pa.list_(_SPAN)),
            _required("finish_reason", _STR),
            _required("seed", _I64),
            _required("text", _STR),
            _measured("engine", _STR),
            _measured("started_at", _F64),
            _measured("seconds", _F64),
        ]
    ),
    # Replies ended before their end, to be resumed: what had been drawn of them until then. `part` counts the
    # interruptions of one reply.
    "fragments": pa.schema(
        [
            _required("run", _STR),
            _required("request_id", _STR),
            _required("part", _I32),
            _required("prompt", pa.list_(_I32)),
            _required("tokens", pa.list_(_I32)),
            _required("logprobs", pa.list_(_F32)),
            _required("model_logprobs", pa.list_(_F32)),
            _required("version_spans", pa.list_(_SPAN)),
            pa.field("routing", pa.struct(_ROUTING)),
            _measured("seconds", _F64),
        ]
    ),
    # One row per try at a trajectory that gave none. `tokens` counts what had been sampled and is thrown away.
    "failures": pa.schema(
        [
            *_STEP_KEY,
            _required("trajectory_id", _STR),
            _required("try", _I32),
            _required("kind", _STR),
            _required("detail", _STR),
            _required("tokens", _I64),
            _measured("engine", _STR),
            _measured("at", _F64),
        ]
    ),
    # One row per (trajectory, verifier, verifier version). `score` is null for timeout and error.
    "rewards": pa.schema(
        [
            *_STEP_KEY,
            _required("trajectory_id", _STR),
            _required("verifier", _STR),
            _required("verifier_version", _STR),
            _required("verdict", _STR),
            pa.field("score", _F64),
            _required("extracted", _STR),
            _required("detail", _STR),
            _measured("seconds", _F64),
        ]
    ),
    # One row per trajectory of a run that distils: the teacher's log-probability of each of its tokens, at the rollouts'
    # temperature; null where nothing was sampled. `teacher` is the digest of the teacher's folder.
    "teacher_scores": pa.schema(
        [
            *_STEP_KEY,
            _required("trajectory_id", _STR),
            _required("teacher", _STR),
            _required("logprobs", pa.list_(_F32)),
        ]
    ),
    # One row per trajectory that a step trained on: the trainer's log-probability of each sampled token under the weights
    # version that sampled it; null where nothing was sampled. Its difference to `trajectories.logprobs` is the mismatch.
    "trainer_scores": pa.schema([*_STEP_KEY, _required("trajectory_id", _STR), _required("logprobs", pa.list_(_F32))]),
    # One row per trajectory of a finished step scored again by another verifier or another version of it; nothing trains
    # on these.
    "rescores": pa.schema(
        [
            _required("run", _STR),
            _required("trajectory_id", _STR),
            _required("verifier", _STR),
            _required("verifier_version", _STR),
            _required("verdict", _STR),
            pa.field("score", _F64),
            _required("extracted", _STR),
            _required("detail", _STR),
            _measured("seconds", _F64),
            _measured("at", _F64),
        ]
    ),
    # One row per optimiser step. `outcomes.tokens_trained` counts the trajectory's tokens that enter the loss,
    # `tokens_reached` those of them whose gradient came through the whole network to the optimiser.
    "steps": pa.schema(
        [
            *_STEP_KEY,
            _required("version_before", _I64),
            _required("version_after", _I64),
            _required("batch_digest", _STR),
            _required("digest_before", _STR),
            _required("digest_after", _STR),
            _required("master_digest_after", _STR),
            _required("outcomes", pa.list_(_OUTCOME)),
            _required("reward_mean", _F64),
            _required("loss", _F64),
            _required("grad_norm", _F64),
            _required("learning_rate", _F64),
            _required("tokens_trained", _I64),
            _required("clip_fraction", _F64),
            _required("entropy", _F64),
            _required("ess", _F64),
            _required("rejected_fraction", _F64),
            pa.field("kl", _F64),
            _required("mismatch_coverage", _F64),
            pa.field("mismatch_mean", _F64),
            pa.field("mismatch_max", _F64),
            pa.field("mismatch_p99", _F64),
            pa.field("mismatch_k3", _F64),
            pa.field("mismatch_ess", _F64),
            pa.field("value_loss", _F64),
            pa.field("value_explained", _F64),
            pa.field("value_grad_norm", _F64),
            pa.field("draft_loss", _F64),
            pa.field("draft_agreement", _F64),
            pa.field("draft_acceptance", _F64),
            pa.field("draft_tokens", _I64),
            pa.field("draft_grad_norm", _F64),
            _measured("draft_seconds", _F64),
            pa.field("draft_skipped", _STR),
            _measured("trainer", _STR),
            _measured("seconds", _F64),
        ]
    ),
    # One row per weights version, for ever. It is written `staged` and replaced by `live` after every engine attested;
    # `collecting` is marked for removal but complete, `collected` means that its bytes may be gone. `kind` is `anchor`
    # when `anchor` names complete weights: `base` for the model's own folder, else a path below the lake. `transport`
    # and what follows tell how it reached the engines; `retried_because` is empty, or why an earlier try failed.
    "weight_versions": pa.schema(
        [
            _required("run", _STR),
            _required("version", _I64),
            _required("step", _I64),
            _required("attempt", _I32),
            _required("state", _STR),
            _required("kind", _STR),
            pa.field("parent", _I64),
            _required("digest", _STR),
            _required("tensors", pa.list_(_TENSOR)),
            pa.field("anchor", _STR),
            _required("full_bytes", _I64),
            _required("delta_bytes", _I64),
            _required("changed_fraction", _F64),
            _required("attestations", pa.list_(_ATTESTATION)),
            _measured("fence", _I64),
            _measured("transport", _STR),
            _measured("wire_bytes", _I64),
            _measured("stage_seconds", _F64),
            _measured("pause_seconds", _F64),
            _measured("retried_because", _STR),
            _measured("staged_at", _F64),
            _measured("live_at", _F64),
        ]
    ),
    # Names given to weights versions by people: `stable`, `candidate`. A tagged version is never collected.
    "weight_tags": pa.schema(
        [_required("run", _STR), _required("tag", _STR), _required("version", _I64), _measured("tagged_at", _F64)]
    ),
    # One row per time that `stable` or `candidate` came to name another version, oldest first by `seq`: `action` is
    # `promote` or `rollback`, `previous` what the tag named before, `reason` a person's or a sensor's words.
    "promotions": pa.schema(
        [
            _required("run", _STR),
            _required("seq", _I64),
            _required("tag", _STR),
            _required("version", _I64),
            pa.field("previous", _I64),
            _required("action", _STR),
            _required("reason", _STR),
            _measured("by", _STR),
            _measured("at", _F64),
        ]
    ),
    # One row per check of a step (of the newest step for checks of a version): the verdict that `weight_publish` and
    # promotion read. `found` is JSON of the numbers it rests on, `evidence` the trajectories that moved them.
    "checks": pa.schema(
        [
            *_STEP_KEY,
            _required("check", _STR),
            _required("asset", _STR),
            _required("passed", pa.bool_()),
            _required("blocking", pa.bool_()),
            _measured("severity", _STR),
            _measured("message", _STR),
            _measured("found", _STR),
            _measured("evidence", pa.list_(_STR)),
            _measured("at", _F64),
        ]
    ),
    # One row per stage of a step, as it was when it committed: how long, and which Dagster run did it. Stages whose
    # driver ended before the step's last one have none.
    "stage_times": pa.schema(
        [
            *_STEP_KEY,
            _required("stage", _STR),
            _measured("started_at", _F64),
            _measured("seconds", _F64),
            _measured("work_seconds", _F64),
            _measured("dagster_run", _STR),
        ]
    ),
    # Changed bytes of one chunk of one tensor against `base_version`, or all its bytes where `encoding` is `raw` (a
    # tensor that is new, has another shape, or changed nearly everywhere); `digest` is of the complete new tensor.
    "weight_deltas": pa.schema(
        [
            _required("run", _STR),
            _required("version", _I64),
            _required("base_version", _I64),
            _required("name", _STR),
            _required("chunk", _I32),
            _required("offset", _I64),
            _required("length", _I64),
            _required("dtype", _STR),
            _required("shape", pa.list_(_I64)),
            _required("encoding", _STR),
            _required("digest", _STR),
            _required("data", pa.large_binary()),
        ]
    ),
    # One row per question, weights version and mode (`greedy` or `sampled`).
    "evals": pa.schema(
        [
            _required("run", _STR),
            _required("version", _I64),
            _required("mode", _STR),
            _required("prompt_id", _STR),
            _required("samples", _I32),
            _required("correct", _I32),
            _required("truncated", _I32),
            _required("mean_tokens", _F64),
            _required("texts", pa.list_(_STR)),
            _required("verdicts", pa.list_(_STR)),
        ]
    ),
}

BINARY_TABLES = frozenset({"weight_deltas"})
"""Tables whose rows are megabytes: written in small row groups, without column statistics on the payload."""
