"""The training loop: one driver process, readable from top to bottom. It never touches a device.

    tasks -> episodes (engines) -> advantages, samples, micro-batches (driver) -> update (ranks)
          -> publish adapter (rank 0) -> load and prove it (engines) -> record, evaluate, save

Per slot and step, on a GPU:

    engine   | play episodes | asleep ................... | load, prove | play ...
    rank     | idle          | update, gather, publish    | idle        | ...

A step is one turn of this loop: one policy version samples `tasks_per_step` groups, the ranks make
`mini_batches` optimizer updates from them, and the result is the next version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wayfinder import specs
from wayfinder.algo.advantage import rewards_equal
from wayfinder.algo.filters import refill_needed
from wayfinder.batch.plan import score_plan, step_episodes, update_plan
from wayfinder.canary import check_nothing_learnt
from wayfinder.config.schema import AlgorithmConfig, Config
from wayfinder.envs.tasks import TrainingTasks, evaluation_tasks, forbidden_layouts
from wayfinder.errors import WayfinderError, WorkerLostError
from wayfinder.evaluate import Evaluation, run_evaluation
from wayfinder.progress import Progress, learning_rate
from wayfinder.record.episodes import episodes_path, write_episodes
from wayfinder.record.metrics import MetricsLog
from wayfinder.record.report import final_picture
from wayfinder.record.run_dir import RunDir
from wayfinder.record.tracking import Trackers
from wayfinder.recorded import recorded
from wayfinder.rollout.episode import Place
from wayfinder.rollout.metrics import rollout_metrics
from wayfinder.runtime.adapter_sync import make_root
from wayfinder.runtime.cluster import Cluster
from wayfinder.runtime.ray_metrics import RayMetrics
from wayfinder.runtime.recovery import Restarts, interrupts_held
from wayfinder.runtime.workers import Played, Workers
from wayfinder.starting import start_workers
from wayfinder.train import checkpoint
from wayfinder.types import Group, Task

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """What the parts of the loop share."""

    config: Config
    directory: RunDir
    workers: Workers
    trackers: Trackers
    log: MetricsLog
    tasks: TrainingTasks
    evaluation: list[Task]
    decode: Any
    restarts: Restarts
    began: float  # monotonic time at which the workers were started
    progress: Progress = field(default_factory=Progress)
    saved: Progress = field(default_factory=Progress)  # what the newest checkpoint holds
    saved_at: float = field(default_factory=time.monotonic)
    whole: bool = True  # the ranks hold exactly the policy that `progress` tells of


def train(config: Config, overrides: list[str], began: float) -> float:
    """Run, resume or look up one training run; the last solve rate on the evaluation set.

    `began`: Unix time at which the job began, before its imports.
    """
    return _in_directory(config, overrides, began, _train)


def evaluate(config: Config, overrides: list[str], began: float) -> float:
    """Evaluate the policy that training would start from, with the same workers and records."""
    return _in_directory(config, overrides, began, _evaluate_only)


def _in_directory(
    config: Config, overrides: list[str], began: float, task: Callable[[Run], None]
) -> float:
    def work(directory: RunDir, log: MetricsLog, trackers: Trackers) -> None:
        make_root(specs.adapter_root(config, directory.adapters))
        _with_workers(config, directory, log, trackers, task)

    return recorded(config, overrides, began, work)


def _with_workers(
    config: Config,
    directory: RunDir,
    log: MetricsLog,
    trackers: Trackers,
    task: Callable[[Run], None],
) -> None:
    """Do `task` with workers. When ranks are lost, once more with new ones, as if the command had
    been repeated."""
    restarts = Restarts(config.cluster.max_restarts, directory.event)
    is_first = True
    while True:
        trackers.phase("starting workers")
        began = time.monotonic()
        try:
            with Cluster(specs.cluster_spec(config)) as cluster:
                if is_first:
                    trackers.add(lambda: RayMetrics(directory.name), "ray metrics")
                    is_first = False
                task(_start(config, directory, log, trackers, cluster, restarts, began))
            return
        except WorkerLostError as error:
            logger.warning("the workers are lost: %s", error)
            restarts.policy(error)


def _evaluate_only(run: Run) -> None:
    run.log.truncate_after(-1)
    run.workers.forget_publications_after(-1)
    sync = run.workers.publish(0, 0)
    run.trackers.phase("evaluation")
    _, metrics = _evaluate(run, "eval", run.config.eval.temperature)
    _record(run, 0, sync | metrics)
    _finish(run)


def _train(run: Run) -> None:
    resumed = _resume(run)
    sync = run.workers.publish(run.progress.policy_version, run.progress.step)
    start = {} if resumed else {"time/start_s": time.monotonic() - run.began} | sync
    try:
        while True:
            if run.progress.evaluation_is_due(run.config):
                run.trackers.phase(f"evaluation {run.progress.step}")
                evaluation, metrics = _evaluate(run, "eval", run.config.eval.temperature)
                _record(run, run.progress.step, start | metrics)
                run.progress.note_evaluation(evaluation.solve_rate)
                start = {}
            if run.progress.checkpoint_is_due(run.config, run.saved, _minutes_since_save(run)):
                _record(run, run.progress.step, _save(run))
            if run.progress.is_over(run.config):
                break
            run.trackers.phase(f"step {run.progress.step + 1}")
            _step(run, run.progress.step + 1)
    except KeyboardInterrupt:
        _save_what_is_done(run)
        raise
    _finish(run)


def _start(
    config: Config,
    directory: RunDir,
    log: MetricsLog,
    trackers: Trackers,
    cluster: Cluster,
    restarts: Restarts,
    began: float,
) -> Run:
    workers, processor = start_workers(
        config, cluster, specs.adapter_root(config, directory.adapters), restarts
    )
    evaluation = evaluation_tasks(config.env.id, config.eval.first_seed, config.eval.tasks)
    forbidden = forbidden_layouts([*evaluation, *_unseen_tasks(config)])
    return Run(
        config=config,
        directory=directory,
        workers=workers,
        trackers=trackers,
        log=log,
        tasks=TrainingTasks(config.env.id, config.seed, forbidden),
        evaluation=evaluation,
        decode=processor.tokenizer.decode,
        restarts=restarts,
        began=began,
    )


def _resume(run: Run) -> bool:
    """Go back to the newest sound checkpoint, or to the start when none was written."""
    found, problems = checkpoint.newest(run.directory.checkpoints)
    for problem in problems:
        run.directory.event(f"checkpoint skipped: {problem}")
        logger.warning("checkpoint skipped: %s", problem)
    if found is not None:
        run.workers.load(found.path)
        run.progress = Progress.from_state(found.state)
        run.saved = replace(run.progress)
        run.directory.event(f"resumed at step {found.step} from {found.path.name}")
    run.log.truncate_after(run.progress.step if found else -1)
    run.workers.forget_publications_after(run.progress.policy_version if found else -1)
    return found is not None


def _step(run: Run, step: int) -> None:
    clock: dict[str, float] = {}
    with _timed(clock, "rollout"):
        groups, played = _rollout(run, step)
    if replace(run.progress, step=step).evaluation_is_due(run.config):
        # Beside the evaluation that follows, the episodes that the policy learnt from before it.
        path = episodes_path(run.directory.path, "train", step)
        write_episodes(path, played.episodes, run.workers.fetch_frames(played), run.decode)
    with _unbroken(run):
        _learn(run, step, groups, played, clock)


def _learn(
    run: Run, step: int, groups: list[Group], played: Played, clock: dict[str, float]
) -> None:
    """From episodes to the next policy version and the record of the step."""
    config, progress = run.config, run.progress
    with _timed(clock, "update"):
        metrics = _update(run, groups, played, step)
    progress.next_task += len(groups)
    with _timed(clock, "sync"):
        before = run.workers.publication
        metrics |= run.workers.publish(progress.policy_version + 1, step)
        progress.policy_version += 1
    if metrics.get("train/lr") == 0:
        check_nothing_learnt(step, metrics, before, run.workers.publication)
    metrics["train/groups"] = float(len(groups))
    metrics |= rollout_metrics(played.episodes, clock["time/rollout_s"])
    metrics |= clock | run.restarts.metrics()
    worst = metrics.get("mismatch/abs_logprob_diff_max", 0.0)
    if worst > config.algorithm.mismatch.alarm:
        message = (
            f"step {step}: log-probs of engine and trainer differ by up to {worst:.2g}, above "
            f"algorithm.mismatch.alarm={config.algorithm.mismatch.alarm}"
        )
        run.directory.event(message)
        logger.warning(message)
    progress.step = step
    _record(run, step, metrics)


@contextmanager
def _unbroken(run: Run) -> Iterator[None]:
    """For what changes the policy or writes it: an interruption waits for its end, at most
    `checkpoint.grace_s`. Broken off nevertheless, the ranks hold nothing that could be saved."""
    with interrupts_held(run.config.checkpoint.grace_s):
        run.whole = False
        yield
        run.whole = True


def _rollout(run: Run, step: int) -> tuple[list[Group], Played]:
    """The step's groups; under `filter=refill` as many more as it takes and the bound allows."""
    size = run.config.algorithm.group_size
    spec = specs.episode_spec(run.config, "train", step, run.progress.policy_version)
    groups: list[Group] = []
    played = Played([], [])
    wanted = run.config.algorithm.tasks_per_step
    while wanted:
        first = run.progress.next_task + len(groups)
        tasks = [run.tasks.task(first + i) for i in range(wanted)]
        places = [Place(task, member) for task in tasks for member in range(size)]
        part = run.workers.play(places, spec, str(run.config.rollout.schedule) == "lockstep")
        groups += [
            Group(task, tuple(part.episodes[i * size : (i + 1) * size]))
            for i, task in enumerate(tasks)
        ]
        played = Played(played.episodes + part.episodes, played.frames + part.frames)
        wanted = _groups_to_refill(run.config.algorithm, groups)
    return groups, played


def _groups_to_refill(algorithm: AlgorithmConfig, groups: list[Group]) -> int:
    if str(algorithm.filter) != "refill":
        return 0
    with_signal = sum(not rewards_equal([e.reward for e in group.valid]) for group in groups)
    extra = len(groups) - algorithm.tasks_per_step
    return refill_needed(with_signal, algorithm.tasks_per_step, extra, algorithm.refill_groups)


def _update(run: Run, groups: list[Group], played: Played, step: int) -> dict[str, float]:
    config = run.config
    plan_spec = specs.plan_spec(config)
    change: np.ndarray | None = None
    metrics: dict[str, float] = {}
    if config.algorithm.kl_coef > 0 and str(config.algorithm.kl_placement) == "reward":
        log_ratio = run.workers.score(
            score_plan(groups, plan_spec), played, len(step_episodes(groups))
        )
        change = -config.algorithm.kl_coef * log_ratio
        metrics["train/kl_reward_mean"] = float(change.mean()) if len(change) else 0.0
    plan = update_plan(groups, plan_spec, change)
    metrics |= plan.metrics
    if not plan.is_empty:
        lr = learning_rate(config.algorithm.optimizer, step, config.steps)
        metrics |= run.workers.update(plan, played, lr)
    return metrics


def _evaluate(run: Run, kind: str, temperature: float | None) -> tuple[Evaluation, dict]:
    config, progress = run.config, run.progress
    tasks = _unseen_tasks(config) if kind == "unseen" else run.evaluation
    began = time.monotonic()
    evaluation = run_evaluation(
        run.workers, config, tasks, kind, progress.step, progress.policy_version, temperature
    )
    seconds = time.monotonic() - began
    path = episodes_path(run.directory.path, kind, progress.step)
    write_episodes(path, evaluation.episodes, evaluation.frames, run.decode)
    return evaluation, evaluation.metrics | {f"time/{kind}_s": seconds}


def _finish(run: Run) -> None:
    """What is measured once, at the end, and the picture."""
    config, progress = run.config, run.progress
    if config.eval.final_greedy:
        _, metrics = _evaluate(run, "greedy", 0.0)
        _record(run, progress.step, metrics)
    if config.eval.unseen_tasks:
        _, metrics = _evaluate(run, "unseen", config.eval.temperature)
        _record(run, progress.step, metrics)
    run.trackers.pictures(progress.step, {"picture": final_picture(run.directory.path)})


def _save(run: Run, timeout_s: float | None = None) -> dict[str, float]:
    clock: dict[str, float] = {}
    progress = run.progress
    with _timed(clock, "save"), _unbroken(run):
        temporary = checkpoint.begin(run.directory.checkpoints, progress.step)
        run.workers.save(temporary, timeout_s)
        checkpoint.commit(
            temporary,
            progress.step,
            progress.state(run.config),
            run.config.checkpoint.keep,
            score=progress.measured_rate,
        )
    run.saved, run.saved_at = replace(progress), time.monotonic()
    return clock


def _minutes_since_save(run: Run) -> float:
    return (time.monotonic() - run.saved_at) / 60


def _save_what_is_done(run: Run) -> None:
    """The steps since the last checkpoint, before an interrupted run ends, if the ranks can."""
    if not run.whole or run.progress.step <= run.saved.step:
        return
    try:
        _save(run, run.config.checkpoint.grace_s)
        run.directory.event(f"interrupted; step {run.progress.step} is saved")
    except WayfinderError as error:
        run.directory.event(f"interrupted; step {run.progress.step} could not be saved: {error}")


def _record(run: Run, step: int, metrics: dict[str, float]) -> None:
    run.trackers.log(step, metrics)


def _unseen_tasks(config: Config) -> list[Task]:
    if not config.eval.unseen_tasks:
        return []
    return evaluation_tasks(config.env.id, config.eval.unseen_first_seed, config.eval.unseen_tasks)


@contextmanager
def _timed(clock: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    clock[f"time/{name}_s"] = time.monotonic() - began
