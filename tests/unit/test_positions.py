"""M-RoPE positions against transformers' own and against a reference that takes image by image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLConfig, Qwen3VLModel

from wayfinder.batch.positions import mrope_positions

PAD = 9
IMAGES = {
    "none": [],
    "one": [(3, 3)],
    "two": [(2, 5), (4, 1)],
    "five": [(3, 3), (1, 7), (7, 1), (2, 2), (1, 1)],
}


def sequence(texts: list[int], grids: list[tuple[int, int]]) -> np.ndarray:
    """Ids with `texts[i]` text tokens before image i; the last text stands behind all images."""
    ids: list[int] = []
    for text, grid in zip(texts, [*grids, (0, 0)], strict=True):
        ids += [100 + len(ids) + i for i in range(text)]
        ids += [PAD] * (grid[0] * grid[1])
    return np.array(ids, dtype=np.int64)


def reference(texts: list[int], grids: list[tuple[int, int]]) -> np.ndarray:
    """Token by token, straight from the definition."""
    rows: list[tuple[int, int, int]] = []
    at = 0
    for text, grid in zip(texts, [*grids, None], strict=True):
        for _ in range(text):
            rows.append((at, at, at))
            at += 1
        if grid is not None:
            rows += [(at, at + y, at + x) for y in range(grid[0]) for x in range(grid[1])]
            at += max(grid)
    return np.array(rows, dtype=np.int64).reshape(-1, 3).T


def transformers_positions(ids: np.ndarray, grids: list[tuple[int, int]], merge: int):
    """What the model itself computes; its parameters are never made."""
    config = Qwen3VLConfig(
        text_config={"num_hidden_layers": 1},
        vision_config={"depth": 1, "spatial_merge_size": merge},
    )
    with torch.device("meta"):
        model = Qwen3VLModel(config)
    tokens = torch.from_numpy(ids)[None]
    patches = torch.tensor([[1, h * merge, w * merge] for h, w in grids]) if grids else None
    positions, _ = model.get_rope_index(
        tokens, mm_token_type_ids=(tokens == PAD).int(), image_grid_thw=patches
    )
    return positions[:, 0].numpy()


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("name", IMAGES)
def test_equal_to_the_models_own_positions(name, merge, record_property):
    grids = IMAGES[name]
    texts = [*[4, 1, 6, 2, 3, 5][: len(grids)], 7]
    ids = sequence(texts, grids)
    ours = mrope_positions(ids, grids, PAD)
    assert ours.dtype == np.int64
    assert ours.shape == (3, len(ids))
    theirs = transformers_positions(ids, grids, merge)
    record_property("error", float(np.abs(ours - theirs).max()))
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours, reference(texts, grids))


def test_a_literal_example():
    # Two text tokens, an image of 2 x 3 tokens, one text token.
    ids = np.array([7, 7, PAD, PAD, PAD, PAD, PAD, PAD, 7])
    assert mrope_positions(ids, [(2, 3)], PAD).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize("texts", [[3, 0, 2], [0, 0, 0], [0, 0, 4], [5, 0, 0]])
def test_two_images_that_touch_take_a_grid_each(texts):
    grids = [(2, 4), (3, 2)]
    found = mrope_positions(sequence(texts, grids), grids, PAD)
    np.testing.assert_array_equal(found, reference(texts, grids))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_mixture_of_text_and_images(data):
    grids = data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=5))
    texts = [data.draw(st.integers(0, 4)) for _ in range(len(grids) + 1)]
    found = mrope_positions(sequence(texts, grids), grids, PAD)
    np.testing.assert_array_equal(found, reference(texts, grids))


@pytest.mark.parametrize(
    ("grids", "pads", "tokens"),
    [([], 8, 0), ([(2, 3)], 8, 6), ([(3, 3)], 8, 9), ([(2, 4), (1, 1)], 8, 9)],
)
def test_pads_and_grids_must_match(grids, pads, tokens):
    ids = sequence([2, 3], [(2, 4)])
    with pytest.raises(ValueError, match=f"{pads} image pads, but the grids hold {tokens} tokens"):
        mrope_positions(ids, grids, PAD)


def test_a_grid_without_pads_is_refused():
    with pytest.raises(ValueError, match="0 image pads"):
        mrope_positions(np.array([1, 2, 3]), [(1, 1)], PAD)


@pytest.mark.parametrize("grids", [[(2, 4)], [(1, 5), (1, 3)]])
def test_an_image_cannot_be_torn_apart(grids):
    ids = sequence([1, 2, 1], [(1, 3), (1, 5)])
    with pytest.raises(ValueError, match="not contiguous at position 1"):
        mrope_positions(ids, grids, PAD)
