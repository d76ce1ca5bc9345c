"""The UI as a person uses it: headless Chromium on the real pages, from the graph to a stage that failed and is retried."""

import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SHOTS = Path("/tmp/ui/shots")
"""Where screenshots are kept; nowhere by default."""
PAGE_DEADLINE, RUN_DEADLINE = 60_000, 200_000
"""Milliseconds."""


@pytest.fixture(scope="module")
def ui(place):
    """The address of a UI on the tests' root."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).with_name("furlong"), "ui", "--port", str(port)]
    process = subprocess.Popen(command, env=place.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if "Dagster UI:" in line:
                break
        else:
            pytest.fail("".join(said))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.stdout.close()


@pytest.fixture(scope="module")
def page(ui):
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no browser; `apt-get install chromium` brings one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 950}, base_url=ui)
        page.set_default_timeout(PAGE_DEADLINE)
        yield page
        browser.close()


def keep(page, name: str) -> None:
    if SHOTS.name:
        page.wait_for_timeout(1500)
        page.screenshot(path=SHOTS / f"{name}.png")


def launch(page, job: str, config: str, partition: str = "") -> None:
    """Fill in a job's launchpad and press the button; leaves the page at the new run."""
    page.goto(f"/locations/furlong/jobs/{job}/playground")
    page.locator(".CodeMirror").first.click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(config)
    if partition:
        page.get_by_placeholder("Partition").fill(partition)
        page.get_by_role("menuitem", name=partition).or_(page.get_by_text(partition, exact=True)).first.click()
    page.get_by_role("button", name=re.compile("Launch Run", re.IGNORECASE)).click()
    page.wait_for_url("**/runs/**")


def test_from_the_graph_to_a_retried_stage(place, page):
    page.goto("/locations/furlong/asset-groups/rl/lineage")
    for name in ("prompts", "rollouts", "rewards", "train_step", "weight_publish", "evals", "hf_checkpoint"):
        page.get_by_text(name, exact=True).first.wait_for()

    launch(page, "rl_run", f"{{ops: {{block: {{config: {{spec: {place.spec}, run: browser, steps: 2}}}}}}}}")
    page.get_by_text("Success", exact=True).first.wait_for(timeout=RUN_DEADLINE)
    keep(page, "run")
    page.goto("/locations/furlong/asset-groups/rl/lineage")
    page.get_by_text("train_step", exact=True).first.wait_for()
    keep(page, "asset-graph")

    page.goto("/assets/train_step?view=partitions&partition=browser-00002")
    page.get_by_text("reward_mean", exact=True).first.wait_for()
    plot = page.locator("img[alt^='mean']").first
    plot.wait_for()
    assert plot.evaluate("image => image.complete && image.naturalWidth > 100")
    plot.scroll_into_view_if_needed()
    keep(page, "step-metadata")

    # The table of rewards cannot be read: that stage fails, says so, and is retried once the storage is mended.
    log = place.placement.folder / "lake" / "rewards" / "_delta_log"
    aside = log.with_name("aside")
    log.rename(aside)
    log.write_text("")
    launch(page, "rl_step", "{}", "browser-00003")
    page.get_by_text("Failure", exact=True).first.wait_for(timeout=RUN_DEADLINE)
    page.get_by_text("table rewards at").first.wait_for()
    keep(page, "failed")
    log.unlink()
    aside.rename(log)
    page.get_by_role("button", name="Re-execute all").locator("xpath=following::button[1]").click()
    page.get_by_role("menuitem", name=re.compile("from failure", re.IGNORECASE)).click()
    page.get_by_text("Success", exact=True).first.wait_for(timeout=RUN_DEADLINE)
    keep(page, "retried")
    steps = place.lake.read("steps", {"run": "browser"}, ["step"])["step"].to_pylist()
    assert sorted(steps) == [1, 2, 3]
