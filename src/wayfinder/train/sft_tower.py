"""The vision tower on a batch of equal frames, and the heads that supervise it densely.

The same arithmetic as the model's own forward, which takes one frame after the other: a test holds
them equal. Two facts about the mazes make it cheap. All frames have one size, so attention is one
batched call. And a frame is a mosaic: a cell scaled down takes its pixels from the cell and the rim
of its neighbours, so a batch of frames holds few distinct patches and only those are embedded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from wayfinder.chat.vision import VisionProcessor
from wayfinder.envs.maze2d import CELL_PIXELS, render
from wayfinder.errors import ModelError
from wayfinder.train.sft_data import (
    NO_LABEL,
    NUM_DIRECTIONS,
    NUM_KINDS,
    TARGET,
    Situation,
    cell_kinds,
)

# Discs stay clear of a cell's rim, so to its neighbours a cell is only wall, floor or target.
_GROUND = np.array([0, 1, 2, 2, 1, 2])
_OUTSIDE = 3


@dataclass(frozen=True, slots=True)
class PatchBatch:
    """Pixels of equal frames: `patches[index[b, n]]` is patch n of frame b."""

    patches: torch.Tensor  # float32 [distinct, patch dim]
    index: torch.Tensor  # int64 [batch, patches of a frame]


class PatchTable:
    """Patches by what they show, filled from the real processor whenever something new appears."""

    def __init__(self, vision: VisionProcessor, size: int):
        pixels = size * CELL_PIXELS
        if vision.merge_size != 1 or vision.num_tokens(pixels, pixels) != size * size:
            raise ModelError(
                f"sft.model.image_side: expected one image token for each of the {size}x{size} "
                f"cells, found {vision.num_tokens(pixels, pixels)} tokens; set it to "
                f"{size} * patch_size"
            )
        self._vision = vision
        self._places: dict[int, int] = {}
        self._patches: list[torch.Tensor] = []

    def batch(self, situations: Sequence[Situation]) -> PatchBatch:
        kinds = np.stack([cell_kinds(s) for s in situations])
        keys = _patch_keys(kinds).reshape(len(situations), -1)
        for situation, row in zip(situations, keys.tolist(), strict=True):
            if any(key not in self._places for key in row):
                self._learn(situation, row)
        distinct, index = np.unique(keys, return_inverse=True)
        patches = torch.stack([self._patches[self._places[key]] for key in distinct.tolist()])
        return PatchBatch(patches, torch.from_numpy(index.reshape(keys.shape)))

    def _learn(self, situation: Situation, keys: list[int]) -> None:
        frame = render(situation.maze, situation.agent, situation.target_left)
        pixels, _ = self._vision.patches([frame])
        for key, patch in zip(keys, pixels, strict=True):
            if key not in self._places:
                self._places[key] = len(self._patches)
                self._patches.append(patch.clone())


def _patch_keys(kinds: np.ndarray) -> np.ndarray:
    """A number for each cell of `kinds` [batch, height, width]: its kind and its neighbours'."""
    _, height, width = kinds.shape
    ground = np.pad(_GROUND[kinds], ((0, 0), (1, 1), (1, 1)), constant_values=_OUTSIDE)
    keys = kinds.astype(np.int64)
    for row in range(3):
        for column in range(3):
            if (row, column) != (1, 1):
                keys = keys * 4 + ground[:, row : row + height, column : column + width]
    return keys


@dataclass(frozen=True, slots=True)
class TowerFeatures:
    """What the tower hands the text model: [batch, tokens, text width], and the same per level."""

    merged: torch.Tensor
    deepstack: list[torch.Tensor]

    def detach(self) -> TowerFeatures:
        return TowerFeatures(self.merged.detach(), [level.detach() for level in self.deepstack])


def tower_features(
    tower: nn.Module, batch: PatchBatch, places: torch.Tensor | None = None
) -> TowerFeatures:
    """`tower` (a `Qwen3VLVisionModel` with merge size 1) on square frames of its own grid size.

    `places` (int64, sorted): show only these cells, as if the others did not exist.
    """
    side = tower.num_grid_per_side
    assert batch.index.shape[1] == side * side, "another size needs resampled positions"
    if places is None:
        places = torch.arange(side * side)
    index = batch.index[:, places]
    count, tokens = index.shape
    projection = tower.patch_embed.proj
    embedded = F.linear(batch.patches, projection.weight.flatten(1), projection.bias)
    hidden = F.embedding(index, embedded) + tower.pos_embed(places)
    cos, sin = tower.rotary_pos_emb(hidden, torch.stack([places // side, places % side], dim=1))
    deepstack = []
    for level, block in enumerate(tower.blocks):
        hidden = hidden + _attention(block.attn, block.norm1(hidden), cos, sin)
        hidden = hidden + block.mlp(block.norm2(hidden))
        if level in tower.deepstack_visual_indexes:
            place = list(tower.deepstack_visual_indexes).index(level)
            deepstack.append(tower.deepstack_merger_list[place](hidden).view(count, tokens, -1))
    return TowerFeatures(tower.merger(hidden).view(count, tokens, -1), deepstack)


def telling_places(side: int) -> torch.Tensor:
    """Cells that can differ between two mazes, int64: rooms and what lies between two rooms.

    Half of all cells; the others are walls in every maze.
    """
    inside = torch.arange(side * side).view(side, side)[1:-1, 1:-1]
    rows, columns = torch.meshgrid(torch.arange(side - 2), torch.arange(side - 2), indexing="ij")
    return inside[(rows % 2 == 0) | (columns % 2 == 0)]


def _attention(
    attention: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    count, tokens, width = x.shape
    qkv = attention.qkv(x).view(count, tokens, 3, attention.num_heads, -1)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    query = query * cos + _rotate_half(query) * sin
    key = key * cos + _rotate_half(key) * sin
    mixed = F.scaled_dot_product_attention(query, key, value, scale=attention.scaling)
    return attention.proj(mixed.transpose(1, 2).reshape(count, tokens, width))


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


class DenseHeads(nn.Module):
    """Linear heads that make the tower say, at each token, what the cell is and the way from it.

    The deepstack levels answer only for the kind: earlier layers see the cell, not yet the way.
    Thrown away after the stage.
    """

    def __init__(self, width: int, levels: int):
        super().__init__()
        self.kind = nn.Linear(width, NUM_KINDS)
        self.direction = nn.Linear(width, NUM_DIRECTIONS)
        self.level_kinds = nn.ModuleList(nn.Linear(width, NUM_KINDS) for _ in range(levels))

    def forward(
        self, features: TowerFeatures, kinds: torch.Tensor, directions: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss, and accuracies; labels int64 [batch, tokens], `NO_LABEL` where there is none."""
        kind_logits = self.kind(features.merged)
        direction_logits = self.direction(features.merged)
        losses = [_kind_loss(kind_logits, kinds)]
        losses += [
            _kind_loss(head(level), kinds)
            for head, level in zip(self.level_kinds, features.deepstack, strict=True)
        ]
        direction_loss = F.cross_entropy(
            direction_logits.flatten(0, 1), directions.flatten(), ignore_index=NO_LABEL
        )
        with torch.no_grad():
            labelled = directions != NO_LABEL
            right = (direction_logits.argmax(-1) == directions) & labelled
            kinds_right = kind_logits.argmax(-1) == kinds
            metrics = {
                "loss": float(direction_loss),
                "cells": float(right.sum() / labelled.sum()),
                "kinds": float(kinds_right.float().mean()),
                "mazes": float(((right | ~labelled) & kinds_right).all(1).float().mean()),
            }
        return direction_loss + torch.stack(losses).mean(), metrics


def _kind_loss(logits: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    # Half for the agent and the target, half for walls and floor, of which there are far more.
    losses = F.cross_entropy(logits.flatten(0, 1), kinds.flatten(), reduction="none")
    special = kinds.flatten() >= TARGET
    return 0.5 * losses[special].mean() + 0.5 * losses[~special].mean()
