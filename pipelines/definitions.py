"""Everything Dagster sees. The flow itself is in `assets.py`; a block of steps as one run is in `rl_run.py`."""

from dagster import AssetSelection, Definitions, define_asset_job, in_process_executor

from furlong.pipelines import assets
from furlong.pipelines.hf_checkpoint import hf_checkpoint
from furlong.pipelines.jobs import JOBS
from furlong.pipelines.lineage_page import lineage_page
from furlong.pipelines.promotion_jobs import PROMOTION_JOBS
from furlong.pipelines.rescores import rescore, rescores
from furlong.pipelines.rl_run import rl_run
from furlong.pipelines.run_grid import fill_run, grid, run
from furlong.pipelines.schedules import SCHEDULES
from furlong.pipelines.sensors import SENSORS
from furlong.resources.system import System

PATIENCE = 900.0
"""Seconds that a run launched here waits for another process, such as `furlong demo`, to be done with the same run."""

FLOW = [
    assets.prompts,
    assets.rollouts,
    assets.rewards,
    assets.train_step,
    assets.weight_publish,
    assets.evals,
]

rl_step = define_asset_job(
    "rl_step",
    selection=AssetSelection.assets(*FLOW),
    description="Materialise every asset of one step: run it, repair it, or repeat it as a new attempt.",
)

defs = Definitions(
    assets=[*FLOW, hf_checkpoint, lineage_page, run, rescores],
    jobs=[rl_step, rl_run, *JOBS, fill_run, grid, rescore, *PROMOTION_JOBS],
    schedules=SCHEDULES,
    sensors=SENSORS,
    # The heavy work is in Ray actors; a process per asset would only add its start-up to each stage.
    executor=in_process_executor,
    resources={"system": System(patience=PATIENCE)},
)
