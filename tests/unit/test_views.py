"""What people look at: plot and SQL in Dagster's metadata, the sparkline, the reward curve of the report."""

import base64
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from deltalake import DeltaTable, QueryBuilder
from rich.console import Console

from furlong.cli.live import sparkline
from furlong.cli.report_view import reward_plot, show_report
from furlong.ops.plots import line_plot, lines_plot, lines_svg
from furlong.ops.records import TABLES
from furlong.ops.report import transcript
from furlong.ops.spec import Placement
from furlong.ops.stages.context import StageReport, StepKey
from furlong.pipelines.metadata import metadata
from furlong.resources.lake import Lake
from furlong.resources.runs import PERFORM


def svg_of(markdown: str) -> ElementTree.Element:
    return ElementTree.fromstring(base64.b64decode(markdown.split("base64,")[1].rstrip(")")))


@pytest.mark.parametrize("points", [[(1, 0.5)], [(1, 0.0), (2, 1.0)], [(3, 2.0), (4, 2.0), (9, 2.0)]])
def test_the_plot_is_an_image_with_a_point_per_step(points):
    image = svg_of(line_plot(points, "loss < 1 & falling"))
    line = next(node for node in image.iter() if node.tag.endswith("polyline"))
    places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert len(places) == len(points)
    width, height = float(image.attrib["width"]), float(image.attrib["height"])
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    assert "loss < 1 & falling" in [node.text for node in image.iter()]


def test_larger_values_are_drawn_higher():
    line = next(n for n in svg_of(line_plot([(1, 0.0), (2, 1.0)], "x")).iter() if n.tag.endswith("polyline"))
    (_, low), (_, high) = (map(float, pair.split(",")) for pair in line.attrib["points"].split())
    assert high < low


def test_no_points_says_so():
    assert "no steps yet" in line_plot([], "reward")


def test_several_lines_share_a_scale_and_are_named():
    lines = {"frozen & slow": [(1, 3.0), (3, 1.0)], "nothing": [], "co-trained": [(2, 3.0), (5, 5.0)]}
    image = svg_of(lines_plot(lines, "acceptance"))
    curves = [node for node in image.iter() if node.tag.endswith("polyline")]
    assert len({curve.attrib["stroke"] for curve in curves}) == 2
    (frozen, _), (learning, top) = (
        [tuple(map(float, pair.split(","))) for pair in curve.attrib["points"].split()] for curve in curves
    )
    assert frozen[0] < learning[0] < top[0]
    assert frozen[1] == learning[1] > top[1]
    told = [node.text for node in image.iter() if node.tag.endswith("text")]
    assert {"frozen & slow", "co-trained", "step 1", "step 5", "5", "1"} <= set(told)
    assert "nothing" not in told
    assert lines_svg({"a": []}, "x") == ""


def test_sparkline_runs_from_low_to_high():
    assert sparkline([0.0, 0.5, 1.0]) == " ▄█"
    assert sparkline([0.0, 0.0]) == "  "
    assert sparkline([5.0], high=1.0) == "█"


@pytest.mark.parametrize("count", [1, 30, 72, 73, 500])
def test_the_reward_curve_fits_a_terminal(count):
    lines = reward_plot([i / count for i in range(count)]).plain.splitlines()
    assert max(map(len, lines)) <= 80
    assert f"steps 1 to {count}" in lines[-1]


@pytest.mark.parametrize(("overhead", "shown"), [(None, "not measured"), (0.25, "0.25 s")])
def test_a_run_taken_step_by_step_can_be_shown(overhead, shown):
    report = {
        "run": "quick", "steps": 1, "seconds": 1.0, "reward_per_step": [0.5], "eval_before": 0.0, "eval_after": 1.0,
        "greedy_before": 0.0, "greedy_after": 1.0, "full_bytes": 100, "delta_bytes_per_step": [10],
        "eval_split": {"eval_questions": 1, "train_questions": 1, "eval_questions_trained_on": 0},
        "tokens_per_second": 1.0, "overhead_seconds_per_step": overhead, "peak_rss_bytes": 1, "best": None, "worst": None,
        "lineage": {"version": 1, "digest": "00", "step": 1, "sampled_by_versions": [0], "prompts": [], "trajectories": {},
                    "ancestors": [0]},
        "rollouts": {"staleness_max": 2, "staleness_mean": 1.25, "engine_idle_share": 0.1, "sampled_tokens": 200,
                     "wasted_tokens": {"stale": 20}, "failures": {"engine_lost": 3}},
        "draft": None,
    }  # fmt: skip
    console = Console(record=True, width=100)
    show_report(console, report, Placement())
    text = console.export_text()
    for part in (shown, "1.25, 2 steps", "10.0% stale", "3 engine_lost"):
        assert part in text, part


def test_a_conversation_is_told_line_by_line():
    call = {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "2+2"}'}}
    messages = [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    assert transcript(messages).splitlines() == [
        'assistant: calculator({"expression": "2+2"})', "tool: 4", "assistant: It is 4.",
    ]  # fmt: skip


def test_the_sql_that_is_shown_runs_on_a_lake_without_a_row(tmp_path):
    lake = Lake(str(tmp_path))
    lake.create()
    engine = QueryBuilder()
    for name in TABLES:
        engine.register(name, DeltaTable(f"{lake.uri}/{name}"))
    page = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text()
    told = [page[page.index("    SELECT ") : page.index("ORDER BY position\n") + len("ORDER BY position")]]
    quiet = SimpleNamespace(links=dict, series=lambda value: [], spec=SimpleNamespace(draft={}))
    for stage in PERFORM:
        told.append(
            metadata(StageReport(stage, StepKey("quick", 1)), quiet)["sql"].value.strip("`").removeprefix("sql")
        )
    assert [engine.execute(sql).read_all().num_rows for sql in told] == [0] * 7
