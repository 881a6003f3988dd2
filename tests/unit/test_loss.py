"""The composed loss against a float64 reference in plain loops, and its independence of splits."""

import dataclasses
import itertools
import math
import random

import pytest
import torch

from wayfinder.algo.importance import importance_weights
from wayfinder.algo.loss import LossInputs, LossSpec, averaged, policy_loss
from wayfinder.algo.reduce import sequence_sums, token_weights
from wayfinder.algo.surrogate import cispo, gspo, ppo_clip, reinforce
from wayfinder.choices import ImportanceMode, KlKind, LossKind, ReductionMode

CONSTANT = 20.0
LENGTHS = [3, 17, 1, 9, 2, 6, 5, 4]
SPLITS = {
    "1x8": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "2x4": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "8x1": [[0], [1], [2], [3], [4], [5], [6], [7]],
    "uneven": [[1], [7, 0, 3, 5, 2], [], [6, 4]],
}


def spec_of(loss="ppo_clip", reduction="token_mean", importance="none", **values):
    constant = CONSTANT if reduction == "constant" else None
    defaults = {"clip_low": 0.2, "clip_high": 0.28, "importance_cap": 1.5}
    return LossSpec(
        loss=loss,
        reduction=reduction,
        importance=importance,
        constant_length=constant,
        **{**defaults, **values},
    )


@dataclasses.dataclass
class Data:
    """Token values in one list per sequence."""

    new: list
    old: list
    behavior: list
    reference: list
    entropy: list
    advantage: list  # one a sequence


def make_data(seed=0, lengths=LENGTHS, spread=0.4):
    rng = random.Random(seed)

    def rows(base, noise):
        return [[value + rng.gauss(0, noise) for value in row] for row in base]

    new = [[-rng.uniform(0.1, 3.0) for _ in range(length)] for length in lengths]
    old = rows(new, spread)
    return Data(
        new=new,
        old=old,
        behavior=rows(old, 0.3),
        reference=rows(new, 0.5),
        entropy=[[rng.uniform(0.1, 2.0) for _ in row] for row in new],
        advantage=[rng.choice([-1, 1]) * rng.uniform(0.2, 2.0) for _ in lengths],
    )


def loop_loss(data, spec, new, entropy):
    """Loss at `new` and `entropy`; what is a constant of the update is taken at `data`."""
    lengths = [len(row) for row in data.new]
    total = 0.0
    for s, length in enumerate(lengths):
        if spec.reduction == "token_mean":
            weight = 1 / sum(lengths)
        elif spec.reduction == "sequence_mean":
            weight = 1 / (length * len(lengths))
        else:
            weight = 1 / (CONSTANT * len(lengths))
        gap = [o - b for o, b in zip(data.old[s], data.behavior[s], strict=True)]
        sequence_mean = sum(n - o for n, o in zip(new[s], data.old[s], strict=True)) / length
        frozen_mean = sum(n - o for n, o in zip(data.new[s], data.old[s], strict=True)) / length
        advantage = data.advantage[s]
        for t in range(length):
            if spec.importance == "none":
                importance = 1.0
            elif spec.importance == "token":
                importance = min(math.exp(gap[t]), spec.importance_cap)
            else:
                importance = math.exp(sum(gap))
                if spec.importance == "sequence":
                    importance = min(importance, spec.importance_cap)
                elif not 1 / spec.importance_cap <= importance <= spec.importance_cap:
                    importance = 0.0
            low, high = 1 - spec.clip_low, 1 + spec.clip_high
            if spec.loss == "reinforce":
                policy = -advantage * new[s][t]
            elif spec.loss == "cispo":
                frozen = math.exp(data.new[s][t] - data.old[s][t])
                policy = -min(max(frozen, low), high) * advantage * new[s][t]
            else:
                log_ratio = sequence_mean if spec.loss == "gspo" else new[s][t] - data.old[s][t]
                if spec.loss == "gspo" and spec.importance == "token":
                    # Weights differ inside the sequence: the token form, whose value is the same.
                    log_ratio = frozen_mean + new[s][t] - data.new[s][t]
                ratio = math.exp(log_ratio)
                policy = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
                if spec.dual_clip is not None and advantage < 0:
                    policy = min(policy, -spec.dual_clip * advantage)
            d, at = new[s][t] - data.reference[s][t], data.new[s][t] - data.reference[s][t]
            kl = {
                "k1": d,
                "k2": d * d / 2,
                "k3": math.exp(-d) - 1 + d,
                "k3_k2grad": math.exp(-at) - 1 + at + d * d / 2 - at * at / 2,
            }[spec.kl_kind]
            kl_coef = spec.kl_coef if spec.kl_placement == "loss" else 0.0
            total += weight * (
                importance * policy + kl_coef * kl - spec.entropy_coef * entropy[s][t]
            )
    return total


def loop_gradient(data, spec, which):
    """Central differences of `loop_loss` with respect to every `new` or every `entropy`."""
    step, gradient = 1e-5, []
    for s, row in enumerate(data.new):
        for t in range(len(row)):
            values = []
            for sign in (1, -1):
                moved = [list(inner) for inner in getattr(data, which)]
                moved[s][t] += sign * step
                at = {"new": data.new, "entropy": data.entropy, which: moved}
                values.append(loop_loss(data, spec, at["new"], at["entropy"]))
            gradient.append((values[0] - values[1]) / (2 * step))
    return gradient


def stream(data, spec, sequences, leaves=None, window=None, dtype=torch.float64, **extra):
    """Inputs of the given sequences; `window` (start, stop) takes only those tokens of each."""
    lengths = [len(row) for row in data.new]
    weights = token_weights(lengths, spec.reduction, spec.constant_length)
    tokens = [
        (s, t)
        for s in sequences
        for t in range(lengths[s])
        if window is None or t in range(*window)
    ]

    def gather(rows):
        return torch.tensor([rows[s][t] for s, t in tokens], dtype=dtype)

    index = torch.tensor([s for s, _ in tokens], dtype=torch.int64)
    if leaves is None:
        logprobs, entropies = gather(data.new), gather(data.entropy)
    else:
        logprobs = torch.stack([leaves[0][s][t] for s, t in tokens]) if tokens else leaves[0][0][:0]
        entropies = (
            torch.stack([leaves[1][s][t] for s, t in tokens]) if tokens else leaves[1][0][:0]
        )
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=gather(data.old),
        behavior_logprobs=gather(data.behavior),
        advantages=torch.tensor([data.advantage[s] for s, _ in tokens], dtype=dtype),
        token_weight=torch.tensor(weights.per_sequence, dtype=dtype)[index],
        sequence_index=index,
        global_denominator=weights.global_denominator,
        reference_logprobs=gather(data.reference),
        entropies=entropies,
        **{"sequence_length": torch.tensor(lengths, dtype=torch.int64)[index], **extra},
    )


def make_leaves(data):
    return tuple(
        [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in rows]
        for rows in (data.new, data.entropy)
    )


def flat_gradient(leaves):
    return torch.cat(
        [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    )


def run(data, spec, parts):
    """Loss, gradients and diagnostics of the sum over micro-batches."""
    leaves, total, sums = make_leaves(data), 0.0, {}
    for part in parts:
        output = policy_loss(stream(data, spec, part, leaves), spec)
        output.loss.backward()
        total += output.loss.item()
        for name, value in output.sums.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    return total, flat_gradient(leaves[0]), flat_gradient(leaves[1]), averaged(sums)


ALL = list(itertools.product(LossKind, ReductionMode, ImportanceMode))


@pytest.mark.parametrize(("loss", "reduction", "importance"), ALL)
def test_value_and_gradient_equal_the_loop(loss, reduction, importance, record_property):
    kl_kind = list(KlKind)[ALL.index((loss, reduction, importance)) % 4]
    spec = spec_of(
        loss,
        reduction,
        importance,
        kl_coef=0.3,
        kl_kind=kl_kind,
        entropy_coef=0.05,
        dual_clip=1.6 if loss == "ppo_clip" else None,
        clip_low=0.02 if loss == "gspo" else 0.2,
        clip_high=0.05 if loss == "gspo" else 0.28,
    )
    # Seed 0 has tokens and sequences on both sides of every bound.
    data = make_data(seed=0, lengths=[3, 8, 1, 5, 2])
    value, grad_new, grad_entropy, metrics = run(data, spec, [range(5)])
    assert loss == "reinforce" or 0 < metrics["clip_frac"] < 1
    assert importance == "none" or 0 < metrics["importance_capped_frac"] < 1
    assert value == pytest.approx(loop_loss(data, spec, data.new, data.entropy), rel=1e-12)
    expected = loop_gradient(data, spec, "new")
    record_property(
        "error", max(abs(a - b) for a, b in zip(grad_new.tolist(), expected, strict=True))
    )
    assert grad_new.tolist() == pytest.approx(expected, abs=1e-9)
    assert grad_entropy.tolist() == pytest.approx(loop_gradient(data, spec, "entropy"), abs=1e-9)


@pytest.mark.parametrize(("loss", "reduction", "importance"), ALL)
def test_any_split_gives_the_same_update_and_the_same_metrics(
    loss, reduction, importance, record_property
):
    spec = spec_of(loss, reduction, importance, kl_coef=0.3, entropy_coef=0.05)
    data = make_data(seed=4)
    whole = run(data, spec, SPLITS["1x8"])
    for split in ("2x4", "8x1", "uneven"):
        parts = run(data, spec, SPLITS[split])
        assert parts[0] == pytest.approx(whole[0], rel=1e-6), split
        for got, expected in zip(parts[1:3], whole[1:3], strict=True):
            record_property("error", float((got - expected).norm() / expected.norm()))
            assert (got - expected).norm() <= 1e-6 * expected.norm(), split
            assert expected.norm() > 0
        assert parts[3] == pytest.approx(whole[3], rel=1e-6), split


@pytest.mark.parametrize("loss", ["ppo_clip", "cispo", "gspo"])
@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("reduction", ReductionMode)
def test_windows_of_an_episode_give_the_update_of_the_whole(loss, importance, reduction):
    spec = spec_of(loss, reduction, importance, kl_coef=0.3, entropy_coef=0.05)
    data = make_data(seed=5)
    expected = run(data, spec, SPLITS["1x8"])

    # What a caller does whose sequences are split: statistics of whole sequences over all parts.
    everything, length = stream(data, spec, range(8)), torch.tensor(LENGTHS)
    index = everything.sequence_index
    gap = everything.old_logprobs - everything.behavior_logprobs
    move = everything.logprobs - everything.old_logprobs
    mismatch = sequence_sums(gap, index, 8)
    log_ratio = sequence_sums(move, index, 8) / length

    leaves, total = make_leaves(data), 0.0
    for window in ((0, 2), (2, 7), (7, 100)):
        for sequences in ([0, 1, 2, 3], [4, 5, 6, 7]):
            inputs = stream(data, spec, sequences, leaves, window)
            given = dataclasses.replace(
                inputs,
                sequence_length=None,
                sequence_mismatch=mismatch[inputs.sequence_index],
                sequence_log_ratio=log_ratio[inputs.sequence_index],
            )
            output = policy_loss(given, spec)
            output.loss.backward()
            total += output.loss.item()
    assert total == pytest.approx(expected[0], rel=1e-9)
    assert flat_gradient(leaves[0]).tolist() == pytest.approx(expected[1].tolist(), rel=1e-9)


def test_every_window_of_an_episode_trains_its_own_tokens():
    # Three turns with 3, 7 and 2 sampled tokens: one advantage, on each token once.
    data = make_data(lengths=[12])
    data.old = data.behavior = data.new
    spec = spec_of("ppo_clip")
    leaves = make_leaves(data)
    for window, size in (((0, 3), 3), ((3, 10), 7), ((10, 12), 2)):
        before = flat_gradient(leaves[0]).clone()
        policy_loss(stream(data, spec, [0], leaves, window), spec).loss.backward()
        added = flat_gradient(leaves[0]) - before
        assert added[slice(*window)].tolist() == pytest.approx([-data.advantage[0] / 12] * size)
        assert (added != 0).sum() == size


@pytest.mark.parametrize("reduction", ReductionMode)
def test_masked_sequences_leave_the_update_of_the_others(reduction):
    spec = spec_of("ppo_clip", reduction, kl_coef=0.3, entropy_coef=0.05)
    data = make_data(lengths=[3, 5, 2, 4])
    kept = [0, 2]
    alone = Data(*([rows[s] for s in kept] for rows in dataclasses.astuple(data)))
    masked = Data(
        *([row if s in kept else [] for s, row in enumerate(r)] for r in dataclasses.astuple(data))
    )
    masked.advantage = data.advantage
    assert run(masked, spec, [[0, 1, 2, 3]])[1].tolist() == run(alone, spec, [[0, 1]])[1].tolist()


@pytest.mark.parametrize(("loss", "importance"), itertools.product(LossKind, ImportanceMode))
def test_an_empty_micro_batch_is_an_exact_zero_with_a_graph(loss, importance):
    spec = spec_of(loss, "token_mean", importance, kl_coef=0.3, entropy_coef=0.05)
    data = make_data()
    leaves = make_leaves(data)
    empty = policy_loss(stream(data, spec, [], leaves), spec)
    full = policy_loss(stream(data, spec, range(8), leaves), spec)
    assert empty.sums.keys() == full.sums.keys()
    assert all(value.item() == 0 for value in empty.sums.values())
    empty.loss.backward()
    assert empty.loss.item() == 0.0
    assert leaves[0][0].grad.tolist() == [0.0] * 3


def test_float32_is_close_to_float64():
    spec = spec_of("ppo_clip", "sequence_mean", "sequence", kl_coef=0.3, entropy_coef=0.05)
    data = make_data(seed=6)
    exact = policy_loss(stream(data, spec, range(8)), spec).loss.item()
    single = policy_loss(stream(data, spec, range(8), dtype=torch.float32), spec).loss
    assert single.dtype is torch.float32
    assert single.item() == pytest.approx(exact, rel=1e-5)


def test_clipping_by_hand():
    ratio = torch.tensor([0.5, 0.9, 1.2, 1.5, 0.5, 0.9, 1.2, 5.0], dtype=torch.float64)
    advantage = torch.tensor([1.0] * 4 + [-1.0] * 4, dtype=torch.float64)
    logprobs = ratio.log().requires_grad_()
    token = ppo_clip(logprobs, torch.zeros(8), advantage, 0.2, 0.3, dual_clip=3.0)
    expected = [-0.5, -0.9, -1.2, -1.3, 0.8, 0.9, 1.2, 3.0]
    clipped = [False, False, False, True, True, False, False, True]
    assert token.loss.tolist() == pytest.approx(expected)
    assert token.clipped.tolist() == clipped
    assert token.ratio.tolist() == pytest.approx(ratio.tolist())
    token.loss.sum().backward()
    assert (logprobs.grad == 0).tolist() == clipped
    assert ppo_clip(logprobs, torch.zeros(8), advantage, 0.2, 0.3).loss[-1].item() == pytest.approx(
        5.0
    )


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    ratio = torch.tensor([3.0, 0.1, 1.2])
    advantage = torch.tensor([1.0, -1.0, 1.0])
    for low, clipped, gradient in (
        (0.8, [True, True, False], [-1.5, 0.2, -1.2]),
        (1.0, [True, False, False], [-1.5, 0.1, -1.2]),
    ):
        logprobs = ratio.log().requires_grad_()
        token = cispo(logprobs, torch.zeros(3), advantage, low, 0.5)
        token.loss.sum().backward()
        assert token.clipped.tolist() == clipped
        assert logprobs.grad.tolist() == pytest.approx(gradient)


def test_gspo_clips_whole_sequences():
    # Token ratios 2 and 1/2 of one sequence cancel; the other one moved as a whole.
    log_ratio = torch.tensor([math.log(2), -math.log(2), math.log(2), math.log(2)])
    mean = torch.tensor([0.0, 0.0, math.log(2), math.log(2)])
    token = gspo(log_ratio, torch.ones(4), mean, 0.1, 0.1)
    assert token.ratio.tolist() == pytest.approx([1, 1, 2, 2])
    assert token.clipped.tolist() == [False, False, True, True]
    assert token.loss.tolist() == pytest.approx([-1, -1, -1.1, -1.1])


def test_on_the_first_update_all_losses_have_the_policy_gradient():
    new = torch.tensor([-0.3, -2.0, -1.0], dtype=torch.float64)
    advantage = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float64)
    for loss in (
        lambda x: ppo_clip(x, new, advantage, 0.2, 0.28, 3.0),
        lambda x: gspo(x, advantage, torch.zeros(3), 3e-4, 4e-4),
        lambda x: cispo(x, new, advantage, 1.0, 2.0),
        lambda x: reinforce(x, new, advantage),
    ):
        logprobs = new.clone().requires_grad_()
        token = loss(logprobs)
        token.loss.sum().backward()
        assert logprobs.grad.tolist() == pytest.approx((-advantage).tolist())
        assert token.ratio.tolist() == [1.0] * 3
        assert not token.clipped.any()


def test_importance_weights_by_hand():
    gap = torch.tensor([0.5, -0.5, 1.5, -3.0]).exp().log()
    zero = torch.zeros(4)
    assert importance_weights(gap, zero, "none", 2.0).weight.tolist() == [1.0] * 4
    token = importance_weights(gap, zero, "token", 2.0)
    assert token.weight.tolist() == pytest.approx(
        [math.exp(0.5), math.exp(-0.5), 2.0, math.exp(-3)]
    )
    assert token.capped.tolist() == [False, False, True, False]
    mask = importance_weights(gap, zero, "sequence_mask", 2.0, sequence_mismatch=gap)
    assert mask.weight.tolist() == pytest.approx([math.exp(0.5), math.exp(-0.5), 0.0, 0.0])
    assert mask.capped.tolist() == [False, False, True, True]


def test_importance_weights_are_constants():
    old, behavior = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    for mode in ImportanceMode:
        got = importance_weights(old, behavior, mode, 2.0, sequence_mismatch=old - behavior)
        assert not got.weight.requires_grad


def test_a_dropped_sequence_keeps_its_kl_and_its_place_in_the_denominator():
    data = make_data(lengths=[3, 5])
    data.behavior[0] = [value - 2.0 for value in data.old[0]]
    data.behavior[1] = data.old[1]
    spec = spec_of("ppo_clip", importance="sequence_mask", kl_coef=0.3)
    _, gradient, _, metrics = run(data, spec, [[0, 1]])
    plain = spec_of("ppo_clip", kl_coef=0.3)
    assert gradient[3:].tolist() == pytest.approx(run(data, plain, [[0, 1]])[1][3:].tolist())
    data.advantage[0] = 0.0
    assert gradient[:3].tolist() == pytest.approx(run(data, plain, [[0, 1]])[1][:3].tolist())
    assert metrics["importance_capped_frac"] == pytest.approx(3 / 8)


def test_metrics_are_token_means_and_terms_add_up():
    data = make_data(seed=7)
    spec = spec_of("ppo_clip", "sequence_mean", kl_coef=0.3, entropy_coef=0.05)
    value, _, _, metrics = run(data, spec, SPLITS["uneven"])
    ratios, kls, clipped = [], [], 0
    for new, old, ref, adv in zip(data.new, data.old, data.reference, data.advantage, strict=True):
        for n, o, r in zip(new, old, ref, strict=True):
            ratios.append(math.exp(n - o))
            kls.append(math.exp(r - n) - 1 - (r - n))
            clipped += ratios[-1] > 1.28 if adv > 0 else ratios[-1] < 0.8
    entropies = [entropy for row in data.entropy for entropy in row]
    assert metrics["ratio_mean"] == pytest.approx(sum(ratios) / len(ratios))
    assert metrics["kl"] == pytest.approx(sum(kls) / len(kls))
    assert metrics["entropy"] == pytest.approx(sum(entropies) / len(entropies))
    assert metrics["clip_frac"] == pytest.approx(clipped / len(ratios))
    assert clipped > 0
    terms = metrics["policy_loss"] + metrics["kl_loss"] + metrics["entropy_loss"]
    assert metrics["loss"] == pytest.approx(value)
    assert terms == pytest.approx(value)


def test_kl_in_the_reward_is_reported_but_not_in_the_loss():
    data = make_data()
    inside = run(data, spec_of(kl_coef=0.3, kl_placement="reward"), SPLITS["1x8"])
    without = run(data, spec_of(kl_coef=0.0), SPLITS["1x8"])
    assert inside[0] == without[0]
    assert torch.equal(inside[1], without[1])
    assert inside[3]["kl"] > 0
    assert "kl_loss" not in inside[3]


def test_metrics_of_no_tokens_are_left_out():
    data = make_data()
    output = policy_loss(stream(data, spec_of(), []), spec_of())
    assert averaged(output.sums) == {"policy_loss": 0.0, "loss": 0.0}


@pytest.mark.parametrize(("loss", "importance"), itertools.product(LossKind, ImportanceMode))
def test_huge_ratios_stay_finite_in_float32(loss, importance):
    # exp(150) overflows float32, and infinity times a zero gradient would be NaN.
    data = make_data(lengths=[2, 1, 1])
    data.new = data.behavior = [[-0.1, -150.0], [-0.1], [-0.1]]
    data.old = [[-150.0, -0.1], [-150.0], [-150.0]]
    data.advantage = [1.0, -1.0, 1.0]
    spec = spec_of(loss, importance=importance, kl_coef=0.1)
    inputs = stream(data, spec, [0, 1, 2], dtype=torch.float32)
    inputs.logprobs.requires_grad_()
    output = policy_loss(inputs, spec)
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert torch.isfinite(inputs.logprobs.grad).all()


TENSORS = [
    field.name for field in dataclasses.fields(LossInputs) if field.name != "global_denominator"
]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("shape", [(1,), (52,), (47, 1), ()])
def test_lengths_that_differ_are_refused(name, shape):
    inputs = stream(make_data(), spec_of(), range(8))
    assert len(inputs.logprobs) == 47
    dtype = torch.int64 if name in ("sequence_index", "sequence_length") else torch.float64
    with pytest.raises(ValueError, match=r"must be \["):
        dataclasses.replace(inputs, **{name: torch.zeros(shape, dtype=dtype)})


def test_half_precision_and_wrong_index_types_are_refused():
    inputs = stream(make_data(), spec_of(), range(8))
    for name in ("logprobs", "old_logprobs", "behavior_logprobs", "reference_logprobs"):
        with pytest.raises(ValueError, match=f"^{name} must be float32"):
            dataclasses.replace(inputs, **{name: getattr(inputs, name).bfloat16()})
    with pytest.raises(ValueError, match="int64"):
        dataclasses.replace(inputs, sequence_index=inputs.sequence_index.int())


def test_what_the_spec_needs_must_be_there():
    inputs = stream(make_data(), spec_of(), range(8))
    for spec, missing, message in (
        (spec_of(kl_coef=0.1), "reference_logprobs", "reference_logprobs is None"),
        (spec_of(entropy_coef=0.1), "entropies", "entropies is None"),
        (spec_of("gspo"), "sequence_length", "sequence_length or sequence_log_ratio"),
        (spec_of(importance="sequence"), "sequence_length", "sequence_length or sequence_mismatch"),
    ):
        policy_loss(inputs, spec)
        with pytest.raises(ValueError, match=message):
            policy_loss(dataclasses.replace(inputs, **{missing: None}), spec)


@pytest.mark.parametrize("spec", [spec_of("gspo"), spec_of(importance="sequence_mask")])
def test_a_split_sequence_is_refused_at_sequence_level(spec):
    with pytest.raises(ValueError, match="sequence 0 has 2 of its 3 loss tokens"):
        policy_loss(stream(make_data(), spec, range(8), window=(0, 2)), spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": -0.1}, "clip_low must be between 0 and 1, not -0.1"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"kl_coef": -1.0}, "kl_coef"),
        ({"entropy_coef": math.nan}, "entropy_coef"),
        ({"importance_cap": 0.5}, "importance_cap"),
        ({"dual_clip": 0.9}, "dual_clip"),
        ({"dual_clip": 3.0, "loss": "cispo"}, "dual_clip"),
        ({"constant_length": 0.0, "reduction": "constant"}, "constant_length"),
        ({"constant_length": None, "reduction": "constant"}, "constant_length"),
        ({"loss": "trpo"}, "LossKind"),
        ({"kl_kind": "k4"}, "KlKind"),
        ({"kl_placement": "both"}, "KlPlacement"),
        ({"importance": "all"}, "ImportanceMode"),
        ({"reduction": "mean"}, "ReductionMode"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LossSpec(**{"loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, **change})


def test_enumeration_names_equal_values():
    for kinds in (LossKind, ReductionMode, ImportanceMode):
        assert all(kind.name == kind.value for kind in kinds)
