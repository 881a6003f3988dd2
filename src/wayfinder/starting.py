"""The engines and ranks that a configuration asks for, started on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wayfinder import specs
from wayfinder.chat.vision import VisionProcessor, load_processor
from wayfinder.config.places import model_source
from wayfinder.config.schema import Config
from wayfinder.probe import make_probe
from wayfinder.runtime.cluster import Cluster
from wayfinder.runtime.recovery import Restarts
from wayfinder.runtime.workers import Workers


def start_workers(
    config: Config, cluster: Cluster, adapters: Path, restarts: Restarts
) -> tuple[Workers, Any]:
    """Workers that publish into `adapters`, and the model's processor."""
    processor = load_processor(model_source(config.model.path))
    workers = Workers(
        cluster,
        adapters=adapters,
        keep=config.sync.keep,
        retry_s=config.sync.retry_s,
        probe=make_probe(config, processor),
        probe_tolerance=config.sync.probe_tolerance,
        sleep_engines=str(config.cluster.device) == "cuda",
        restarts=restarts,
    )
    workers.start(
        specs.engine_specs(config, VisionProcessor(processor).tokens, specs.stop_ids(config)),
        specs.env_spec(config),
        specs.policy_spec(config),
        specs.loss_spec(config),
        specs.optimizer_spec(config),
        config.algorithm.mismatch.stop,
        config.cluster.start_timeout_s,
    )
    return workers, processor
