"""Kill random processes of the small job at random moments, repeat its command until it is done,
and compare what comes out with an undisturbed run.

    make chaos                              # 50 kills, half an hour on two cores
    make chaos ARGS="--kills 5 --seed 7"

Each trial is one run. It is disturbed by up to `--kills-per-trial` kills (SIGKILL), whose victims
and moments the seed decides, and then left alone. The record names every kill. The exit code is 0
if every trial ended like the undisturbed run and left no process behind.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from support.jobs import ROOT, Running, figures
from wayfinder.record.atomic import atomic_write_json

VICTIMS = ("driver", "engine", "core", "rank", "raylet", "gcs")
# Driver, engine and rank are what the run is made of; Ray's own processes end the command.
WEIGHTS = (3, 3, 3, 3, 1, 1)
STEPS = 3
JOB = (f"steps={STEPS}", "eval.interval=2", "checkpoint.interval=1", "cluster.max_restarts=20")
SAME = (
    f"adapters/{STEPS}/adapter_model.safetensors",
    "episodes/eval_step_000000.jsonl",
    "episodes/eval_step_000002.jsonl",
    f"episodes/eval_step_{STEPS:06}.jsonl",
)
# Agents of a Ray whose driver was killed give up when its head is silent for a minute.
GONE_S = 100.0
# A command that neither ends nor can be disturbed for this long is stuck.
LONGEST_S = 600.0


@dataclass
class Kill:
    victim: str
    pid: int
    at_s: float  # after the start of the command
    after_line: str  # the last line that the command had printed


@dataclass
class Trial:
    number: int
    kills: list[Kill] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.differences and not self.left_behind


def disturb(trial: Trial, root: Path, draw: random.Random, kills: int, usual_s: float) -> None:
    """Run the command of a trial to its end, with `kills` kills on the way."""
    name = f"trial-{trial.number}"
    started: list[Running] = []
    while not _is_over(trial, started, kills):
        running = Running(root, name, *JOB)
        started.append(running)
        began = time.monotonic()
        while len(trial.kills) < kills and running.process.poll() is None:
            victim = draw.choices(VICTIMS, WEIGHTS)[0]
            at = time.monotonic() + draw.uniform(0, usual_s)
            if not _kill(running, victim, at, began, trial):
                break
        deadline = time.monotonic() + LONGEST_S
        while running.process.poll() is None and time.monotonic() < deadline:
            running.processes()
            time.sleep(0.2)
        stuck = running.process.poll() is None
        if stuck:
            running.process.kill()
            trial.differences.append(f"stuck after: {running.output[-500:]}")
        trial.exit_codes.append(running.process.wait())
        if stuck:
            break
    for running in started:
        trial.left_behind += running.kill_left(GONE_S)


def _is_over(trial: Trial, started: list[Running], kills: int) -> bool:
    if len(started) > kills + 3:
        trial.differences.append(f"does not end: {started[-1].output[-2000:]}")
        return True
    return bool(started) and trial.exit_codes[-1] == 0


def _kill(running: Running, victim: str, at: float, began: float, trial: Trial) -> bool:
    """Kill the victim at `at`, or as soon after it as there is one; False if the run ended."""
    while running.process.poll() is None:
        found = running.processes()
        pid = running.process.pid if victim == "driver" else getattr(found.get(victim), "pid", None)
        if time.monotonic() >= at and pid is not None:
            line = running.lines[-1].strip()[:120] if running.lines else ""
            try:
                psutil.Process(pid).kill()
            except psutil.NoSuchProcess:  # it ended by itself, or is being replaced
                continue
            trial.kills.append(Kill(victim, pid, round(time.monotonic() - began, 2), line))
            print(f"  kill {victim} after {trial.kills[-1].at_s} s; last line: {line}", flush=True)
            return True
        time.sleep(0.05)
    return False


def differences(run: Path, calm: Path) -> list[str]:
    """How a run's result differs from the undisturbed one's."""
    found = []
    if json.loads((run / "summary.json").read_text())["status"] != "finished":
        found.append("summary.json does not say that it finished")
    for mine, other in zip(figures(run), figures(calm), strict=False):
        keys = sorted(k for k in mine.keys() | other.keys() if mine.get(k) != other.get(k))
        if keys:
            found.append(f"step {other['step']}: {keys}")
    if len(figures(run)) != len(figures(calm)):
        found.append(f"{len(figures(run))} metrics lines, not {len(figures(calm))}")
    found += [name for name in SAME if (run / name).read_bytes() != (calm / name).read_bytes()]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kills-per-trial", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    print(f"seed {arguments.seed}", flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        root = Path(directory)
        began = time.monotonic()
        calm = Running(root, "calm", *JOB)
        if calm.end(LONGEST_S):
            print(calm.output)
            return 1
        usual_s = time.monotonic() - began
        print(f"undisturbed: {usual_s:.0f} s", flush=True)
        while (done := sum(len(trial.kills) for trial in trials)) < arguments.kills:
            trial = Trial(len(trials))
            trials.append(trial)
            print(f"trial {trial.number}", flush=True)
            kills = min(arguments.kills - done, draw.randint(1, arguments.kills_per_trial))
            began = time.monotonic()
            disturb(trial, root, draw, kills, usual_s)
            trial.seconds = round(time.monotonic() - began, 1)
            if trial.exit_codes[-1] == 0:
                trial.differences += differences(root / f"trial-{trial.number}", root / "calm")
            verdict = "same" if trial.passed else f"NOT THE SAME: {trial.differences}"
            left = f"processes left: {trial.left_behind or 0}"
            print(
                f"  {verdict}, exit codes {trial.exit_codes}, {left}, {trial.seconds:.0f} s",
                flush=True,
            )
            if arguments.record is not None:
                atomic_write_json(
                    arguments.record,
                    {
                        "seed": arguments.seed,
                        "commit": commit.stdout.strip(),
                        "job": JOB,
                        "undisturbed_s": round(usual_s, 1),
                        "kills": sum(len(t.kills) for t in trials),
                        "passed": sum(t.passed for t in trials),
                        "failed": sum(not t.passed for t in trials),
                        "trials": [asdict(t) for t in trials],
                    },
                )
    print(
        f"{sum(t.passed for t in trials)} of {len(trials)} trials ended like the undisturbed run, "
        f"{sum(len(t.kills) for t in trials)} kills"
    )
    return 0 if all(trial.passed for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
