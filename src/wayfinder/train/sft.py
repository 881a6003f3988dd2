"""The preparation from random weights to the start of reinforcement learning, in three stages.

    vision   the tower learns, for every cell, its kind and the way from it (heads thrown away)
    clean    the text model imitates the solver on the frozen tower: proof that the model can
             (with no examples of vision, the tower learns in this stage)
    sloppy   a short imitation of a sloppy demonstrator: sharp inside, poor outside

The start is a blend of the clean and the sloppy weights, at which the solve rate is the aim.

Every stage goes on after an interruption; repeating a finished preparation returns its result.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wayfinder.chat.parse import FORMATS, format_action
from wayfinder.chat.render import ChatRenderer
from wayfinder.chat.vision import VisionProcessor, load_processor
from wayfinder.config.sft import MeasureConfig, SftConfig
from wayfinder.envs.maze2d import MOVES, SIZES
from wayfinder.envs.protocol import make_env
from wayfinder.envs.tasks import ceiling, evaluation_tasks
from wayfinder.errors import RunRefusedError
from wayfinder.seeding import derive_seed
from wayfinder.train import tiny
from wayfinder.train.sft_data import (
    FEEDBACKS,
    Situations,
    cell_directions,
    cell_kinds,
    expert_action,
    noisy_action,
    reserved_layouts,
)
from wayfinder.train.sft_eval import SolveMeter
from wayfinder.train.sft_stage import (
    StageConsole,
    StageRecord,
    run_stage,
    write_atomic,
)
from wayfinder.train.sft_text import DemonstrationText, imitation_loss
from wayfinder.train.sft_tower import DenseHeads, PatchTable, telling_places, tower_features

MODEL_DIR = "model"  # the result, below the run directory
RECORD_FILE = "training_record.json"
FORMAT_VERSION = 1


def run_sft(
    config: SftConfig,
    out_dir: Path,
    seed: int,
    console: StageConsole | None = None,
    provenance: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs what is left of the preparation and returns its record (also `training_record.json`).

    The model directory is `out_dir/model`. `provenance` goes into the record as it is. Expects a
    `config` that keeps the rules of `config.sft_rules`. Raises `RunRefusedError` when `out_dir`
    belongs to another configuration or seed.
    """
    console = console or StageConsole()
    out_dir.mkdir(parents=True, exist_ok=True)
    _claim(out_dir, config, seed)
    record_path = out_dir / RECORD_FILE
    if record_path.exists():
        console.line(f"sft: {out_dir} is finished; its stored result is returned")
        return json.loads(record_path.read_text())
    torch.set_num_threads(config.threads)
    return Preparation(config, out_dir, seed, console).run(record_path, provenance or {})


def tokenizer_corpus(env_id: str) -> list[str]:
    """What the tokenizer learns its merges from: prompts, feedbacks, replies, message heads.

    Repeats are weights: what is decoded or repeated every turn comes before what is read once.
    """
    env = make_env(env_id, "maze2d")
    env.reset(0)
    lines = [env.prompt(name) for name in FORMATS] * 2
    for name in FORMATS:
        lines += [format_action(action, name) for action in (*range(len(MOVES)), "stop")] * 200
    lines += list(FEEDBACKS) * 20
    lines += ["system\n", "user\n", "assistant\n", "\n"] * 100
    env.close()
    return lines


class Preparation:
    """One run of the preparation in its directory."""

    def __init__(self, config: SftConfig, out_dir: Path, seed: int, console: StageConsole):
        self._config = config
        self._out = out_dir
        self._seed = seed
        self._console = console
        base = out_dir / "base"
        if not (base / "config.json").exists():
            corpus = tokenizer_corpus(config.env_id)
            _replace_dir(
                base, lambda path: tiny.create_random_model(path, config.model, corpus, seed)
            )
        self.processor = load_processor(base)
        tokenizer = self.processor.tokenizer
        self.model = tiny.build_model(tokenizer, config.model, seed)
        self.vision = VisionProcessor(self.processor)
        self._size = SIZES[config.env_id]
        env = make_env(config.env_id, "maze2d")
        env.reset(0)
        self.renderer = ChatRenderer(
            tokenizer, self.vision.tokens, env.prompt(config.action_format), config.prompt_role
        )
        env.close()
        self.text = DemonstrationText(
            self.model, self.renderer, tokenizer, config.action_format, self._size
        )
        self.table = PatchTable(self.vision, self._size)
        # The usual sets stay reserved when this run measures on others.
        sets = [
            mazes
            for measure in (MeasureConfig(), config.measure)
            for mazes in (
                [measure.first_seed, measure.tasks],
                [measure.other_first_seed, measure.other_tasks],
            )
        ]
        self._forbidden = reserved_layouts(config.env_id, sets)
        self.meter = SolveMeter(
            self.model,
            self.text,
            tokenizer,
            self.vision,
            config.action_format,
            config.measure.max_turns,
        )

    def run(self, record_path: Path, provenance: dict[str, Any]) -> dict[str, Any]:
        stages = [self._vision_stage(), self._clean_stage()]
        clean = self._measure_once("clean")
        stages.append(self._sloppy_stage())
        blend = self._blend()
        sloppy = self._measure_once("sloppy")
        _replace_dir(
            self._out / MODEL_DIR,
            lambda path: tiny.save_model_dir(path, self.model.eval(), self.processor),
        )
        measure = self._config.measure
        evaluation = evaluation_tasks(self._config.env_id, measure.first_seed, measure.tasks)
        record = {
            "format_version": FORMAT_VERSION,
            "seed": self._seed,
            "config": asdict(self._config),
            "provenance": provenance,
            "versions": _versions(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "ceiling": ceiling(evaluation, measure.max_turns),
            "seconds": sum(stage.seconds for stage in stages),
            "solve": {"clean": clean, "sloppy": sloppy},
            "blend": blend,
            "stages": [asdict(stage) for stage in stages],
        }
        _write_json(record_path, record)
        return record

    def _vision_stage(self) -> StageRecord:
        config = self._config
        heads = _seeded(
            derive_seed(self._seed, "heads"),
            lambda: DenseHeads(config.model.text_width, len(config.model.deepstack_levels)),
        )
        tower = self.model.model.visual
        situations = self._situations("vision")

        everywhere = torch.arange(self._size**2)
        telling = telling_places(self._size)

        def batch_loss(indices: range):
            batch = [situations[index][0] for index in indices]
            places = telling if indices.start < config.vision_telling_examples else everywhere
            labels = [
                torch.from_numpy(np.stack([label(s) for s in batch])).flatten(1)[:, places]
                for label in (cell_kinds, cell_directions)
            ]
            return heads(tower_features(tower, self.table.batch(batch), places), *labels)

        return self._run("vision", config.vision, {"visual": tower, "heads": heads}, batch_loss)

    def _clean_stage(self) -> StageRecord:
        situations = self._situations("clean")
        modules = self._text_modules()
        if self._config.vision.examples == 0:
            modules["visual"] = self.model.model.visual

        def batch_loss(indices: range):
            batch = [situations[index][0] for index in indices]
            return self._imitate(batch, [expert_action(s) for s in batch])

        return self._run("clean", self._config.clean, modules, batch_loss)

    def _sloppy_stage(self) -> StageRecord:
        situations = self._situations("sloppy")

        def batch_loss(indices: range):
            drawn = [situations[index] for index in indices]
            actions = [noisy_action(s, self._config.noise, rng) for s, rng in drawn]
            return self._imitate([s for s, _ in drawn], actions)

        return self._run("sloppy", self._config.sloppy, self._text_modules(), batch_loss)

    def _blend(self) -> list[dict[str, float]]:
        """Sets the weights between clean and sloppy at which the solve rate is the aim.

        Bisects the share of the sloppy weights, and interpolates in the last two probes. The way
        between the two is smooth, because one is a short fine-tuning of the other, while noise
        alone hits a given rate only by chance.
        """
        path = self._out / "blend.json"
        probes = json.loads(path.read_text()) if path.exists() else []
        config, measure = self._config, self._config.measure
        tasks = evaluation_tasks(config.env_id, measure.first_seed, measure.tasks)
        seed = derive_seed(self._seed, "blend")
        low, high = 0.0, 1.0
        rates: dict[float, float] = {}
        for step in range(config.blend_probes):
            share = 1.0 if step == 0 else 0.5 * (low + high)
            if step >= config.blend_probes - 2 and low in rates and high in rates:
                above = rates[low] - config.target_solve_rate
                share = low + (high - low) * above / (rates[low] - rates[high])
            if step == len(probes):
                self._set_blend(share)
                report = self.meter.measure(tasks, measure.temperature, seed, config.probe_repeats)
                probes.append({"share": share, **report.as_dict()})
                _write_json(path, probes)
                self._console.line(
                    f"sft blend {share:.4f} of sloppy: solve {report.solve_rate:.3f} at "
                    f"temperature {measure.temperature} (aim {config.target_solve_rate:.3f})"
                )
            rates[share] = probes[step]["solve_rate"]
            if probes[step]["solve_rate"] < config.target_solve_rate:
                high = share
            elif share == 1.0:
                break  # too little noise for the aim: the sloppy weights are the nearest
            else:
                low = share
        best = min(probes, key=lambda row: abs(row["solve_rate"] - config.target_solve_rate))
        self._set_blend(best["share"])
        return probes

    def _set_blend(self, share: float) -> None:
        clean, sloppy = (
            torch.load(self._stage_path(name), weights_only=True)["modules"]
            for name in ("clean", "sloppy")
        )
        for name, module in self._text_modules().items():
            module.load_state_dict(
                {key: torch.lerp(clean[name][key], sloppy[name][key], share) for key in clean[name]}
            )

    def _imitate(self, situations, actions):
        features = tower_features(self.model.model.visual, self.table.batch(situations))
        text = self.text.batch(
            [(s.feedback, action) for s, action in zip(situations, actions, strict=True)]
        )
        return imitation_loss(self.model, text, features)

    def _measure_once(self, name: str) -> list[dict[str, Any]]:
        """Solve rates of the present weights; kept in a file, because they take a while."""
        path = self._out / f"solve_{name}.json"
        if path.exists():
            return json.loads(path.read_text())
        config = self._config.measure
        sets = {
            "evaluation": (config.first_seed, config.tasks, config.repeats),
            "other": (config.other_first_seed, config.other_tasks, 1),
        }
        rows = []
        for temperature in (config.temperature, config.cold_temperature):
            for label, (first, count, repeats) in sets.items():
                tasks = evaluation_tasks(self._config.env_id, first, count)
                started = time.monotonic()
                report = self.meter.measure(
                    tasks, temperature, derive_seed(self._seed, "measure"), repeats
                )
                rows.append(
                    {
                        "mazes": label,
                        "first_seed": first,
                        "tasks": count,
                        "repeats": repeats,
                        "temperature": temperature,
                        "max_turns": config.max_turns,
                        **report.as_dict(),
                        "seconds": time.monotonic() - started,
                    }
                )
                self._console.line(
                    f"sft {name} solve {report.solve_rate:.3f} ({report.solved}/{report.episodes}) "
                    f"on {label} mazes at temperature {temperature}"
                )
        _write_json(path, rows)
        return rows

    def _text_modules(self) -> dict[str, torch.nn.Module]:
        return {"text": self.model.model.language_model, "lm_head": self.model.lm_head}

    def _situations(self, name: str) -> Situations:
        config = self._config
        return Situations(config.env_id, self._seed, name, self._forbidden, config.situations)

    def _stage_path(self, name: str) -> Path:
        return self._out / f"stage_{name}.pt"

    def _run(self, name, config, modules, batch_loss) -> StageRecord:
        self.model.requires_grad_(False)
        for module in modules.values():
            module.requires_grad_(True)
        record = run_stage(
            self._stage_path(name),
            StageRecord(name),
            config,
            modules,
            batch_loss,
            self._console,
            self._config.checkpoint_seconds,
        )
        self.model.requires_grad_(False)
        return record


def _seeded(seed: int, make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _claim(out_dir: Path, config: SftConfig, seed: int) -> None:
    """Binds the directory to this configuration, or refuses it and names the keys that differ."""
    path = out_dir / "sft_config.json"
    wanted = _flatten({"seed": seed, "sft": asdict(config)})
    if not path.exists():
        _write_json(path, wanted)
        return
    stored = json.loads(path.read_text())
    differing = sorted(k for k in stored.keys() | wanted.keys() if stored.get(k) != wanted.get(k))
    if differing:
        rows = [f"  {k}: stored {stored.get(k)!r}, asked {wanted.get(k)!r}" for k in differing]
        raise RunRefusedError(
            f"{out_dir} holds a preparation with another configuration:\n"
            + "\n".join(rows)
            + "\nGive another directory, delete this one, or take these keys back."
        )


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=1) + "\n"
    write_atomic(path, lambda temporary: temporary.write_text(text))


def _replace_dir(path: Path, write) -> None:
    """`write` fills a temporary sibling that then takes the place of `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    write(temporary)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)


def _versions() -> dict[str, str]:
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
