"""M-RoPE positions of a token sequence with images, as Qwen3-VL defines them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mrope_positions(
    ids: np.ndarray, grids: Sequence[tuple[int, int]], image_pad: int
) -> np.ndarray:
    """Positions int64 [3, length] (time, height, width) of one sample.

    `grids` holds height and width in tokens (patches / merge) of each image, in order. Text counts
    up on all three axes; an image's tokens share one time position and spread over height and
    width; the next text starts behind the larger side (arXiv:2409.12191, section 2.1; Qwen3-VL
    keeps the scheme for still images). Each image takes its own grid, also when two images touch.

    Raises ValueError when pads and grids do not match.
    """
    length = len(ids)
    positions = np.empty((3, length), dtype=np.int64)
    is_pad = np.asarray(ids) == image_pad
    expected = sum(height * width for height, width in grids)
    if int(is_pad.sum()) != expected:
        raise ValueError(f"{int(is_pad.sum())} image pads, but the grids hold {expected} tokens")
    at = position = 0
    for height, width in grids:
        begin = at + int(np.argmax(is_pad[at:]))
        end = begin + height * width
        if not is_pad[begin:end].all():
            raise ValueError(f"the pads of an image are not contiguous at position {begin}")
        text = np.arange(begin - at)
        positions[:, at:begin] = position + text
        position += begin - at
        rows, columns = np.divmod(np.arange(height * width), width)
        positions[0, begin:end] = position
        positions[1, begin:end] = position + rows
        positions[2, begin:end] = position + columns
        position += max(height, width)
        at = end
    positions[:, at:] = position + np.arange(length - at)
    return positions
