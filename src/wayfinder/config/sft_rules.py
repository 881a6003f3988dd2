"""What must hold for the preparation of the tiny model (`task=sft`)."""

from __future__ import annotations

from collections.abc import Iterator

from wayfinder.config.bounds import GREATEST_SEED, above, at_least, between, maze_seed, share
from wayfinder.config.schema import ActionFormat, Config, PromptRole
from wayfinder.config.violation import Violation, closest

CELLS = {"maze_2d/easy": 9, "maze_2d/hard": 11}
"""Cells a side of the mazes that the preparation knows."""

STAGES = ("vision", "clean", "sloppy")


BOUNDS = (
    between("seed", 0, GREATEST_SEED, 0),
    *(
        bound
        for stage in STAGES
        for bound in (
            at_least(f"sft.{stage}.examples", int(stage != "vision"), 26_000),
            at_least(f"sft.{stage}.batch_size", 1, 64),
            above(f"sft.{stage}.learning_rate", 0, 1e-3),
            at_least(f"sft.{stage}.muon_learning_rate", 0, 0),
            at_least(f"sft.{stage}.weight_decay", 0, 0.01),
            at_least(f"sft.{stage}.warmup_examples", 0, 2000),
            above(f"sft.{stage}.clip_norm", 0, 1),
        )
    ),
    at_least("sft.vision_telling_examples", 0, 0),
    at_least("sft.blend_probes", 1, 6),
    at_least("sft.probe_repeats", 1, 4),
    share("sft.target_solve_rate", 0.4375),
    at_least("sft.threads", 1, 2),
    at_least("sft.checkpoint_seconds", 0, 30),
    *(
        between(f"sft.situations.{name}", 0, 1, 0.1)
        for name in ("start", "at_target", "bumped", "refused", "target_left")
    ),
    *(
        between(f"sft.noise.{name}", 0, 1, 0.1)
        for name in ("random_move", "step_back", "wrong_stop", "late_stop")
    ),
    *(
        at_least(f"sft.model.{name}", 1, instead)
        for name, instead in (
            ("image_side", 144),
            ("patch_size", 16),
            ("vision_depth", 6),
            ("vision_width", 128),
            ("vision_heads", 4),
            ("vision_mlp", 384),
            ("text_depth", 2),
            ("text_width", 128),
            ("text_heads", 4),
            ("text_kv_heads", 4),
            ("text_head_dim", 32),
            ("text_mlp", 384),
        )
    ),
    maze_seed("sft.measure.first_seed", 0),
    at_least("sft.measure.tasks", 1, 64),
    maze_seed("sft.measure.other_first_seed", 1_000_000),
    at_least("sft.measure.other_tasks", 1, 256),
    at_least("sft.measure.max_turns", 1, 30),
    at_least("sft.measure.repeats", 1, 8),
    at_least("sft.measure.temperature", 0, 0.7),
    at_least("sft.measure.cold_temperature", 0, 0.2),
)


def names_of_the_preparation_are_known(config: Config) -> Iterator[Violation]:
    sft = config.sft
    for key, value, names in (
        ("sft.env_id", sft.env_id, tuple(CELLS)),
        ("sft.action_format", sft.action_format, tuple(ActionFormat)),
        ("sft.prompt_role", sft.prompt_role, tuple(PromptRole)),
    ):
        if value not in names:
            mend = closest(value, names, f"Set {key}={names[0]}")
            yield Violation(key, f"one of {', '.join(names)}", value, mend)


def one_image_token_is_one_cell(config: Config) -> Iterator[Violation]:
    model, cells = config.sft.model, CELLS.get(config.sft.env_id)
    if cells is not None and model.image_side != cells * model.patch_size:
        side = cells * model.patch_size
        yield Violation(
            "sft.model.image_side",
            f"{cells} cells of sft.model.patch_size={model.patch_size} pixels with "
            f"sft.env_id={config.sft.env_id}, so that an image token is a cell",
            model.image_side,
            f"Set sft.model.image_side={side}",
        )


def heads_divide_the_width(config: Config) -> Iterator[Violation]:
    model = config.sft.model
    for width, heads in (("vision_width", "vision_heads"), ("text_heads", "text_kv_heads")):
        size, parts = getattr(model, width), getattr(model, heads)
        if parts >= 1 and size % parts:
            yield Violation(
                f"sft.model.{width}",
                f"a multiple of sft.model.{heads}={parts}",
                size,
                f"Set sft.model.{width}={size - size % parts + parts}, or another {heads}",
            )


def deepstack_levels_are_layers(config: Config) -> Iterator[Violation]:
    model = config.sft.model
    levels = model.deepstack_levels
    fits = all(0 <= level < model.vision_depth for level in levels)
    if not fits or len(levels) > model.text_depth:
        yield Violation(
            "sft.model.deepstack_levels",
            f"at most sft.model.text_depth={model.text_depth} layers of the tower, each in "
            f"0..{model.vision_depth - 1}",
            levels,
            f"Set sft.model.deepstack_levels=[{max(0, model.vision_depth - 2)}]",
        )


def shares_of_a_draw_add_up_to_one_at_most(config: Config) -> Iterator[Violation]:
    sft = config.sft
    for group, names in (
        ("situations", ("start", "at_target")),
        ("situations", ("bumped", "refused")),
        ("noise", ("wrong_stop", "random_move", "step_back")),
    ):
        total = sum(getattr(getattr(sft, group), name) for name in names)
        if total > 1:
            yield Violation(
                f"sft.{group}.{names[-1]}",
                f"{' + '.join(names)} of at most 1, because they are shares of one draw",
                f"{getattr(getattr(sft, group), names[-1])} (together {total:g})",
                f"Make one of sft.{group}.{{{','.join(names)}}} smaller",
            )


def other_mazes_are_not_those_of_the_evaluation(config: Config) -> Iterator[Violation]:
    measure = config.sft.measure
    end, other_end = measure.first_seed + measure.tasks, measure.other_first_seed
    if measure.first_seed < other_end + measure.other_tasks and other_end < end:
        yield Violation(
            "sft.measure.other_first_seed",
            f"seeds outside of {measure.first_seed}..{end - 1}",
            measure.other_first_seed,
            f"Set sft.measure.other_first_seed={max(1_000_000, end)}",
        )


RULES = (
    names_of_the_preparation_are_known,
    one_image_token_is_one_cell,
    heads_divide_the_width,
    deepstack_levels_are_layers,
    shares_of_a_draw_add_up_to_one_at_most,
    other_mazes_are_not_those_of_the_evaluation,
)
