"""All jobs but `rl_run` and `rl_step`, which are the flow itself: what people do with a run beside training it."""

from furlong.pipelines.compact_lake import compact_lake
from furlong.pipelines.evaluate import evaluate
from furlong.pipelines.export_hf import export_hf
from furlong.pipelines.publish import publish
from furlong.pipelines.rebuild_weights import rebuild_weights
from furlong.pipelines.replay_step import replay_step

JOBS = [evaluate, publish, export_hf, rebuild_weights, replay_step, compact_lake]
