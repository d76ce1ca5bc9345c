"""Which column comes from which: the tables behind the assets, as Dagster metadata.

Dagster shows an asset's columns and keeps their lineage; `furlong lineage` and SQL walk it row by row.
"""

from typing import Any

from dagster import AssetKey, TableColumn, TableColumnDep, TableColumnLineage, TableSchema

from furlong.ops.tables import TABLES

TABLE_OF = {
    "prompts": "prompts",
    "rollouts": "trajectories",
    "rewards": "rewards",
    "train_step": "steps",
    "weight_publish": "weight_versions",
    "evals": "evals",
}
"""Asset -> the table that its columns are those of."""
_SCORED = ("rollouts.text", "prompts.entry", "prompts.verifier")
_TRAINED = ("rollouts.tokens", "rollouts.logprobs", "rollouts.loss_mask", "rewards.score")
_MEASURED = ("rollouts.tokens", "rollouts.logprobs", "rollouts.version_spans")
COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {
    "rollouts": {
        **dict.fromkeys(("tokens", "messages"), ("prompts.question",)),
        "prompt_id": ("prompts.prompt_id",),
    },
    "rewards": {
        "trajectory_id": ("rollouts.trajectory_id",),
        "verifier": ("prompts.verifier",),
        **dict.fromkeys(("verdict", "score", "extracted", "detail"), _SCORED),
    },
    "train_step": {
        "batch_digest": _TRAINED,
        "outcomes": ("rollouts.trajectory_id", "rollouts.group_id", "rewards.score", "rollouts.loss_mask"),
        "reward_mean": ("rewards.score",),
        **dict.fromkeys(("loss", "grad_norm", "clip_fraction", "entropy", "ess", "digest_after"), _TRAINED),
        "tokens_trained": ("rollouts.loss_mask", "rewards.score"),
        **dict.fromkeys([name for name in TABLES["steps"].names if name.startswith("mismatch_")], _MEASURED),
    },
    "weight_publish": {
        "version": ("train_step.version_after",),
        "parent": ("train_step.version_before",),
        **dict.fromkeys(("digest", "tensors", "attestations"), ("train_step.digest_after",)),
    },
    "evals": {
        "version": ("weight_publish.version",),
        "prompt_id": ("prompts.prompt_id",),
        **dict.fromkeys(("correct", "verdicts"), ("weight_publish.digest", "prompts.entry", "prompts.verifier")),
        "texts": ("weight_publish.digest", "prompts.question"),
    },
}
"""Asset -> column -> the `asset.column`s that it is computed from."""


def table_metadata(asset: str) -> dict[str, Any]:
    """Schema and column lineage of an asset's table, under the keys that Dagster shows them by."""
    table = TABLE_OF[asset]
    columns = [TableColumn(field.name, str(field.type)) for field in TABLES[table]]
    deps = {
        column: [TableColumnDep(AssetKey(source.split(".")[0]), source.split(".")[1]) for source in sources]
        for column, sources in COLUMNS.get(asset, {}).items()
    }
    return {
        "dagster/table_name": table,
        "dagster/column_schema": TableSchema(columns=columns),
        "dagster/column_lineage": TableColumnLineage(deps),
    }
