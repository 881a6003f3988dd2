"""Solve rate of a model in this process: real environments, sampled replies, one frame a turn.

Made for the preparation, where no engine runs. Not the evaluation of a training run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from wayfinder.chat.parse import parse_action
from wayfinder.chat.vision import BANNED_BIAS, VisionProcessor
from wayfinder.envs.maze2d import Maze2DAdapter
from wayfinder.seeding import derive_seed
from wayfinder.train.sft_text import DemonstrationText, text_hidden
from wayfinder.train.sft_tower import PatchBatch, TowerFeatures, tower_features
from wayfinder.types import Task

_MAX_REPLY_TOKENS = 12
_LANES = 128  # episodes that run side by side


@dataclass(frozen=True, slots=True)
class SolveReport:
    """Counts over episodes, except `turns` and the moves, which are over all turns."""

    episodes: int
    solved: int
    wrong_stops: int
    timeouts: int
    turns: int
    illegal: int  # actions that the environment did not execute
    unparsed: int

    @property
    def solve_rate(self) -> float:
        return self.solved / self.episodes

    def __add__(self, other: SolveReport) -> SolveReport:
        names = self.__slots__
        return SolveReport(*(getattr(self, n) + getattr(other, n) for n in names))

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__} | {
            "solve_rate": self.solve_rate
        }


@dataclass(slots=True)
class _Lane:
    env: Maze2DAdapter
    frame: np.ndarray
    feedback: str


class SolveMeter:
    """Plays mazes with a model whose frames all have one size. Keeps no state between calls."""

    def __init__(
        self,
        model: nn.Module,
        text: DemonstrationText,
        tokenizer,
        vision: VisionProcessor,
        action_format: str,
        max_turns: int,
    ):
        self._model = model
        self._text = text
        self._tokenizer = tokenizer
        self._vision = vision
        self._format = action_format
        self._max_turns = max_turns

    @torch.no_grad()
    def measure(
        self, tasks: Sequence[Task], temperature: float, seed: int, repeats: int = 1
    ) -> SolveReport:
        """Each task `repeats` times, replies sampled at `temperature`."""
        was_training = self._model.training
        self._model.eval()
        total = SolveReport(0, 0, 0, 0, 0, 0, 0)
        tasks_at_once = max(1, _LANES // repeats)
        for start in range(0, len(tasks), tasks_at_once):
            part = [t for t in tasks[start : start + tasks_at_once] for _ in range(repeats)]
            generator = torch.Generator().manual_seed(derive_seed(seed, "solve", start))
            total += self._play(part, temperature, generator)
        self._model.train(was_training)
        return total

    def _play(
        self, tasks: Sequence[Task], temperature: float, generator: torch.Generator
    ) -> SolveReport:
        lanes = []
        for task in tasks:
            env = Maze2DAdapter(task.env_id)
            lanes.append(_Lane(env, env.reset(task.seed), ""))
        report = SolveReport(len(lanes), 0, 0, 0, 0, 0, 0)
        seen: dict[bytes, TowerFeatures] = {}
        for _ in range(self._max_turns):
            if not lanes:
                break
            going = []
            replies = self._reply(lanes, seen, temperature, generator)
            for lane, reply in zip(lanes, replies, strict=True):
                parsed = parse_action(self._tokenizer.decode(reply), self._format)
                result = lane.env.step(parsed.action, parsed.error)
                report = replace(
                    report,
                    turns=report.turns + 1,
                    solved=report.solved + result.success,
                    wrong_stops=report.wrong_stops + (result.terminated and not result.success),
                    illegal=report.illegal + (parsed.action is not None and not result.executed),
                    unparsed=report.unparsed + (parsed.action is None),
                )
                if not result.terminated:
                    lane.frame, lane.feedback = result.frame, result.feedback
                    going.append(lane)
            lanes = going
        return replace(report, timeouts=len(lanes))

    def _reply(
        self,
        lanes: list[_Lane],
        seen: dict[bytes, TowerFeatures],
        temperature: float,
        generator: torch.Generator,
    ) -> list[list[int]]:
        frames = [lane.frame.tobytes() for lane in lanes]
        new = {key: lane.frame for key, lane in zip(frames, lanes, strict=True) if key not in seen}
        if new:
            pixels, _ = self._vision.patches(list(new.values()))
            index = torch.arange(len(pixels)).view(len(new), -1)
            features = tower_features(self._model.model.visual, PatchBatch(pixels, index))
            for place, key in enumerate(new):
                levels = [level[place] for level in features.deepstack]
                seen[key] = TowerFeatures(features.merged[place], levels)
        replies: list[list[int]] = [[] for _ in lanes]
        for feedback in sorted({lane.feedback for lane in lanes}):
            places = [p for p, lane in enumerate(lanes) if lane.feedback == feedback]
            shown = [seen[frames[p]] for p in places]
            features = TowerFeatures(
                torch.stack([f.merged for f in shown]),
                [torch.stack(levels) for levels in zip(*(f.deepstack for f in shown), strict=True)],
            )
            for place, reply in zip(
                places, self._sample(feedback, features, temperature, generator), strict=True
            ):
                replies[place] = reply
        return replies

    def _sample(
        self,
        feedback: str,
        features: TowerFeatures,
        temperature: float,
        generator: torch.Generator,
    ) -> list[list[int]]:
        """One reply for each image behind the same text; the end of turn is not part of it."""
        count = len(features.merged)
        row = self._text.row(feedback, None)
        cache = DynamicCache(config=self._model.config.text_config)
        hidden = text_hidden(
            self._model,
            row.ids.expand(count, -1),
            row.positions[:, None].expand(-1, count, -1),
            features,
            cache,
        )
        position = int(row.positions.max())
        replies: list[list[int]] = [[] for _ in range(count)]
        open_rows = [True] * count
        end = self._tokenizer.eos_token_id
        for _ in range(_MAX_REPLY_TOKENS):
            logits = self._model.lm_head(hidden[:, -1])
            logits[:, list(self._vision.tokens.banned)] += BANNED_BIAS
            chosen = torch.multinomial(
                torch.softmax(logits / temperature, dim=-1), 1, generator=generator
            )
            for place, token in enumerate(chosen[:, 0].tolist()):
                open_rows[place] &= token != end
                if open_rows[place]:
                    replies[place].append(token)
            if not any(open_rows):
                break
            position += 1
            hidden = self._model.model.language_model(
                inputs_embeds=self._model.get_input_embeddings()(chosen),
                position_ids=torch.full((3, count, 1), position),
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        return replies
