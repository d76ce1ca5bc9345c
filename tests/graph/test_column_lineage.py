"""Column lineage names only columns that exist, on assets that lie upstream."""

import pytest
from dagster import AssetKey

from furlong.ops.tables import TABLES
from furlong.pipelines.column_lineage import COLUMNS, TABLE_OF, table_metadata
from furlong.pipelines.definitions import defs


@pytest.mark.parametrize("asset", TABLE_OF)
def test_columns_exist_upstream(asset):
    graph = defs.resolve_asset_graph()
    above = {key.to_user_string() for key in graph.get_ancestor_asset_keys(AssetKey(asset))}
    told = table_metadata(asset)
    schema, lineage = told["dagster/column_schema"], told["dagster/column_lineage"].deps_by_column
    assert [column.name for column in schema.columns] == TABLES[TABLE_OF[asset]].names
    assert set(lineage) <= set(TABLES[TABLE_OF[asset]].names)
    assert bool(lineage) == (asset != "prompts")
    for deps in lineage.values():
        assert deps
        for dep in deps:
            source = dep.asset_key.to_user_string()
            assert source in above
            assert dep.column_name in TABLES[TABLE_OF[source]].names


def test_a_token_is_followed_from_question_to_weights():
    def sources(column: str) -> set[str]:
        asset, name = column.split(".")
        found = set(COLUMNS.get(asset, {}).get(name, ()))
        return found | {above for source in found for above in sources(source)}

    assert {"prompts.question", "prompts.verifier", "rollouts.tokens", "rewards.score"} <= sources(
        "weight_publish.digest"
    )
