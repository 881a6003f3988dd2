"""`task=sft`: the preparation of the tiny model, in a run directory of its own."""

from __future__ import annotations

from pathlib import Path

from wayfinder.config.identity import run_name
from wayfinder.config.schema import Config
from wayfinder.record.provenance import commit
from wayfinder.train.sft import run_sft


def sft(config: Config, overrides: list[str], began: float) -> float:
    """Run, resume or look up one preparation; the solve rate of the start it made."""
    name = config.run.name or run_name(config.experiment, overrides, config.seed)
    directory = Path(config.paths.root).expanduser() / name
    revision, dirty = commit()
    provenance = {"commit": revision, "dirty": dirty, "overrides": overrides}
    record = run_sft(config.sft, directory, config.seed, provenance=provenance)
    # The first row is the evaluation set at the temperature of training.
    return float(record["solve"]["sloppy"][0]["solve_rate"])
