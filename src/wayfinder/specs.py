"""The composed configuration, cut into what each stage takes: plain values, no config object."""

from __future__ import annotations

import os
from pathlib import Path

from wayfinder.algo.filters import drop_is_exact
from wayfinder.algo.loss import LossSpec
from wayfinder.batch.plan import PlanSpec
from wayfinder.chat.vision import VisionTokens
from wayfinder.config.places import locate, model_source
from wayfinder.config.schema import Config
from wayfinder.rollout.episode import EpisodeSpec
from wayfinder.rollout.generator import EngineSpec
from wayfinder.runtime.cluster import ClusterSpec
from wayfinder.runtime.engine_worker import EnvSpec
from wayfinder.seeding import derive_seed
from wayfinder.train.model import PolicySpec
from wayfinder.train.step import OptimizerSpec


def cluster_spec(config: Config) -> ClusterSpec:
    cluster = config.cluster
    if cluster.address is None:
        share = len(os.sched_getaffinity(0)) // cluster.slots
    else:  # the slots lie on other machines, or other jobs use this one too
        share = int(cluster.cpus_per_slot)
    return ClusterSpec(
        device=str(cluster.device),
        slots=cluster.slots,
        threads_per_slot=cluster.threads_per_slot or max(1, share),
        cpus_per_slot=cluster.cpus_per_slot,
        address=cluster.address,
        start_timeout_s=cluster.start_timeout_s,
        step_timeout_s=cluster.step_timeout_s,
        object_store_mib=cluster.object_store_mib,
    )


def policy_spec(config: Config) -> PolicySpec:
    lora = config.model.lora
    return PolicySpec(
        model=model_source(config.model.path),
        dtype=config.model.dtype,
        attention=config.model.attention,
        gradient_checkpointing=config.model.gradient_checkpointing,
        packing=config.algorithm.packing,
        lora_rank=lora.rank,
        lora_alpha=lora.alpha,
        rslora=lora.rslora,
        lora_targets=tuple(lora.targets),
        adapter=None if config.model.adapter is None else str(locate(config.model.adapter)),
        temperature=config.rollout.temperature,
        seed=derive_seed(config.seed, "adapter"),
    )


def loss_spec(config: Config) -> LossSpec:
    algorithm = config.algorithm
    return LossSpec(
        loss=str(algorithm.loss),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        kl_coef=algorithm.kl_coef,
        kl_kind=str(algorithm.kl_kind),
        kl_placement=str(algorithm.kl_placement),
        entropy_coef=algorithm.entropy_coef,
        importance=str(algorithm.importance),
        importance_cap=algorithm.importance_cap,
        reduction=str(algorithm.loss_reduction),
        constant_length=_constant_length(config),
    )


def optimizer_spec(config: Config) -> OptimizerSpec:
    optimizer = config.algorithm.optimizer
    return OptimizerSpec(
        lr=optimizer.lr,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
    )


def plan_spec(config: Config) -> PlanSpec:
    algorithm = config.algorithm
    return PlanSpec(
        advantage=str(algorithm.advantage),
        group_filter=str(algorithm.filter),
        drop_is_exact=drop_is_exact(str(algorithm.advantage), loss_spec(config)),
        reduction=str(algorithm.loss_reduction),
        constant_length=_constant_length(config),
        mini_batches=algorithm.mini_batches,
        micro_batch_tokens=algorithm.micro_batch_tokens,
        packing=algorithm.packing,
        num_ranks=config.cluster.slots,
    )


def engine_specs(
    config: Config, vision: VisionTokens, stop_ids: tuple[int, ...]
) -> list[EngineSpec]:
    """One spec a slot; engines differ in their seed alone."""
    rollout = config.rollout
    history = config.history
    return [
        EngineSpec(
            model=model_source(config.model.path),
            dtype=config.model.dtype,
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            enforce_eager=rollout.enforce_eager,
            enable_prefix_caching=rollout.enable_prefix_caching,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            kv_cache_gib=rollout.kv_cache_gib,
            threads=cluster_spec(config).threads_per_slot,
            # The probe shows two images whatever the history.
            max_images=max(2, config.env.max_turns if history is None else history),
            lora_rank=config.model.lora.rank,
            banned_ids=vision.banned,
            stop_ids=stop_ids,
            seed=derive_seed(config.seed, "engine", slot, bits=31),
            request_timeout_s=rollout.request_timeout_s,
            sleep=str(config.cluster.device) == "cuda",
        )
        for slot in range(config.cluster.slots)
    ]


def stop_ids(config: Config) -> tuple[int, ...]:
    """Every id that ends a reply, by the model's own generation config."""
    from transformers import GenerationConfig

    ids = GenerationConfig.from_pretrained(model_source(config.model.path)).eos_token_id
    return tuple(ids) if isinstance(ids, list) else (ids,)


def env_spec(config: Config) -> EnvSpec:
    return EnvSpec(
        env_id=config.env.id,
        kind=str(config.env.kind),
        action_format=str(config.env.action_format),
        prompt_role=str(config.env.prompt_role),
    )


def episode_spec(
    config: Config, stream: str, step: int, policy_version: int, temperature: float | None = None
) -> EpisodeSpec:
    """How the episodes of one rollout are run; `stream` separates training from evaluations."""
    env = config.env
    own_maze = str(env.kind) == "maze2d"
    return EpisodeSpec(
        max_turns=env.max_turns,
        history=config.history,
        max_tokens=config.rollout.max_tokens,
        max_model_len=config.rollout.max_model_len,
        temperature=config.rollout.temperature if temperature is None else temperature,
        action_format=str(env.action_format),
        strict_actions=own_maze,
        end_on_parse_failure=str(env.on_parse_failure) == "end",
        end_on_reply_cut=str(env.on_reply_cut) == "end",
        task_reward=env.reward.task,
        format_reward=env.reward.format,
        env_timeout_s=None if own_maze else env.step_timeout_s,
        run_seed=config.seed,
        stream=stream,
        step=step,
        policy_version=policy_version,
    )


def adapter_root(config: Config, run_adapters: Path) -> Path:
    """Where this run publishes its adapters: a directory of its own below `sync.dir`."""
    if config.sync.dir is None:
        return run_adapters
    return Path(config.sync.dir) / run_adapters.parent.relative_to(
        Path(config.paths.root).expanduser().absolute()
    )


def _constant_length(config: Config) -> float | None:
    constant = str(config.algorithm.loss_reduction) == "constant"
    return float(config.algorithm.constant_length) if constant else None
