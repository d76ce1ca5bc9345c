"""Lineage over a lake whose every number is known."""

import re

import pytest
import sample_lake
from sample_lake import RUN

from furlong.ops.lineage.page import version_page
from furlong.ops.lineage.views import VIEWS
from furlong.ops.lineage.walk import LineageError, prompt_lineage, trajectory_lineage, version_lineage
from furlong.ops.spec import Placement
from furlong.resources.lake import Lake
from furlong.resources.lineage_page import write_page
from furlong.resources.sql import Sql, SqlError


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Lake:
    return sample_lake.fill(Lake(str(tmp_path_factory.mktemp("root") / "lake")))


@pytest.fixture(scope="module")
def sql(lake):
    with Sql(lake) as sql:
        yield sql


def test_a_version_s_chain_leaves_out_the_attempt_that_was_superseded(sql):
    told = version_lineage(sql.rows, RUN, 3, detail=-1)
    assert [row["version"] for row in told["chain"]] == [3, 1, 0]
    assert [(row["step"], row["attempt"], row["trained"]) for row in told["steps"]] == [(2, 2, 2), (1, 1, 2)]
    assert (told["trajectories"], told["groups"], told["prompts"], told["tokens"]) == (4, 2, 2, 12)
    assert told["tags"] == ["stable"]
    assert told["sampled_by"] == [{"version": 0, "tokens": 8}, {"version": 1, "tokens": 4}]
    assert [(row["verifier"], row["trajectories"]) for row in told["verifiers"]] == [("exact", 6)]
    drawn = told["details"][2]
    assert [(row["trajectory_id"], row["seed"], row["verdict"]) for row in drawn] == [
        ("g4-s0", 400, "correct"),
        ("g4-s1", 401, "incorrect"),
    ]
    assert {row["question"] for row in drawn} == {sample_lake.QUESTION}


def test_the_superseded_attempt_has_a_lineage_of_its_own(sql):
    told = version_lineage(sql.rows, RUN, 2)
    assert [row["version"] for row in told["chain"]] == [2, 1, 0]
    assert [(row["step"], row["attempt"]) for row in told["steps"]] == [(2, 1), (1, 1)]


def test_a_version_with_another_draft_alone_has_the_steps_of_its_parent(sql):
    told, parent = (version_lineage(sql.rows, RUN, version) for version in (4, 3))
    assert [row["version"] for row in told["chain"]] == [4, 3, 1, 0]
    assert told["steps"] == parent["steps"]


def test_the_base_model_learnt_from_nothing(sql):
    told = version_lineage(sql.rows, RUN, 0)
    assert [row["version"] for row in told["chain"]] == [0]
    assert (told["steps"], told["trajectories"], told["prompts"], told["tokens"], told["details"]) == ([], 0, 0, 0, {})


def test_a_prompt_is_followed_to_every_version_that_has_its_gradients(sql):
    told = prompt_lineage(sql.rows, "p3")
    assert [(row["group_id"], row["attempt"], row["first_version"], row["trained_tokens"]) for row in told["draws"]] == [
        ("g3", 1, 2, 6), ("g4", 2, 3, 6),
    ]  # fmt: skip
    assert [row["version"] for row in told["versions"]] == [2, 3, 4]
    # Drawn twice: once in a group without a gradient, once in one that was stale.
    flat = prompt_lineage(sql.rows, "p2")
    assert [(row["group_id"], row["first_version"], row["trained_trajectories"]) for row in flat["draws"]] == [
        ("g2", None, 0), ("g5", None, 0),
    ]  # fmt: skip
    assert flat["versions"] == []
    held_out = prompt_lineage(sql.rows, "p4")
    assert (held_out["draws"], held_out["versions"], len(held_out["evaluated"])) == ([], [], 2)


def test_a_trajectory_tells_where_it_came_from_and_went(sql):
    told = trajectory_lineage(sql.rows, "g4-s0")
    assert told["trajectory"]["sampled"] == 3
    assert [row["made"] for row in told["outcomes"]] == [3]
    assert [row["verdict"] for row in told["rewards"]] == ["correct"]


def test_every_token_knows_the_version_that_sampled_it(sql):
    rows = sql.rows(
        "SELECT position, version, drafted FROM token_origins WHERE trajectory_id = 'g4-s1' ORDER BY position"
    )
    assert rows == [
        {"position": 2, "version": 0, "drafted": False},
        {"position": 3, "version": 1, "drafted": True},
        {"position": 4, "version": 1, "drafted": False},
    ]
    assert sql.rows("SELECT count(*) AS n FROM token_origins")[0]["n"] == 3 * 12


def test_what_was_sampled_adds_up(sql):
    fates = {row["fate"]: (row["trajectories"], row["tokens"]) for row in sql.rows("SELECT * FROM waste")}
    assert fates == {
        "trained": (4, 12), "zero_variance": (2, 6), "superseded": (2, 6), "stale": (2, 6), "waiting": (2, 6),
        "failed: engine_lost": (1, 2),
    }  # fmt: skip


def test_mismatch_is_there_for_every_trained_token(sql):
    rows = sql.rows(
        "SELECT count(*) AS n, max(abs(difference)) AS worst FROM token_mismatch WHERE attempt = 1 AND step = 1"
    )
    assert rows[0]["n"] == 6
    assert rows[0]["worst"] == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize("name", VIEWS)
def test_views_read_an_empty_lake(name, tmp_path):
    lake = Lake(str(tmp_path / "lake"))
    with Sql(lake) as empty:
        assert empty.rows(f"SELECT * FROM {name}") == []


def test_what_is_not_there_is_said_with_what_is(sql):
    with pytest.raises(LineageError, match=r"no weights version 9; it has 0 to 4"):
        version_lineage(sql.rows, RUN, 9)
    with pytest.raises(LineageError, match="it has demo"):
        version_lineage(sql.rows, "other", 1)
    with pytest.raises(LineageError, match="no prompt has the id"):
        prompt_lineage(sql.rows, "p9")
    with pytest.raises(LineageError, match="no trajectory has the id"):
        trajectory_lineage(sql.rows, "g9")


@pytest.mark.parametrize(
    "query",
    ["SELEC 1", "SELECT * FROM nowhere", "COPY runs TO 'out.csv'", "SELECT * FROM read_csv('/etc/passwd')",
     "ATTACH 'other.db'", "SET enable_external_access = true"],
)  # fmt: skip
def test_sql_reads_the_lake_and_nothing_else(sql, query, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SqlError, match="views: version_ancestors"):
        sql.rows(query)
    assert not list(tmp_path.iterdir())


def test_the_page_is_whole_and_runs_nothing(lake, tmp_path):
    path, _ = write_page(Placement(root=str(tmp_path)), lake, RUN, 3)
    page = path.read_text()
    assert path == tmp_path / "runs" / RUN / "lineage" / "v3.html"
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "1 &lt; 2 &amp; &lt;b&gt;3" in page
    assert not re.search(r"(src|href)=", page)
    assert "http" not in page
    for word in ("digest3", "b" * 64, "g4-s0", "finite_loss", "stable", "f" * 16, "v1"):
        assert word in page
    assert [item.name for item in path.parent.iterdir()] == ["v3.html"]


def test_a_page_without_steps_or_checks(sql):
    assert "none" in version_page(version_lineage(sql.rows, RUN, 0))
