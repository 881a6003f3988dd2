"""Types of the preparation that makes the tiny model: shape, stages, evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TinyModelConfig:
    """Shape of the tiny Qwen3-VL. The defaults have 1.8 M parameters and fit a 9x9 maze."""

    image_side: int = 144
    """Side in pixels to which a square frame is scaled; 144 for 9x9 cells, 176 for 11x11."""
    patch_size: int = 16
    """Side of one image token in pixels; with `image_side` it makes one token of one maze cell."""
    vision_depth: int = 6
    """Layers of the vision tower."""
    vision_width: int = 128
    """Hidden size of the vision tower."""
    vision_heads: int = 4
    """Attention heads of the vision tower."""
    vision_mlp: int = 384
    """Width of the tower's feed-forward layers."""
    deepstack_levels: list[int] = field(default_factory=lambda: [4])
    """Tower layers whose output is also added inside the text model; at most `text_depth`."""
    text_depth: int = 2
    """Layers of the text model."""
    text_width: int = 128
    """Hidden size of the text model."""
    text_heads: int = 4
    """Attention heads of the text model."""
    text_kv_heads: int = 4
    """Key and value heads of the text model."""
    text_head_dim: int = 32
    """Size of one attention head of the text model."""
    text_mlp: int = 384
    """Width of the text model's feed-forward layers."""
    vocab_size: int = 768
    """Most entries of the tokenizer: 256 bytes, 7 special tokens, the rest learnt merges."""
    max_positions: int = 32768
    """Longest context that the model's configuration admits, in tokens."""


@dataclass
class SituationConfig:
    """How the situations of a stage are drawn; what is left is an agent on any floor cell."""

    start: float = 0.1
    """Share of first turns: the agent in its corner, no feedback yet."""
    at_target: float = 0.1
    """Share of situations with the agent on the target."""
    bumped: float = 0.15
    """Share in which the last move ran into a wall."""
    refused: float = 0.05
    """Share in which the last reply was invalid."""
    target_left: float = 0.1
    """Share in which the agent has been on the target and left it."""


@dataclass
class NoiseConfig:
    """How often a sloppy demonstrator errs; each share is of all turns off (or on) the target."""

    random_move: float = 0.55
    """Share of moves in a direction drawn at random, walls included."""
    step_back: float = 0.15
    """Share of moves that go away from the target."""
    wrong_stop: float = 0.04
    """Share of stops away from the target."""
    late_stop: float = 0.3
    """Share of moves off the target instead of the stop."""


@dataclass
class StageConfig:
    """One training loop of the preparation."""

    examples: int = 0
    """Examples that the stage sees, each once."""
    batch_size: int = 64
    """Examples of one optimizer step."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    muon_learning_rate: float = 0.0
    """Peak learning rate of Muon on the matrices of the blocks; 0 leaves them to AdamW."""
    weight_decay: float = 0.01
    """Decoupled weight decay of AdamW."""
    warmup_examples: int = 2000
    """Examples over which the learning rate rises."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    report_every: int = 1600
    """Examples between two lines of the log."""


@dataclass
class MeasureConfig:
    """How the preparation measures solve rates, in this process."""

    first_seed: int = 0
    """First seed of the evaluation mazes."""
    tasks: int = 64
    """Number of evaluation mazes."""
    other_first_seed: int = 1000000
    """First seed of the other unseen mazes."""
    other_tasks: int = 256
    """Number of other unseen mazes."""
    max_turns: int = 30
    """Replies before an episode is over."""
    temperature: float = 0.7
    """Sampling temperature of the training run that follows."""
    cold_temperature: float = 0.2
    """A low temperature, which shows what the policy knows under its noise."""
    repeats: int = 8
    """Episodes of each evaluation maze, for a mean with less sampling noise."""


@dataclass
class SftConfig:
    """The preparation: from random weights to a start that knows mazes and acts badly."""

    env_id: str = "maze_2d/easy"
    """The maze to prepare for."""
    action_format: str = "tuple"
    """How replies spell an action: tuple or keyword."""
    prompt_role: str = "system"
    """Who gives the task: a system message, or the first user message."""
    threads: int = 2
    """Threads of PyTorch; results are equal only for equal numbers."""
    checkpoint_seconds: float = 30.0
    """Longest time of training that an interruption can cost."""
    model: TinyModelConfig = field(default_factory=TinyModelConfig)
    """Shape of the model."""
    situations: SituationConfig = field(default_factory=SituationConfig)
    """How the situations of every stage are drawn."""
    vision: StageConfig = field(
        default_factory=lambda: StageConfig(examples=84_000, muon_learning_rate=3e-3)
    )
    """Stage 1: the tower learns each cell's kind and its way to the target; without examples it
    learns with the text model in stage 2."""
    vision_telling_examples: int = 60_000
    """First examples of stage 1 that show only the cells in which mazes differ: half the cost."""
    clean: StageConfig = field(default_factory=lambda: StageConfig(examples=20_000))
    """Stage 2: the text model imitates the solver; the tower is frozen after stage 1 or 2."""
    sloppy: StageConfig = field(
        default_factory=lambda: StageConfig(
            examples=5_120, learning_rate=2e-4, warmup_examples=640, report_every=640
        )
    )
    """Stage 3: the text model imitates a sloppy demonstrator."""
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    """How the sloppy demonstrator errs."""
    target_solve_rate: float = 0.4375
    """Solve rate that the start should have on the evaluation mazes: 28 of 64."""
    blend_probes: int = 7
    """Measurements with which the blend of clean and sloppy weights is searched for."""
    probe_repeats: int = 4
    """Episodes of each evaluation maze in one of these measurements."""
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    """How solve rates are measured."""
