"""The text model on demonstrations: contexts as rollouts build them, loss on reply tokens only.

Every row is prefix, one observation with one frame, and a reply: what a rollout with `history=1`
sends. Rows differ only in feedback and action, so their ids and positions are made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from wayfinder.chat.parse import Action, format_action
from wayfinder.chat.render import ChatRenderer, context_ids
from wayfinder.train.sft_tower import TowerFeatures


@dataclass(frozen=True, slots=True)
class TextRow:
    """One context and, behind it, the reply (empty when it is yet to be sampled)."""

    ids: torch.Tensor  # int64 [length]
    positions: torch.Tensor  # int64 [3, length]: time, height, width of the multimodal rotation
    context_length: int


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Rows padded on the right, where causal attention never looks from a real token."""

    ids: torch.Tensor  # int64 [batch, length]
    positions: torch.Tensor  # int64 [3, batch, length]
    is_reply: torch.Tensor  # bool [batch, length]


class DemonstrationText:
    """Rows for one model, chat format and frame size."""

    def __init__(
        self, model: nn.Module, renderer: ChatRenderer, tokenizer, action_format: str, side: int
    ):
        self._model = model
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._format = action_format
        self._side = side
        self._rows: dict[tuple[str, Action | None], TextRow] = {}

    def row(self, feedback: str, action: Action | None) -> TextRow:
        """The context after `feedback`, with the reply for `action` (None: without one)."""
        key = (feedback, action)
        if key not in self._rows:
            self._rows[key] = self._make_row(feedback, action)
        return self._rows[key]

    def batch(self, demonstrations: Sequence[tuple[str, Action]]) -> TextBatch:
        rows = [self.row(feedback, action) for feedback, action in demonstrations]
        length = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), length), self._tokenizer.pad_token_id)
        positions = torch.zeros(3, len(rows), length, dtype=torch.int64)
        is_reply = torch.zeros(len(rows), length, dtype=torch.bool)
        for place, row in enumerate(rows):
            end = len(row.ids)
            ids[place, :end] = row.ids
            positions[:, place, :end] = row.positions
            is_reply[place, row.context_length : end] = True
        return TextBatch(ids, positions, is_reply)

    def _make_row(self, feedback: str, action: Action | None) -> TextRow:
        tokens = self._side * self._side
        observation = self._renderer.observation(feedback, (tokens,))
        context = context_ids(self._renderer.prefix_ids, (), 0, observation)
        reply: tuple[int, ...] = ()
        if action is not None:
            text = format_action(action, self._format)
            reply = tuple(self._tokenizer.encode(text, add_special_tokens=False))
            reply += self._renderer.closing_ids(reply)
        ids = torch.tensor([context + reply])
        positions, _ = self._model.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self._model.config.image_token_id).int(),
            image_grid_thw=torch.tensor([[1, self._side, self._side]]),
        )
        return TextRow(ids[0], positions[:, 0], len(context))


def text_hidden(
    model: nn.Module,
    ids: torch.Tensor,
    positions: torch.Tensor,
    features: TowerFeatures,
    cache=None,
) -> torch.Tensor:
    """Last hidden states [batch, length, width] of a `Qwen3VLForConditionalGeneration`.

    Row b holds one image, whose tokens are row b of `features`. With a `cache`, keys and values are
    added to it.
    """
    is_image = ids == model.config.image_token_id
    embeds = model.get_input_embeddings()(ids)
    spread = is_image[..., None].expand_as(embeds)
    embeds = embeds.masked_scatter(spread, features.merged.to(embeds.dtype))
    return model.model.language_model(
        inputs_embeds=embeds,
        position_ids=positions,
        visual_pos_masks=is_image,
        deepstack_visual_embeds=[level.flatten(0, 1) for level in features.deepstack],
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state


def imitation_loss(
    model: nn.Module, batch: TextBatch, features: TowerFeatures
) -> tuple[torch.Tensor, dict[str, float]]:
    """Cross entropy of the reply tokens; the share of replies with every token most likely."""
    hidden = text_hidden(model, batch.ids, batch.positions, features)
    logits = model.lm_head(hidden[:, :-1][batch.is_reply[:, 1:]])
    targets = batch.ids[batch.is_reply]
    loss = F.cross_entropy(logits, targets)
    with torch.no_grad():
        wrong = torch.zeros_like(batch.is_reply)
        wrong[batch.is_reply] = logits.argmax(-1) != targets
        replies = float((~wrong.any(1)).float().mean())
    return loss, {"loss": float(loss.detach()), "replies": replies}
