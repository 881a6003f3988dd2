"""KL estimators: values, and their gradients on a 3-token policy by exact enumeration."""

import math

import pytest
import torch

from wayfinder.algo.kl import kl_in_reward, kl_values
from wayfinder.choices import KlKind, KlPlacement

# pi = (1/2, 3/10, 1/5) as logits log pi, ref = (1/5, 3/10, 1/2). The two exact gradients with
# respect to the logits, worked out by hand with L = log(5/2):
#   grad KL(pi || ref) = pi * (log(pi / ref) - KL),  log(pi / ref) = (L, 0, -L),  KL = 0.3 L
#   grad KL(ref || pi) = pi - ref
POLICY = (0.5, 0.3, 0.2)
REFERENCE = (0.2, 0.3, 0.5)
L = math.log(2.5)
REVERSE = (0.35 * L, -0.09 * L, -0.26 * L)
FORWARD = (0.3, 0.0, -0.3)

# Expected gradient of each estimator as a loss term, averaged over tokens from the policy.
AS_LOSS = {
    "k1": (0.0, 0.0, 0.0),
    "k2": REVERSE,
    "k3": FORWARD,
    "k3_k2grad": REVERSE,
}
# Expected policy gradient of each estimator as a penalty: sum_a pi(a) * value(a) * grad log pi(a),
# which is pi(a) * (value(a) - mean value).
K2_MEAN = 0.35 * L * L
IN_REWARD = {
    "k1": REVERSE,
    "k2": (0.5 * (0.5 * L * L - K2_MEAN), -0.3 * K2_MEAN, 0.2 * (0.5 * L * L - K2_MEAN)),
    "k3": tuple(r - f for r, f in zip(REVERSE, FORWARD, strict=True)),
}
# The same table as numbers, so that a wrong derivation above cannot hide.
TABLE = {
    ("loss", "k1"): (0.0, 0.0, 0.0),
    ("loss", "k2"): (0.320702, -0.082466, -0.238236),
    ("loss", "k3"): (0.3, 0.0, -0.3),
    ("loss", "k3_k2grad"): (0.320702, -0.082466, -0.238236),
    ("reward", "k1"): (0.320702, -0.082466, -0.238236),
    ("reward", "k2"): (0.062969, -0.088157, 0.025188),
    ("reward", "k3"): (0.020702, -0.082466, 0.061764),
}


def enumerated(as_penalty: bool, kind: str) -> tuple[float, ...]:
    logits = torch.tensor([math.log(p) for p in POLICY], dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, 0)
    reference = torch.tensor([math.log(p) for p in REFERENCE], dtype=torch.float64)
    probability = logprobs.exp().detach()
    values = kl_values(logprobs, reference, kind)
    if as_penalty:
        values = values.detach() * logprobs
    (probability * values).sum().backward()
    return tuple(logits.grad.tolist())


@pytest.mark.parametrize("kind", KlKind)
def test_gradient_as_a_loss_is_the_documented_one(kind, record_property):
    got = enumerated(False, kind)
    record_property("error", max(abs(a - b) for a, b in zip(got, AS_LOSS[kind], strict=True)))
    assert got == pytest.approx(AS_LOSS[kind], abs=1e-12)
    assert got == pytest.approx(TABLE["loss", kind], abs=1e-6)


@pytest.mark.parametrize("kind", IN_REWARD)
def test_gradient_in_the_reward_is_the_documented_one(kind, record_property):
    got = enumerated(True, kind)
    record_property("error", max(abs(a - b) for a, b in zip(got, IN_REWARD[kind], strict=True)))
    assert got == pytest.approx(IN_REWARD[kind], abs=1e-12)
    assert got == pytest.approx(TABLE["reward", kind], abs=1e-6)


@pytest.mark.parametrize(("kind", "unbiased"), [("k1", 1), ("k2", 0), ("k3", 1), ("k3_k2grad", 1)])
def test_expected_value(kind, unbiased):
    true_kl = sum(p * math.log(p / r) for p, r in zip(POLICY, REFERENCE, strict=True))
    logprobs = torch.tensor(POLICY, dtype=torch.float64).log()
    reference = torch.tensor(REFERENCE, dtype=torch.float64).log()
    expected = (logprobs.exp() * kl_values(logprobs, reference, kind)).sum().item()
    assert (expected == pytest.approx(true_kl, rel=1e-12)) == bool(unbiased)


@pytest.mark.parametrize("kind", KlKind)
def test_values_equal_the_loop(kind):
    new, ref = [-0.5, -1.25, -3.0, -0.1], [-0.75, -1.25, -1.0, -4.0]
    expected = []
    for a, b in zip(new, ref, strict=True):
        ratio = math.exp(b - a)
        expected.append({"k1": a - b, "k2": (a - b) ** 2 / 2}.get(kind, ratio - 1 - (b - a)))
    got = kl_values(torch.tensor(new).double(), torch.tensor(ref).double(), kind)
    assert got.tolist() == pytest.approx(expected, abs=1e-7)


def test_equal_policies_have_zero_kl_and_zero_gradient():
    for kind in KlKind:
        logprobs = torch.tensor([-0.3, -2.0], requires_grad=True)
        values = kl_values(logprobs, logprobs.detach().clone(), kind)
        assert values.tolist() == [0.0, 0.0]
        values.sum().backward()
        assert logprobs.grad.tolist() == ([1.0, 1.0] if kind == "k1" else [0.0, 0.0])


def test_k3_is_accurate_in_float32_for_small_differences():
    # Close to the reference k3 is d^2 / 2; exp(-d) - 1 in float32 would be wrong by percents.
    new = torch.full((1000,), -1.0)
    reference = new + torch.linspace(3e-4, 6e-4, 1000)
    expected = kl_values(new.double(), reference.double(), "k3")
    assert torch.allclose(kl_values(new, reference, "k3").double(), expected, rtol=1e-3, atol=0)
    half_square = (new.double() - reference.double()).square() / 2
    assert torch.allclose(expected, half_square, rtol=1e-3, atol=0)


def test_a_huge_difference_stays_finite():
    for kind in KlKind:
        logprobs = torch.tensor([-200.0], requires_grad=True)
        value = kl_values(logprobs, torch.tensor([-0.1]), kind)
        value.sum().backward()
        assert torch.isfinite(value).all()
        assert torch.isfinite(logprobs.grad).all()


def test_the_reference_gets_no_gradient():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    reference = torch.tensor([-2.0], requires_grad=True)
    kl_values(logprobs, reference, "k3").sum().backward()
    assert reference.grad is None


def test_penalties_add_up_over_parts_and_count_each_sequence():
    new = torch.tensor([-0.5, -1.0, -0.2, -0.7], dtype=torch.float64)
    ref = torch.tensor([-0.7, -0.6, -0.9, -0.7], dtype=torch.float64)
    index = torch.tensor([2, 0, 2, 0])
    whole = kl_in_reward(new, ref, index, 3, 0.1)
    assert whole.tolist() == pytest.approx([0.1 * -0.4, 0.0, 0.1 * 0.9], abs=1e-12)
    parts = [kl_in_reward(new[p], ref[p], index[p], 3, 0.1) for p in (slice(0, 3), slice(3, 4))]
    assert (parts[0] + parts[1]).tolist() == pytest.approx(whole.tolist(), abs=1e-15)


def test_penalties_are_constants():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    assert not kl_in_reward(logprobs, torch.tensor([-2.0]), torch.tensor([0]), 1, 0.1).requires_grad


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError, match="one length"):
        kl_values(torch.zeros(3), torch.zeros(8), "k3")
    with pytest.raises(ValueError, match="one length"):
        kl_values(torch.zeros(3), torch.zeros(1), "k3")


def test_enumeration_names_equal_values():
    assert all(kind.name == kind.value for kind in [*KlKind, *KlPlacement])
