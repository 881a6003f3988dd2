"""Types of the configuration. Values live in `conf/`, relations between keys in `rules.py`.

Enumerations have names equal to their values, because OmegaConf matches names. The dataclasses are
not frozen, because Hydra could not override a frozen node; after `load.py` nobody writes to them.
A field without a default here must get its value from a YAML file: each default lives in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from wayfinder.choices import (
    AdvantageKind,
    GroupFilter,
    ImportanceMode,
    KlKind,
    KlPlacement,
    LossKind,
    ReductionMode,
)
from wayfinder.config.sft import SftConfig


class TaskKind(StrEnum):
    train = "train"
    evaluate = "evaluate"
    sft = "sft"
    report = "report"
    play = "play"


class OnExisting(StrEnum):
    resume = "resume"
    fail = "fail"
    new = "new"


class EnvKind(StrEnum):
    maze2d = "maze2d"
    visgym = "visgym"


class ActionFormat(StrEnum):
    tuple = "tuple"
    keyword = "keyword"


class PromptRole(StrEnum):
    system = "system"
    user = "user"


class OnBadReply(StrEnum):
    tell = "tell"
    end = "end"


class Schedule(StrEnum):
    lockstep = "lockstep"
    free = "free"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class LrSchedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class WandbMode(StrEnum):
    disabled = "disabled"
    offline = "offline"
    online = "online"


@dataclass
class LoraConfig:
    rank: int
    """Rank of the adapter matrices."""
    alpha: int
    """The adapter's output is multiplied by alpha / rank, with rslora by alpha / sqrt(rank)."""
    rslora: bool
    """Rank-stabilised scaling, arXiv:2312.03732."""
    targets: list[str]
    """Linear layers of each text decoder layer that get an adapter. No vision layer, no LM head."""


@dataclass
class ModelConfig:
    name: str
    """Label in run directories and tables."""
    path: str
    """Model directory, relative to the repository root or absolute, or a hub id."""
    dtype: str
    """float32 or bfloat16: frozen weights of policy and engine. Adapters are always float32."""
    adapter: str | None
    """Directory of a PEFT adapter that training starts from (it is then the KL reference)."""
    gradient_checkpointing: bool
    """Recompute decoder layers in the backward pass: less memory, more time."""
    attention: str
    """Attention implementation of the policy: sdpa, eager or flash_attention_2."""
    lora: LoraConfig


@dataclass
class RewardConfig:
    task: float
    """Reward of a solved episode."""
    format: float
    """Reward of an episode in which every reply could be parsed. Never counted as success."""


@dataclass
class EnvConfig:
    kind: EnvKind
    """maze2d: our own mazes. visgym: any task of VisGym, when that is installed."""
    id: str
    """Environment id, for example maze_2d/easy."""
    max_turns: int
    """Replies after which an episode ends. The only turn limit there is."""
    history: Any
    """full, or the number of recent turns that the model sees."""
    action_format: ActionFormat
    """tuple: ('move', 0). keyword: <action>right</action>."""
    prompt_role: PromptRole
    """Which message carries the task: the system message or the first user message."""
    on_parse_failure: OnBadReply
    """tell: the environment says that the reply was invalid. end: the episode ends."""
    on_reply_cut: OnBadReply
    """The same choice for replies that hit rollout.max_tokens."""
    step_timeout_s: float
    """An environment step that takes longer ends the episode as env_error."""
    reward: RewardConfig


@dataclass
class OptimizerConfig:
    lr: float
    """Peak learning rate of AdamW."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    warmup_steps: int
    """Linear warm-up, in steps."""
    schedule: LrSchedule
    """Shape after the warm-up; linear and cosine reach 0 at the last step."""


@dataclass
class MismatchConfig:
    alarm: float
    """Warn when any log-probability of engine and trainer differs by more."""
    stop: float
    """Stop the run when any differs by more."""


@dataclass
class AlgorithmConfig:
    name: str
    tasks_per_step: int
    """Mazes of one step; each gives one group."""
    group_size: int
    """Episodes of one maze."""
    mini_batches: int
    """Optimizer updates that one step's episodes are split into, by whole groups."""
    advantage: AdvantageKind
    loss: LossKind
    loss_reduction: ReductionMode
    constant_length: int
    """Tokens an episode is divided by under loss_reduction=constant (Dr. GRPO)."""
    clip_low: float
    clip_high: float
    dual_clip: float | None
    """Bound of the ratio for negative advantages (arXiv:1912.09729), for example 3; null: off."""
    kl_coef: float
    kl_kind: KlKind
    kl_placement: KlPlacement
    entropy_coef: float
    importance: ImportanceMode
    """Correction from the engine's to the trainer's distribution."""
    importance_cap: float
    filter: GroupFilter
    """What happens to groups without signal. keep: they are computed like the others. drop: the
    same gradient with less work. refill: other groups take their place (dynamic sampling)."""
    refill_groups: int
    """Groups that one step may roll out beyond tasks_per_step under filter=refill."""
    micro_batch_tokens: int
    """Tokens of one forward pass, padding included."""
    packing: bool
    """Samples of a forward pass in one row with block-diagonal attention, instead of padded rows of
    similar length."""
    mismatch: MismatchConfig
    optimizer: OptimizerConfig


@dataclass
class RolloutConfig:
    temperature: float
    top_p: float
    """Must be 1: another value changes the distribution that the trainer computes."""
    top_k: int
    """Must be -1, for the same reason."""
    min_p: float
    """Must be 0, for the same reason."""
    max_tokens: int
    """Sampled tokens of one reply."""
    max_model_len: int
    """Context length of the engine."""
    schedule: Schedule
    """lockstep: turns advance together in a fixed order, repeatable bit for bit on CPU.
    free: each episode advances as soon as its reply is there."""
    max_num_seqs: int
    """Requests that the engine runs at once."""
    max_num_batched_tokens: int
    """Tokens of one engine step."""
    enforce_eager: bool
    """No graph capture or compilation in the engine."""
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    """Share of a GPU for the engine (cluster.device=cuda)."""
    kv_cache_gib: float
    """Key-value cache of one engine (cluster.device=cpu)."""
    request_timeout_s: float
    """An engine that gives no token for this long counts as lost."""


@dataclass
class ClusterConfig:
    device: Device
    slots: int
    """Devices; each hosts one policy rank and one rollout engine."""
    threads_per_slot: int
    """OpenMP threads of a slot; 0: this machine's cores divided by the slots, or, on a Ray that is
    joined, `cpus_per_slot`."""
    cpus_per_slot: float
    """CPUs that one slot reserves in Ray."""
    address: str | None
    """Ray address; null starts Ray on this machine, auto joins the running cluster."""
    start_timeout_s: float
    """Longest wait for resources and for workers to come up."""
    step_timeout_s: float
    """Longest wait for one update or one publication."""
    object_store_mib: int
    """Object store of a Ray that is started here."""
    max_restarts: int
    """Workers that one process of a run may lose and replace: an engine alone, or all of them from
    the last checkpoint when it was a rank. One more ends the run."""


@dataclass
class SyncConfig:
    dir: str | None
    """Directory in which a run publishes adapters, below its own name; null: the run directory."""
    keep: int
    """Published versions that are kept."""
    retry_s: float
    """How long an adapter whose files cannot be written or read is tried again."""
    probe_tolerance: float
    """Largest allowed difference of a probe log-probability between engine and trainer."""


@dataclass
class WandbConfig:
    mode: WandbMode
    project: str
    entity: str | None
    group: str | None
    """null: the sweep that the run belongs to, else the experiment."""
    tags: list[str]
    adapter: bool
    """Send the last adapter as an artifact when the run ends."""


@dataclass
class TrackingConfig:
    wandb: WandbConfig
    console: bool
    """Live progress on a terminal; the stable step lines are printed in any case."""


@dataclass
class EvalConfig:
    interval: int
    """Steps between evaluations; 0 evaluates only at the start and the end."""
    tasks: int
    """Mazes of the fixed set."""
    first_seed: int
    """Seed of its first maze; the set is first_seed .. first_seed + tasks - 1."""
    samples: int
    """Episodes of each maze."""
    pass_at: list[int]
    """The k of pass@k, each at most `samples`."""
    temperature: float | None
    """null: the temperature of training; 0: greedy."""
    final_greedy: bool
    """Evaluate once more greedily at the end."""
    unseen_tasks: int
    """Other mazes that are evaluated once at the end; 0: none."""
    unseen_first_seed: int
    """Seed of the first of them."""
    stop_at: float | None
    """End the run when an evaluation reaches this solve rate; null: never."""


@dataclass
class CheckpointConfig:
    interval: int
    """Steps between checkpoints; the last step always gets one. 0: only the last."""
    every_minutes: float | None
    """Also one after the first step that ends this long after the last one; null: not by time."""
    keep: int
    """Newest checkpoints that are kept, beside the one with the best solve rate."""
    grace_s: float
    """On SIGTERM or SIGINT, the longest wait for the end of an update or checkpoint under way, and
    then for a checkpoint of the steps that the last one lacks. Less than the scheduler's own."""


@dataclass
class PathsConfig:
    root: str
    """Directory under which run directories are made."""


@dataclass
class ReportConfig:
    compare: list[str]
    """Nothing, or two evaluations that are compared maze by maze. Each is a run directory (its last
    evaluation), <run>@<step>, a checkpoint directory of a run, or an episodes file."""


@dataclass
class RunConfig:
    name: str | None
    """Directory name of the run below paths.root; null derives it from experiment and overrides."""
    on_existing: OnExisting
    """resume: go on, or return the stored result. fail: refuse. new: take the next free suffix."""


@dataclass
class PlayConfig:
    seed: int
    """Seed of the maze that task=play shows."""
    delay_s: float
    """Seconds that each of its turns stays on the terminal."""


@dataclass
class Config:
    """Root of the composed configuration."""

    task: TaskKind
    root: str | None
    """task=report: directory whose runs are reported, and under which the report is written; null:
    paths.root."""
    experiment: str
    """Label of the experiment; experiment files set it."""
    seed: int
    steps: int
    """Steps of training."""
    model: ModelConfig
    env: EnvConfig
    algorithm: AlgorithmConfig
    rollout: RolloutConfig
    cluster: ClusterConfig
    sync: SyncConfig
    tracking: TrackingConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    paths: PathsConfig
    run: RunConfig
    report: ReportConfig
    play: PlayConfig
    sft: SftConfig

    @property
    def history(self) -> int | None:
        """Turns that the model sees; None: all of them."""
        return None if self.env.history == "full" else int(self.env.history)

    @property
    def episodes_per_step(self) -> int:
        return self.algorithm.tasks_per_step * self.algorithm.group_size
