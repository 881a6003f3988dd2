"""Hydra entry: compose, check, dispatch. Nothing heavy is imported before a job is known to be fit.

Exit codes: 0 done, 1 failed or refused by Hydra, 2 refused before anything started, 130 or 143
interrupted (SIGINT or SIGTERM). An interrupted or failed run goes on when its command is repeated.
"""

import signal
import sys
import time
from pkgutil import resolve_name

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from wayfinder.config.load import check_command, load_config, register_schema
from wayfinder.errors import ConfigError, WayfinderError
from wayfinder.multirun import conclude, objective

# The exception alone cannot tell: one that passes through Ray comes out as another.
_terminated: list[int] = []
# The module whose function of the same name does a task.
TASKS = {
    "train": "loop",
    "evaluate": "loop",
    "sft": "prepare",
    "report": "reporting",
    "play": "play",
}


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Run one job and return its solve rate, which sweepers optimise."""
    began = time.time()
    signal.signal(signal.SIGTERM, _interrupt)
    job = HydraConfig.get()
    try:
        config = load_config(cfg)
        task = resolve_name(f"wayfinder.{TASKS[config.task]}:{config.task}")
        return objective(task(config, list(job.overrides.task), began), job.sweeper)
    except KeyboardInterrupt:
        print("interrupted; repeat the command to go on", file=sys.stderr)
        sys.exit(143 if _terminated else 130)
    except WayfinderError as error:
        print(error, file=sys.stderr)
        if job.mode is RunMode.MULTIRUN:  # Hydra notes the failed job and starts the others.
            raise CompactHydraException(str(error)) from error
        sys.exit(error.exit_code)


def _interrupt(signum: int, frame: object) -> None:
    _terminated.append(signum)
    raise KeyboardInterrupt


def command() -> None:
    """All jobs of this command. Always raises SystemExit, or what a bug raised."""
    register_schema()
    try:
        check_command(sys.argv[1:])
        main()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    finally:
        all_well = conclude()
    # A sweeper that takes failed jobs for granted returns as if there were none.
    sys.exit(0 if all_well else 1)


if __name__ == "__main__":
    try:
        command()
    except SystemExit as end:
        session = sys.modules.get("wayfinder.runtime.ray_session")
        if session is not None and session.is_given_up():
            session.end_process(end.code)
        raise
