"""Frames to pixel patches, by the processor settings that the engine reads from the same files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wayfinder.errors import ModelError

if TYPE_CHECKING:
    import torch

# Added to the logits of banned tokens, before the temperature, by engine and trainer alike; vLLM
# allows no lower bias, and exp(-100) is 0 beside any real probability in float32.
BANNED_BIAS = -100.0


@dataclass(frozen=True, slots=True)
class VisionTokens:
    """The ids that stand for images, and the ids a model must never sample."""

    image_pad: int
    video_pad: int
    vision_start: int
    vision_end: int

    @property
    def banned(self) -> tuple[int, ...]:
        """Sampled, one of these would be read back as (part of) an image."""
        return (self.image_pad, self.video_pad, self.vision_start, self.vision_end)


def collapse_pads(ids: Sequence[int], image_pad: int) -> list[int]:
    """One pad for each image: the form in which the engine takes a prompt.

    An image's pads stand between vision start and vision end, so two images never touch.
    """
    return [
        token
        for index, token in enumerate(ids)
        if token != image_pad or index == 0 or ids[index - 1] != image_pad
    ]


class VisionProcessor:
    """The image half of a model's processor.

    `grid` and `num_tokens` are cheap (arithmetic on the size); `patches` does the resize. One
    resize, here and in the engine, both from `preprocessor_config.json` of the model.
    """

    def __init__(self, processor) -> None:
        self._images = processor.image_processor
        self.merge_size = int(self._images.merge_size)
        self.tokens = VisionTokens(
            image_pad=processor.image_token_id,
            video_pad=processor.video_token_id,
            vision_start=processor.vision_start_token_id,
            vision_end=processor.vision_end_token_id,
        )
        self._counts: dict[tuple[int, int], int] = {}

    def num_tokens(self, height: int, width: int) -> int:
        """Image pads that one frame of this size takes in the prompt."""
        size = (height, width)
        if size not in self._counts:
            patches = int(self._images.get_number_of_image_patches(height, width))
            if patches % self.merge_size**2:
                raise ModelError(
                    f"preprocessor_config.json: a frame of {height}x{width} px gives {patches} "
                    f"patches, which is not a multiple of merge_size^2 = {self.merge_size**2}"
                )
            self._counts[size] = patches // self.merge_size**2
        return self._counts[size]

    def patches(self, frames: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixel rows [sum of patches, patch dim] and grids [num frames, 3] (t, h, w in patches)."""
        import torch

        # Channels first, as the engine's input path hands them over: one reading of the bytes.
        images = [torch.from_numpy(frame.copy()).permute(2, 0, 1) for frame in frames]
        out = self._images(images=images, return_tensors="pt")
        return out["pixel_values"], out["image_grid_thw"]


def load_processor(path: str | Path):
    """The full processor (tokenizer, images, chat template) of a model directory or hub id."""
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path={path}: no usable processor there (tokenizer.json, "
            f"preprocessor_config.json, chat_template.jinja): {error}"
        ) from error
