"""Relations between keys: what types and ranges cannot say. Everything that is wrong is reported at
once, and nothing here imports torch, ray or vllm, so a refusal comes within a second.

To add a rule: write a generator named like the sentence that must hold, yielding one `Violation`
for each way in which it does not, and list it under the tasks that need it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from wayfinder.choices import GroupFilter, KlKind, KlPlacement, LossKind
from wayfinder.config import bounds, places, sft_rules
from wayfinder.config.schema import Config, Device, EnvKind, TaskKind
from wayfinder.config.violation import Violation, closest, report
from wayfinder.errors import ConfigError

Rule = Callable[[Config], Iterator[Violation]]

MAZES = tuple(sft_rules.CELLS)
TEXT_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DTYPES = ("float32", "bfloat16")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
GREATEST_LORA_RANK = 512
"""vLLM serves no adapter of a greater rank."""
LEAST_OBSERVATION_TOKENS = 96
"""Less is not to be had: 81 image tokens of a 9x9 maze and the marks of a message around them."""

_NOT_TEXT = {
    "visual": "the engine applies adapters to the language model only: one of the vision tower "
    "would be trained and never used",
    "lm_head": "the engine does not serve adapters of the LM head",
    "embed_tokens": "the engine does not serve adapters of the embeddings",
    "all-linear": "it also matches the vision tower and the LM head",
}
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):\d+")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


def check(config: Config) -> None:
    """Raise one `ConfigError` that lists every violation; return if there is none."""
    found = violations(config)
    if found:
        raise ConfigError(report(found))


def violations(config: Config) -> list[Violation]:
    """Everything that keeps this configuration from running its task, in the order of the rules."""
    ranges = {
        TaskKind.train: bounds.ALWAYS + bounds.TRAIN,
        TaskKind.evaluate: bounds.ALWAYS + bounds.EVALUATE,
        TaskKind.sft: sft_rules.BOUNDS,
        TaskKind.report: (),
        TaskKind.play: bounds.ALWAYS + bounds.PLAY,
    }
    found = list(bounds.broken(config, ranges[config.task]))
    # A key that is out of its range has had its say; a relation would only repeat it.
    reported = {violation.key for violation in found}
    for rule in RULES[config.task]:
        found += [violation for violation in rule(config) if violation.key not in reported]
    return found


def group_relative_advantages_need_two_episodes(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.advantage.is_group_relative and algorithm.group_size < 2:
        yield Violation(
            "algorithm.group_size",
            f"2 or more with algorithm.advantage={algorithm.advantage}, which compares the "
            "episodes of one maze",
            algorithm.group_size,
            "Set algorithm.group_size=8, or algorithm.advantage=reinforce_pp",
        )


def mini_batches_divide_the_groups(config: Config) -> Iterator[Violation]:
    tasks, parts = config.algorithm.tasks_per_step, config.algorithm.mini_batches
    if parts >= 1 and tasks >= 1 and tasks % parts:
        below, above = tasks - tasks % parts, tasks - tasks % parts + parts
        choices = " or ".join(str(count) for count in (below, above) if count > 0)
        divisors = ", ".join(str(d) for d in range(1, tasks + 1) if tasks % d == 0)
        yield Violation(
            "algorithm.tasks_per_step",
            f"a multiple of algorithm.mini_batches={parts}, because a group is never split",
            tasks,
            f"Set algorithm.tasks_per_step={choices}, or algorithm.mini_batches to one of "
            f"{divisors}",
        )


def lora_adapts_text_layers_only(config: Config) -> Iterator[Violation]:
    key, targets = "model.lora.targets", config.model.lora.targets
    everything = f"Set model.lora.targets=[{','.join(TEXT_LINEARS)}] or fewer of them"
    if not targets:
        yield Violation(key, "one or more layer names", "[]", everything)
    for target in targets:
        if target in TEXT_LINEARS:
            continue
        reason = next((why for part, why in _NOT_TEXT.items() if part in target), None)
        mend = closest(target, TEXT_LINEARS, everything) if reason is None else everything
        yield Violation(
            key,
            f"names out of {', '.join(TEXT_LINEARS)}" + (f" ({reason})" if reason else ""),
            target,
            mend,
        )
    for target in sorted({name for name in targets if targets.count(name) > 1}):
        yield Violation(key, "each name once", target, f"Leave {target} out once")


def lora_rank_can_be_served(config: Config) -> Iterator[Violation]:
    rank = config.model.lora.rank
    if rank > GREATEST_LORA_RANK:
        yield Violation(
            "model.lora.rank",
            f"at most {GREATEST_LORA_RANK}, the greatest rank that the engine serves",
            rank,
            "Set model.lora.rank=32",
        )


def dtype_and_attention_are_known(config: Config) -> Iterator[Violation]:
    for key, value, names in (
        ("model.dtype", config.model.dtype, DTYPES),
        ("model.attention", config.model.attention, ATTENTIONS),
    ):
        if value not in names:
            mend = closest(value, names, f"Set {key}={names[0]}")
            yield Violation(key, f"one of {', '.join(names)}", value, mend)
    if config.model.attention == "flash_attention_2" and config.cluster.device is Device.cpu:
        yield Violation(
            "model.attention",
            "sdpa or eager with cluster.device=cpu",
            config.model.attention,
            "Set model.attention=sdpa",
        )


def environment_is_known(config: Config) -> Iterator[Violation]:
    if config.env.kind is EnvKind.maze2d and config.env.id not in MAZES:
        yield Violation(
            "env.id",
            f"one of {', '.join(MAZES)} with env.kind=maze2d",
            config.env.id,
            closest(config.env.id, MAZES, "Set env.id=maze_2d/easy, or env=visgym for its tasks"),
        )


def history_is_full_or_a_number_of_turns(config: Config) -> Iterator[Violation]:
    history = config.env.history
    is_count = isinstance(history, int) and not isinstance(history, bool) and history >= 1
    if history != "full" and not is_count:
        yield Violation(
            "env.history",
            "full, or the number of recent turns that the model sees, 1 or more",
            history,
            "Set env.history=full or env.history=1",
        )


def sampling_is_from_the_policy_itself(config: Config) -> Iterator[Violation]:
    for name, neutral in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
        value = getattr(config.rollout, name)
        if value != neutral:
            yield Violation(
                f"rollout.{name}",
                f"{neutral}: with another value the engine samples from a distribution that the "
                "trainer does not compute",
                value,
                f"Set rollout.{name}={neutral}, and use rollout.temperature to sharpen",
            )


def context_holds_an_observation_and_a_reply(config: Config) -> Iterator[Violation]:
    rollout = config.rollout
    least = LEAST_OBSERVATION_TOKENS + rollout.max_tokens
    if rollout.max_model_len < least:
        yield Violation(
            "rollout.max_model_len",
            f"{least} or more: one observation ({LEAST_OBSERVATION_TOKENS} or more tokens) and a "
            f"reply of rollout.max_tokens={rollout.max_tokens}",
            rollout.max_model_len,
            "Set rollout.max_model_len=4096, or a smaller rollout.max_tokens",
        )
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield Violation(
            "rollout.max_num_batched_tokens",
            f"at least rollout.max_num_seqs={rollout.max_num_seqs}, one token of each request",
            rollout.max_num_batched_tokens,
            "Set rollout.max_num_batched_tokens=8192",
        )


def a_micro_batch_holds_the_longest_sample(config: Config) -> Iterator[Violation]:
    tokens, longest = config.algorithm.micro_batch_tokens, config.rollout.max_model_len
    if config.env.history == "full" and tokens < longest:
        yield Violation(
            "algorithm.micro_batch_tokens",
            f"at least rollout.max_model_len={longest} with env.history=full, because an episode "
            "is then one sample and a sample is never split",
            tokens,
            f"Set algorithm.micro_batch_tokens={longest}, a smaller rollout.max_model_len, or a "
            "window such as env.history=4",
        )


def unseen_mazes_are_not_those_of_the_evaluation(config: Config) -> Iterator[Violation]:
    evaluation = config.eval
    fixed_end = evaluation.first_seed + evaluation.tasks
    unseen_end = evaluation.unseen_first_seed + evaluation.unseen_tasks
    overlap = evaluation.unseen_first_seed < fixed_end and evaluation.first_seed < unseen_end
    if evaluation.unseen_tasks > 0 and overlap:
        yield Violation(
            "eval.unseen_first_seed",
            f"seeds outside of the evaluation set {evaluation.first_seed}..{fixed_end - 1}",
            evaluation.unseen_first_seed,
            f"Set eval.unseen_first_seed={max(1_000_000, fixed_end)}",
        )


def pass_at_k_needs_k_samples(config: Config) -> Iterator[Violation]:
    samples = config.eval.samples
    for k in config.eval.pass_at:
        if not 1 <= k <= samples:
            yield Violation(
                "eval.pass_at",
                f"numbers from 1 to eval.samples={samples}",
                k,
                f"Set eval.samples={max(k, 1)} or leave {k} out",
            )


def dual_clip_belongs_to_ppo_clip(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.dual_clip is not None and algorithm.loss is not LossKind.ppo_clip:
        yield Violation(
            "algorithm.dual_clip",
            f"null with algorithm.loss={algorithm.loss}, which has no such bound",
            algorithm.dual_clip,
            "Set algorithm.dual_clip=null, or algorithm.loss=ppo_clip",
        )


def kl_has_a_gradient_where_it_is_placed(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if not algorithm.kl_coef > 0:
        return
    if algorithm.kl_placement is KlPlacement.loss and algorithm.kl_kind is KlKind.k1:
        yield Violation(
            "algorithm.kl_kind",
            "k2, k3 or k3_k2grad with algorithm.kl_placement=loss, where the gradient of k1 is 0 "
            "on average",
            str(algorithm.kl_kind),
            "Set algorithm.kl_kind=k3_k2grad, or algorithm.kl_placement=reward",
        )
    if algorithm.kl_placement is KlPlacement.reward and algorithm.kl_kind is not KlKind.k1:
        yield Violation(
            "algorithm.kl_kind",
            "k1 with algorithm.kl_placement=reward, where only its expected gradient is that of "
            "the KL divergence",
            str(algorithm.kl_kind),
            "Set algorithm.kl_kind=k1, or algorithm.kl_placement=loss",
        )


def refill_needs_rewards_without_kl(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    in_reward = algorithm.kl_coef > 0 and algorithm.kl_placement is KlPlacement.reward
    if algorithm.filter is GroupFilter.refill and in_reward:
        yield Violation(
            "algorithm.filter",
            "keep or drop with algorithm.kl_placement=reward, where the KL term gives every group "
            "a signal",
            str(algorithm.filter),
            "Set algorithm.filter=drop, or algorithm.kl_placement=loss",
        )


def mismatch_warns_before_it_stops(config: Config) -> Iterator[Violation]:
    mismatch = config.algorithm.mismatch
    if mismatch.stop < mismatch.alarm:
        yield Violation(
            "algorithm.mismatch.stop",
            f"at least algorithm.mismatch.alarm={mismatch.alarm}",
            mismatch.stop,
            f"Set algorithm.mismatch.stop={mismatch.alarm} or more",
        )


def a_comparison_is_of_two(config: Config) -> Iterator[Violation]:
    compared = config.report.compare
    if len(compared) not in (0, 2):
        yield Violation(
            "report.compare",
            "nothing or two evaluations",
            f"[{','.join(compared)}]",
            "Set report.compare=[<run>,<run>]; a run may be followed by @<step>",
        )


def ray_is_joined_at_its_head(config: Config) -> Iterator[Violation]:
    address = config.cluster.address
    if address not in (None, "auto") and not _ADDRESS.fullmatch(address):
        yield Violation(
            "cluster.address",
            "null, auto, or host:port of Ray's head (a driver is no Ray Client: no ray://)",
            address,
            "Set cluster.address=null to start Ray on this machine, or cluster.address=auto to "
            "join the one that this machine belongs to",
        )


def run_name_needs_no_quoting(config: Config) -> Iterator[Violation]:
    name = config.run.name
    if name is not None and not _RUN_NAME.fullmatch(name):
        yield Violation(
            "run.name",
            "directories divided by '/', each of letters, digits, '.', '_' and '-' and beginning "
            "with a letter or digit",
            name,
            "Set run.name=null to derive it from the experiment and the overrides",
        )


_WITH_MODEL: tuple[Rule, ...] = (
    places.model_directory_is_complete,
    dtype_and_attention_are_known,
    lora_adapts_text_layers_only,
    lora_rank_can_be_served,
    places.starting_adapter_fits_the_lora_settings,
    environment_is_known,
    history_is_full_or_a_number_of_turns,
    sampling_is_from_the_policy_itself,
    context_holds_an_observation_and_a_reply,
    places.context_fits_the_model,
    unseen_mazes_are_not_those_of_the_evaluation,
    pass_at_k_needs_k_samples,
    ray_is_joined_at_its_head,
    places.a_gpu_is_here_when_one_is_asked_for,
    places.directories_can_be_written,
    run_name_needs_no_quoting,
)

RULES: dict[TaskKind, tuple[Rule, ...]] = {
    TaskKind.train: (
        group_relative_advantages_need_two_episodes,
        mini_batches_divide_the_groups,
        dual_clip_belongs_to_ppo_clip,
        kl_has_a_gradient_where_it_is_placed,
        refill_needs_rewards_without_kl,
        mismatch_warns_before_it_stops,
        a_micro_batch_holds_the_longest_sample,
        *_WITH_MODEL,
    ),
    TaskKind.evaluate: _WITH_MODEL,
    TaskKind.play: _WITH_MODEL,
    TaskKind.sft: (
        *sft_rules.RULES,
        places.directories_can_be_written,
        run_name_needs_no_quoting,
    ),
    TaskKind.report: (
        places.the_reported_directory_is_there,
        a_comparison_is_of_two,
    ),
}
