"""Gradients and state of policy ranks, against one process with transformers and PEFT alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.policy import OPTIMIZER, TEMPERATURE, nonzero_adapter, policy_spec
from support.ranks import make_samples, mini_batch, run_on_ranks
from wayfinder.algo.loss import LossSpec
from wayfinder.algo.reduce import token_weights
from wayfinder.chat.vision import BANNED_BIAS, VisionProcessor, load_processor
from wayfinder.errors import MismatchError, UpdateError
from wayfinder.train.model import load_policy
from wayfinder.train.step import PolicyRank
from wayfinder.types import MicroBatch

# Plain policy gradient, KL and entropy at once: all three terms go through the one reduction.
LOSS = LossSpec(
    loss="reinforce",
    clip_low=0.2,
    clip_high=0.28,
    kl_coef=0.05,
    kl_kind="k2",
    entropy_coef=0.01,
    importance="token",
    importance_cap=2.0,
)
SPLITS = {
    "together": [[[0, 1, 2, 3, 4, 5]]],
    "alone": [[[0], [1], [2], [3], [4], [5]]],
    "uneven": [[[5, 0], [3], [2, 1, 4]]],
    "two ranks": [[[0, 1], [2]], [[5, 3], [4]]],
    "two ranks, one idle": [[[0, 1], [2, 3, 4, 5]], [[], []]],
    "three ranks": [[[2]], [[0, 5, 1]], [[3, 4]]],
}


class _Recording(PolicyRank):
    """Keeps the gradients that the optimizer would see."""

    def _clip(self) -> float:
        self.gradients = {
            name: parameter.grad.full_tensor().clone()
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }
        return super()._clip()


def rank_gradients(rank: int, model: str, split: list, adapter: dict, changes: dict) -> dict:
    samples, frames = make_samples(load_processor(model))
    weights = token_weights([s.num_loss_tokens for s in samples], "token_mean")
    ranks = _Recording(policy_spec(model, **changes), LOSS, OPTIMIZER, "cpu", 1e9)
    ranks.load_adapter_state(adapter)
    own = [[samples[i] for i in batch] for batch in split[rank]]
    ranks.update(
        [mini_batch(own, samples, weights.per_sequence, weights.global_denominator)], frames, 1e-3
    )
    return {name: g.numpy() for name, g in ranks.gradients.items()}


def reference_gradients(model: str, adapter: dict) -> dict[str, np.ndarray]:
    """One sample at a time through transformers' own forward, loss written out."""
    policy = load_policy(policy_spec(model), ())
    parameters = dict(policy.named_parameters())
    for name, tensor in adapter.items():
        live = f"wrapped.{name}".replace(".weight", ".default.weight")
        parameters[live].data.copy_(tensor)
    processor = load_processor(model)
    vision = VisionProcessor(processor)
    samples, frames = make_samples(processor)
    batch = mini_batch([], samples, np.ones(len(samples)), 1.0)
    tokens = sum(s.num_loss_tokens for s in samples)
    total = torch.zeros(())
    for sample in samples:
        logprobs, entropies = _forward(policy.wrapped, vision, sample, frames)
        with torch.no_grad(), policy.wrapped.disable_adapter():
            reference, _ = _forward(policy.wrapped, vision, sample, frames)
        behavior = torch.from_numpy(sample.behavior_logprobs[sample.loss_mask])
        weight = (logprobs.detach() - behavior).exp().clamp(max=2.0)
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -weight * batch.advantages[sample.episode] * ratio
        loss = loss + 0.05 * 0.5 * (logprobs - reference) ** 2 - 0.01 * entropies
        total = total + loss.sum() / tokens
    total.backward()
    return {n: p.grad.numpy() for n, p in policy.named_parameters() if p.requires_grad}


def _forward(wrapped, vision, sample, frames):
    ids = torch.from_numpy(sample.ids)[None]
    pixels, grids = vision.patches([frames[name] for name in sample.frames])
    logits = wrapped(
        input_ids=ids,
        pixel_values=pixels,
        image_grid_thw=grids,
        mm_token_type_ids=(ids == vision.tokens.image_pad).int(),
        use_cache=False,
    ).logits[0]
    logits[:, list(vision.tokens.banned)] += BANNED_BIAS
    logprobs = torch.log_softmax(logits / TEMPERATURE, -1)
    where = torch.from_numpy(np.flatnonzero(sample.loss_mask))
    rows = logprobs[where - 1]
    chosen = rows.gather(1, ids[0, where, None])[:, 0]
    return chosen, -(rows.exp() * rows).sum(-1)


@pytest.fixture(scope="module")
def reference(tiny_model: Path):
    adapter = nonzero_adapter(str(tiny_model))
    return adapter, reference_gradients(str(tiny_model), adapter)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_gradient_is_that_of_one_process_for_any_split(
    tiny_model, reference, split, tmp_path, record_property
):
    adapter, expected = reference
    plan = SPLITS[split]
    results = run_on_ranks(
        len(plan), rank_gradients, (str(tiny_model), plan, adapter, {}), tmp_path
    )
    for gradients in results:
        assert gradients.keys() == expected.keys()
        for name, value in expected.items():
            scale = np.abs(value).max()
            assert scale > 0, f"{name} has no gradient: the check would compare nothing"
            record_property("error", float(np.abs(gradients[name] - value).max() / scale))
            np.testing.assert_allclose(gradients[name], value, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "split"),
    [
        ({"gradient_checkpointing": True}, "together"),
        ({"packing": True}, "together"),
        ({"packing": True, "attention": "eager"}, "together"),
        ({"packing": True}, "two ranks, one idle"),
    ],
)
def test_how_it_is_computed_changes_nothing(
    tiny_model, reference, changes, split, tmp_path, record_property
):
    adapter, expected = reference
    plan = SPLITS[split]
    results = run_on_ranks(
        len(plan), rank_gradients, (str(tiny_model), plan, adapter, changes), tmp_path
    )
    for name, value in expected.items():
        scale = np.abs(value).max()
        record_property("error", float(np.abs(results[0][name] - value).max() / scale))
        np.testing.assert_allclose(results[0][name], value, rtol=1e-4, atol=1e-5 * scale)


def round_trip(rank: int, model: str, directory: str, adapter: dict) -> list[float]:
    """Two updates, save, two more; against load and the same two more: distances of the ends."""
    from safetensors.torch import load_file

    from wayfinder.train.checkpoint import load_optimizer, save_policy

    samples, frames = make_samples(load_processor(model))
    weights = token_weights([s.num_loss_tokens for s in samples], "token_mean")
    own = [[samples[0], samples[1]], [samples[2]]] if rank == 0 else [[samples[3]], []]
    batch = mini_batch(own, samples, weights.per_sequence, weights.global_denominator)

    def ranks(seed: int) -> PolicyRank:
        return PolicyRank(policy_spec(model, seed=seed), LOSS, OPTIMIZER, "cpu", 1e9)

    first = ranks(3)
    first.load_adapter_state(adapter)
    for _ in range(2):
        first.update([batch], frames, 1e-3)
    tensors, config = first.adapter_state()
    moments, counts = first.optimizer_state()
    if rank == 0:
        save_policy(Path(directory), tensors, config, moments, counts)
    torch.distributed.barrier()
    second = ranks(99)  # other random weights: what is not restored cannot pass
    second.load_adapter_state(load_file(Path(directory) / "adapter_model.safetensors"))
    second.load_optimizer_state(*load_optimizer(Path(directory)))
    ends = []
    for policy in (first, second):
        for _ in range(2):
            policy.update([batch], frames, 1e-3)
        ends.append(policy.adapter_state()[0])
    return [float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0]]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_saved_and_loaded_ranks_go_on_as_if_nothing_happened(
    tiny_model, world, tmp_path, record_property
):
    adapter = nonzero_adapter(str(tiny_model))
    distances = run_on_ranks(
        world, round_trip, (str(tiny_model), str(tmp_path), adapter), tmp_path
    )[0]
    assert distances
    record_property("error", max(distances))
    assert max(distances) == 0.0


def reference_logprobs(rank: int, model: str, adapter_dir: str) -> tuple[float, float]:
    """Sum of log(policy / reference) at the start, and after one update."""
    samples, frames = make_samples(load_processor(model))
    weights = token_weights([s.num_loss_tokens for s in samples], "token_mean")
    policy = PolicyRank(policy_spec(model, adapter=adapter_dir), LOSS, OPTIMIZER, "cpu", 1e9)
    batches = [MicroBatch(tuple(samples))]
    start = float(np.abs(policy.score(batches, frames, 6)).max())
    batch = mini_batch([samples], samples, weights.per_sequence, weights.global_denominator)
    policy.update([batch], frames, 1e-3)
    return start, float(np.abs(policy.score(batches, frames, 6)).max())


@pytest.mark.slow
def test_reference_of_a_start_from_an_adapter_is_that_adapter(tiny_model, tmp_path):
    import json

    from safetensors.torch import save_file

    from wayfinder.train.model import adapter_config

    model = str(tiny_model)
    save_file(nonzero_adapter(model), tmp_path / "adapter_model.safetensors")
    config = adapter_config(load_policy(policy_spec(model), ()), model)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    ((start, later),) = run_on_ranks(1, reference_logprobs, (model, str(tmp_path)), tmp_path)
    assert start == 0.0
    assert later > 1e-3


def signal_and_none(rank: int, model: str) -> dict[str, float]:
    """How far the adapter moves in an update with momentum behind it, by what the update holds."""
    samples, frames = make_samples(load_processor(model))
    weights = token_weights([s.num_loss_tokens for s in samples], "token_mean")
    loss = LossSpec(loss="ppo_clip", clip_low=0.2, clip_high=0.28, importance="none")
    policy = PolicyRank(policy_spec(model), loss, OPTIMIZER, "cpu", 1e9)
    full = mini_batch([samples], samples, weights.per_sequence, weights.global_denominator)
    policy.update([full], frames, 1e-3)
    moved = {}
    for name, batch in {
        "no advantage": replace(full, advantages=np.zeros(6)),
        "no samples": replace(full, micro_batches=()),
        "signal": full,
    }.items():
        before = policy.adapter_state()[0]
        policy.update([batch], frames, 1e-3)
        after = policy.adapter_state()[0]
        moved[name] = max(float((after[k] - before[k]).abs().max()) for k in after)
    return moved


@pytest.mark.slow
def test_an_update_without_signal_moves_nothing(tiny_model, tmp_path):
    (moved,) = run_on_ranks(1, signal_and_none, (str(tiny_model),), tmp_path)
    assert moved["no advantage"] == moved["no samples"] == 0.0
    assert moved["signal"] > 0


def broken_gradient(rank: int, model: str) -> tuple[str, float]:
    """The error of an update whose gradient is NaN on one rank, and how far the adapter moved."""
    samples, frames = make_samples(load_processor(model))
    weights = token_weights([s.num_loss_tokens for s in samples], "token_mean")
    policy = PolicyRank(policy_spec(model), LOSS, OPTIMIZER, "cpu", 1e9)
    own = [samples[:3]] if rank == 0 else [samples[3:]]
    batch = mini_batch(own, samples, weights.per_sequence, weights.global_denominator)
    before = policy.adapter_state()[0]
    try:
        policy.update([replace(batch, advantages=np.full(6, np.nan))], frames, 1e-3)
    except UpdateError as error:
        after = policy.adapter_state()[0]
        return str(error), max(
            [float((after[k] - before[k]).abs().max()) for k in after], default=0
        )
    return "", 0.0


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_stops_every_rank_and_changes_nothing(tiny_model, tmp_path):
    for message, moved in run_on_ranks(2, broken_gradient, (str(tiny_model),), tmp_path):
        assert "norm is nan" in message
        assert moved == 0.0


def nan_mismatch(rank: int, model: str) -> str:
    """The error of an update in which the last rank's engine log-probs hold a NaN."""
    samples, frames = make_samples(load_processor(model))
    weights = token_weights([s.num_loss_tokens for s in samples], "token_mean")
    policy = PolicyRank(policy_spec(model), LOSS, OPTIMIZER, "cpu", 1e9)
    own = samples[:3] if rank == 0 else samples[3:]
    if rank == 1:
        broken = own[0].behavior_logprobs.copy()
        broken[np.flatnonzero(own[0].loss_mask)[1]] = np.nan
        own = [replace(own[0], behavior_logprobs=broken), *own[1:]]
    batch = mini_batch([own], samples, weights.per_sequence, weights.global_denominator)
    try:
        policy.update([batch], frames, 1e-3)
    except MismatchError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_nan_mismatch_on_one_rank_stops_every_rank(tiny_model, tmp_path):
    for message in run_on_ranks(2, nan_mismatch, (str(tiny_model),), tmp_path):
        assert "differ by inf" in message
