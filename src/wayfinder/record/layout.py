"""Names of the files in a run directory.

    config.resolved.json  what was asked for and with which code; written once, never again
    metrics.jsonl         one line a step (metrics.py)
    events.log            starts, resumes, warnings: one line each, with UTC time
    episodes/             evaluation episodes (episodes.py)
    adapters/             published policy versions, unless sync.dir says otherwise
    checkpoints/          what a resume needs
    wandb/                files of the W&B client
    summary.json          how the run ended; written last, so it exists only for an ended run
    error.log             the traceback of each failed attempt
    lock                  who uses the directory now (lock.py)

Side files: `metrics.discarded.jsonl` (lines of steps that were repeated after a resume),
`summary.previous.json` (of an attempt that failed or was interrupted).
"""

CONFIG_FILE = "config.resolved.json"
SUMMARY_FILE = "summary.json"
PREVIOUS_SUMMARY_FILE = "summary.previous.json"
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.log"
ERROR_FILE = "error.log"
LOCK_FILE = "lock"
EPISODES_DIR = "episodes"
ADAPTERS_DIR = "adapters"
CHECKPOINTS_DIR = "checkpoints"
WANDB_DIR = "wandb"
