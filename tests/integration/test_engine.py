"""The real engine against the real trainer: what is sampled is what is trained.

A random tiny model, with adapters whose matrices are all nonzero, so that nothing agrees by chance.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from support.policy import OPTIMIZER, nonzero_adapter, policy_spec
from wayfinder.algo.loss import LossSpec
from wayfinder.algo.reduce import token_weights
from wayfinder.batch.plan import MiniBatch
from wayfinder.batch.samples import episode_samples
from wayfinder.chat.render import ChatRenderer
from wayfinder.chat.vision import VisionProcessor, load_processor
from wayfinder.envs.protocol import make_env
from wayfinder.errors import InvariantError
from wayfinder.rollout.episode import EpisodeRun, EpisodeSpec, Place
from wayfinder.rollout.generator import EngineSpec, ReplyRequest
from wayfinder.rollout.groups import run_free, run_lockstep
from wayfinder.runtime.adapter_sync import publish
from wayfinder.train.step import PolicyRank
from wayfinder.types import MicroBatch, Outcome, Task, frame_hash

pytestmark = pytest.mark.slow
LOSS = LossSpec(loss="ppo_clip", clip_low=0.2, clip_high=0.28, importance="token")
RANK = 4
TOLERANCE = 1e-4


class Bench:
    """One engine, one trainer, one loop; the adapter versions count up over the tests."""

    def __init__(self, model: str, root: Path, batched_tokens: int = 2048, **lora) -> None:
        lora = {"lora_rank": RANK} | lora
        self.rank = lora["lora_rank"]
        self.model = model
        self.root = root
        self.loop = asyncio.new_event_loop()
        self.processor = load_processor(model)
        self.vision = VisionProcessor(self.processor)
        self.env = make_env("maze_2d/easy", "maze2d")
        self.env.reset(0)
        self.prompt = self.env.prompt("tuple")
        self.renderer = ChatRenderer(self.processor.tokenizer, self.vision.tokens, self.prompt)
        self.trainer = PolicyRank(policy_spec(model, **lora), LOSS, OPTIMIZER, "cpu", 1e9)
        self.version = 0
        self.batched_tokens = batched_tokens
        self.engine = self.run(self._start())

    def run(self, work):
        return self.loop.run_until_complete(work)

    async def _start(self):
        from wayfinder.rollout.vllm_engine import VllmEngine

        return VllmEngine(
            EngineSpec(
                model=self.model,
                dtype="float32",
                max_model_len=2048,
                max_num_seqs=64,
                max_num_batched_tokens=self.batched_tokens,
                enforce_eager=True,
                enable_prefix_caching=True,
                gpu_memory_utilization=0.4,
                kv_cache_gib=1,
                threads=2,
                max_images=8,
                lora_rank=self.rank,
                banned_ids=self.vision.tokens.banned,
                stop_ids=(self.renderer.end_of_turn, self.processor.tokenizer.pad_token_id),
                seed=5,
                request_timeout_s=120,
                sleep=False,
            )
        )

    def close(self) -> None:
        resources = self.engine._engine.engine_core.resources
        self.run(self.engine.shutdown())
        assert resources.output_socket.closed
        assert resources.input_socket.closed
        self.loop.close()

    def serve(self, adapter: dict | None = None) -> None:
        """Publish the trainer's adapter (after taking over `adapter`, if given) and load it."""
        if adapter is not None:
            self.trainer.load_adapter_state(adapter)
        self.version += 1
        tensors, config = self.trainer.adapter_state()
        published = publish(
            self.root, self.version, tensors, config, base_model=self.model, step=self.version
        )
        self.run(self.engine.load_adapter(published.version, Path(published.path)))

    def episodes(self, seeds, history=None, max_turns=3, schedule=run_lockstep, **changes):
        frames: dict[str, np.ndarray] = {}
        values = {
            "max_turns": max_turns,
            "history": history,
            "max_tokens": 12,
            "max_model_len": 2048,
            "temperature": 0.7,
            "action_format": "tuple",
            "strict_actions": True,
            "end_on_parse_failure": False,
            "end_on_reply_cut": False,
            "task_reward": 1.0,
            "format_reward": 0.0,
            "env_timeout_s": None,
            "run_seed": 0,
            "stream": "train",
            "step": 0,
            "policy_version": self.version,
        }
        spec = EpisodeSpec(**values | changes)
        runs = [
            EpisodeRun(
                Place(Task("maze_2d/easy", seed, seed), member),
                _Wandering(),
                spec,
                lambda _: self.renderer,
                self.vision,
                lambda ids: self.processor.tokenizer.decode(ids, skip_special_tokens=True),
                frames,
                engine=0,
            )
            for seed in seeds
            for member in range(2)
        ]
        self.run(schedule(runs, self.engine, frames))
        return [run.finish() for run in runs], frames

    def differences(self, episodes, frames) -> np.ndarray:
        """Trainer minus engine log-prob of every sampled token."""
        samples = [s for i, e in enumerate(episodes) for s in episode_samples(e, i)]
        self.trainer._encode([MicroBatch(tuple(samples))], frames)
        (trainer,) = self.trainer._logprobs([MicroBatch(tuple(samples))])
        engine = np.concatenate([s.behavior_logprobs[s.loss_mask] for s in samples])
        assert len(engine) == sum(e.num_sampled_tokens for e in episodes) > 0
        return trainer.numpy() - engine

    def update(self, episodes, frames) -> None:
        samples = [s for i, e in enumerate(episodes) for s in episode_samples(e, i)]
        lengths = np.array([e.num_sampled_tokens for e in episodes])
        weights = token_weights(lengths, "token_mean")
        batch = MiniBatch(
            micro_batches=(MicroBatch(tuple(samples)),),
            advantages=np.where(np.arange(len(episodes)) % 2, 1.0, -1.0),
            sequence_weight=weights.per_sequence,
            sequence_length=lengths,
            global_denominator=weights.global_denominator,
        )
        self.trainer.update([batch], frames, 1e-2)


class _Wandering:
    """The maze with an agent of its own: a random model never writes a legal move, but the frames
    of an episode must differ for the checks to see images at all."""

    def __init__(self) -> None:
        self._env = make_env("maze_2d/easy", "maze2d")
        self._turn = 0

    def reset(self, seed):
        return self._env.reset(seed)

    def step(self, action, parse_error=None):
        self._turn += 1
        for direction in np.roll(range(4), self._turn):
            result = self._env.step(f"('move', {direction})")
            if result.executed:
                return result
        return result

    def prompt(self, action_format):
        return self._env.prompt(action_format)

    def close(self):
        self._env.close()


@pytest.fixture(scope="module")
def bench(tiny_model, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(root / "store"), 1), rank=0, world_size=1
    )
    bench = Bench(str(tiny_model), root)
    yield bench
    bench.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("history", [None, 1, 2])
def test_logprobs_agree_before_and_after_two_updates(bench, history, record_property):
    """Three turns, three frames; without an adapter's effect, with one, and with a trained one."""
    bench.serve({name: t * 0 for name, t in nonzero_adapter(bench.model).items()})
    episodes, frames = bench.episodes([0, 1], history)
    assert all(len(e.turns) == 3 and len({t.frames for t in e.turns}) > 1 for e in episodes)
    assert np.abs(bench.differences(episodes, frames)).max() < TOLERANCE

    bench.trainer.load_adapter_state(nonzero_adapter(bench.model))
    # The adapter does something, so the next comparison can fail.
    assert np.abs(bench.differences(episodes, frames)).max() > 1e-2
    bench.serve()
    episodes, frames = bench.episodes([0, 1], history)
    assert np.abs(bench.differences(episodes, frames)).max() < TOLERANCE

    for _ in range(2):
        bench.update(episodes, frames)
    assert np.abs(bench.differences(episodes, frames)).max() > 1e-3
    bench.serve()
    episodes, frames = bench.episodes([0, 1], history)
    worst = float(np.abs(bench.differences(episodes, frames)).max())
    record_property("error", worst)
    assert worst < TOLERANCE


def test_another_image_gives_other_logprobs(bench):
    bench.serve(nonzero_adapter(bench.model))
    episodes, frames = bench.episodes([0])
    noise = np.random.default_rng(0).integers(0, 256, (225, 225, 3), dtype=np.uint8)
    second = episodes[0].turns[1].frames[0]
    bench.trainer.forget_frames()
    difference = np.abs(bench.differences(episodes[:1], frames | {second: noise}))
    bench.trainer.forget_frames()
    first = len(episodes[0].turns[0].reply_ids)
    assert difference[:first].max() < TOLERANCE
    assert difference[first:].max() > 1e-3


def test_lockstep_repeats_bit_for_bit(bench):
    bench.serve(nonzero_adapter(bench.model))
    runs = []
    for _ in range(2):
        bench.run(bench.engine._engine.reset_prefix_cache())
        episodes, _ = bench.episodes(range(8), history=1)
        runs.append([(t.reply_ids, t.logprobs) for e in episodes for t in e.turns])
    assert runs[0] == runs[1]
    other, _ = bench.episodes(range(8), history=1, run_seed=1)
    assert [t.reply_ids for e in other for t in e.turns] != [ids for ids, _ in runs[0]]


def test_both_schedules_sample_the_same_replies(bench):
    bench.serve(nonzero_adapter(bench.model))
    lockstep, _ = bench.episodes(range(4))
    free, _ = bench.episodes(range(4), schedule=run_free)
    for a, b in zip(lockstep, free, strict=True):
        assert [t.reply_ids for t in a.turns] == [t.reply_ids for t in b.turns]
        for x, y in zip(a.turns, b.turns, strict=True):
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=TOLERANCE)


def test_a_prompt_by_parts_samples_the_same_replies(bench, tmp_path, record_property):
    """A step of 96 tokens has room for a part of a prompt, and for one image."""
    parts = Bench(bench.model, tmp_path, batched_tokens=96)
    try:
        for each in (bench, parts):
            each.serve(nonzero_adapter(bench.model))
        whole, _ = bench.episodes(range(4))
        first, _ = parts.episodes(range(4))
        parts.run(parts.engine.forget())
        episodes, frames = parts.episodes(range(4))
        told = [
            [(t.reply_ids, t.logprobs) for e in es for t in e.turns] for es in (first, episodes)
        ]
        assert told[0] == told[1]  # bit for bit
        for a, b in zip(whole, episodes, strict=True):
            assert [t.reply_ids for t in a.turns] == [t.reply_ids for t in b.turns]
        worst = float(np.abs(parts.differences(episodes, frames)).max())
        record_property("error", worst)
        assert worst < TOLERANCE
    finally:
        parts.close()


def test_the_members_of_a_group_differ(bench):
    bench.serve(nonzero_adapter(bench.model))
    episodes, _ = bench.episodes([3])
    assert episodes[0].turns[0].reply_ids != episodes[1].turns[0].reply_ids


def test_later_turns_come_from_the_prefix_cache(bench):
    bench.serve(nonzero_adapter(bench.model))
    episodes, _ = bench.episodes([5], max_turns=4)
    last = episodes[0].turns[-1]
    assert last.cached_tokens > 128  # more than one block, or the test tested nothing


def test_a_new_adapter_does_not_answer_from_the_old_ones_cache(bench):
    """Same prompt, in the cache from the previous adapter: the engine must not reuse its blocks."""
    bench.serve(nonzero_adapter(bench.model))
    bench.episodes([7])
    doubled = {n: t * (2 if "lora_B" in n else 1) for n, t in nonzero_adapter(bench.model).items()}
    bench.serve(doubled)
    episodes, frames = bench.episodes([7])
    assert np.abs(bench.differences(episodes, frames)).max() < TOLERANCE
    assert bench.run(bench.engine.loaded()) == [bench.version]


def test_logprobs_do_not_depend_on_what_else_runs(bench):
    bench.serve(nonzero_adapter(bench.model))
    together, _ = bench.episodes(range(16), max_turns=1, history=1)
    alone, _ = bench.episodes([9], max_turns=1, history=1)
    match = [e for e in together if e.task.seed == 9]
    for a, b in zip(match, alone, strict=True):
        assert a.turns[0].reply_ids == b.turns[0].reply_ids
        np.testing.assert_allclose(a.turns[0].logprobs, b.turns[0].logprobs, atol=TOLERANCE)


def test_vision_tokens_are_never_sampled(bench):
    """A random model would sample one of 4 banned ids about once in 115 tokens."""
    bench.serve()
    episodes, _ = bench.episodes(range(24), max_turns=2, history=1)
    ids = [i for e in episodes for t in e.turns for i in t.reply_ids]
    assert len(ids) > 700
    assert not set(ids) & set(bench.vision.tokens.banned)


def test_a_prompt_that_the_engine_reads_differently_stops_the_run(bench):
    frame = make_env("maze_2d/easy", "maze2d").reset(1)
    name = frame_hash(frame)
    shown = bench.renderer.observation("", (80,))  # one pad too few
    request = ReplyRequest("odd", (*bench.renderer.prefix_ids, *shown.opening), (name,), 0, 4, 0.7)
    with pytest.raises(InvariantError, match="odd"):
        bench.run(bench.engine.reply(request, {name: frame}))


def test_the_context_limit_ends_an_episode_in_order(bench):
    episodes, _ = bench.episodes([0], max_turns=30, max_model_len=400)
    assert {e.outcome for e in episodes} == {Outcome.CONTEXT_LIMIT}
    assert all(1 < len(e.turns) < 30 for e in episodes)


def test_a_probe_equals_the_trainers(bench, record_property):
    from wayfinder.runtime.workers import Probe

    bench.serve(nonzero_adapter(bench.model))
    episodes, frames = bench.episodes([2])
    turn = episodes[0].turns[0]
    ids = (*episodes[0].prefix_ids, *turn.opening_ids, *turn.reply_ids)
    probe = Probe(ids, turn.frames, {turn.frames[0]: frames[turn.frames[0]]})
    engine = bench.run(bench.engine.probe(probe.ids, probe.frames, probe.pixels))
    trainer = bench.trainer.probe(probe.micro_batch(), probe.pixels)
    assert len(engine) == len(ids) - 1
    record_property("error", float(np.abs(np.array(engine) - trainer).max()))
    np.testing.assert_allclose(engine, trainer, atol=TOLERANCE)


@pytest.mark.parametrize(
    "lora",
    [
        {"lora_rank": 12},
        {"lora_rank": 48, "lora_alpha": 48},
        {"lora_rank": 24, "rslora": True, "lora_alpha": 3},
    ],
    ids=["12", "48", "24 rank-stabilised"],
)
def test_ranks_and_scales_mean_the_same_on_both_sides(bench, tmp_path, lora, record_property):
    """vLLM lists 8, 16, 32, 64: another rank is served in the next of them."""
    other = Bench(bench.model, tmp_path, **lora)
    try:
        other.serve(nonzero_adapter(bench.model, **lora))
        episodes, frames = other.episodes([3])
        worst = float(np.abs(other.differences(episodes, frames)).max())
        record_property("error", worst)
        assert worst < TOLERANCE
        nothing = {n: t * 0 for n, t in nonzero_adapter(bench.model, **lora).items()}
        other.trainer.load_adapter_state(nothing)
        assert np.abs(other.differences(episodes, frames)).max() > 1e-2
    finally:
        other.close()


def test_an_adapter_that_fits_no_module_is_noticed(bench):
    """Keys of another model class. vLLM may load such a file and apply nothing of it."""
    bench.serve(nonzero_adapter(bench.model))
    episodes, frames = bench.episodes([2])
    turn = episodes[0].turns[0]
    ids = (*episodes[0].prefix_ids, *turn.opening_ids, *turn.reply_ids)
    probe = (ids, turn.frames, {turn.frames[0]: frames[turn.frames[0]]})
    good = bench.run(bench.engine.probe(*probe))
    tensors, config = bench.trainer.adapter_state()
    renamed = {name.replace(".language_model.", ".other."): t for name, t in tensors.items()}
    assert renamed.keys().isdisjoint(tensors)
    bench.version += 1
    published = publish(
        bench.root, bench.version, renamed, config, base_model=bench.model, step=bench.version
    )
    bench.run(bench.engine.load_adapter(published.version, Path(published.path)))
    answer = bench.run(bench.engine.probe(*probe))
    assert np.abs(np.subtract(answer, good)).max() > 1e-2
