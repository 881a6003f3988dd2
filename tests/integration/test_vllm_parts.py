"""Parts of vLLM and our counterparts, without an engine: LoRA on a CPU, M-RoPE positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

HIDDEN, RANK, SLICES = 24, 4, (16, 8, 8)
ADAPTERS = [11, 12]  # ids in slots 0 and 1


def wrappers(requests: list[int], lengths: list[int], is_prefill: bool):
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from wayfinder.rollout.vllm_cpu import DenseLora

    rows = [r for r, length in zip(requests, lengths, strict=True) for _ in range(length)]
    mapping = LoRAMapping(tuple(rows), tuple(requests), is_prefill=is_prefill)
    for kind in (DenseLora, PunicaWrapperCPU):
        wrapper = kind(64, 8, "cpu")
        wrapper.update_metadata(mapping, ADAPTERS, len(ADAPTERS), 100)
        yield wrapper


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("requests", [[11, 11, 11], [12], [11, 12, 11]])
def test_equals_vllms_own_for_adapters(requests, is_prefill, dtype, record_property):
    lengths = [5, 3, 7][: len(requests)] if is_prefill else [1] * len(requests)
    dense, upstream = wrappers(requests, lengths, is_prefill)
    n = sum(lengths)
    x = random(n, HIDDEN, dtype=dtype, seed=1)
    a = tuple(random(2, 1, RANK, HIDDEN, dtype=dtype, seed=2 + i) for i in range(3))
    b = tuple(random(2, 1, size, RANK, dtype=dtype, seed=5 + i) for i, size in enumerate(SLICES))
    start = random(n, sum(SLICES), dtype=dtype, seed=9)
    found, expected = start.clone(), start.clone()
    dense.add_lora_linear(found, x, a, b, 0.5, SLICES)
    upstream.add_lora_linear(expected, x, a, b, 0.5, SLICES)
    assert not torch.allclose(expected, start, atol=0.1)
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    if dtype is torch.float32:
        record_property("error", float((found - expected).abs().max()))
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)

    low = random(n, RANK, dtype=dtype, seed=10)
    found, expected = start[:, :16].clone(), start[:, :16].clone()
    dense.add_lora_embedding(found, low, b[0])
    upstream.add_lora_embedding(expected, low, b[0])
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
def test_tokens_without_an_adapter_stay_as_they_are():
    dense, _ = wrappers([11, 0, 12], [2, 3, 1], True)
    x = random(6, HIDDEN, dtype=torch.float32, seed=1)
    a = random(2, 1, RANK, HIDDEN, dtype=torch.float32, seed=2)
    b = random(2, 1, 16, RANK, dtype=torch.float32, seed=3)
    y = torch.zeros(6, 16)
    dense.add_lora_linear(y, x, (a,), (b,), 2.0, (16,))
    slots = [0, 0, None, None, None, 1]
    for row, slot in enumerate(slots):
        expected = torch.zeros(16) if slot is None else 2 * (b[slot, 0] @ (a[slot, 0] @ x[row]))
        torch.testing.assert_close(y[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("grids", [[], [(9, 9)], [(2, 5), (4, 1), (3, 3)], [(7, 1), (1, 7)]])
def test_positions_equal_those_of_vllms_model(grids, record_property):
    from types import SimpleNamespace

    from transformers import Qwen3VLConfig
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

    from wayfinder.batch.positions import mrope_positions

    config = Qwen3VLConfig(vision_config={"spatial_merge_size": 2})
    pad = config.image_token_id
    ids: list[int] = []
    features = []
    for number, (height, width) in enumerate(grids):
        ids += [1] * (4 + number)
        grid = SimpleNamespace(data=torch.tensor([1, 2 * height, 2 * width]))
        features.append(
            SimpleNamespace(
                modality="image",
                mm_position=SimpleNamespace(offset=len(ids)),
                data={"image_grid_thw": grid},
            )
        )
        ids += [pad] * (height * width)
    ids += [1] * 6
    theirs, _ = Qwen3VLForConditionalGeneration._get_mrope_input_positions(ids, features, config)
    ours = mrope_positions(np.array(ids), grids, pad)
    record_property("error", float(np.abs(ours - theirs.numpy()).max()))
    np.testing.assert_array_equal(ours, theirs.numpy())
