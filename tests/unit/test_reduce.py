"""Token weights and the one reduction: masks, empty streams, and independence of every split."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wayfinder.algo.reduce import reduce, sequence_sums, token_weights, whole_sequence_sums
from wayfinder.choices import ReductionMode

CONSTANT = 50.0


def loop_reduction(values_by_sequence, mode):
    """The definitions, sequence by sequence; a sequence without tokens does not exist."""
    sequences = [values for values in values_by_sequence if values]
    if not sequences:
        return 0.0
    if mode == "token_mean":
        flat = [value for values in sequences for value in values]
        return sum(flat) / len(flat)
    if mode == "sequence_mean":
        return sum(sum(values) / len(values) for values in sequences) / len(sequences)
    return sum(sum(values) for values in sequences) / (len(sequences) * CONSTANT)


def reduced(values_by_sequence, mode, order, cuts):
    """Sum of the parts of the flat stream, its tokens permuted by `order` and cut at `cuts`."""
    lengths = [len(values) for values in values_by_sequence]
    constant = CONSTANT if mode == "constant" else None
    weights = token_weights(lengths, mode, constant)
    index = np.repeat(np.arange(len(lengths)), lengths)[order]
    values = np.array([value for row in values_by_sequence for value in row])[order]
    total = 0.0
    for part in np.split(np.arange(len(index)), cuts):
        stream = torch.from_numpy(values[part])
        weight = torch.from_numpy(weights.per_sequence[index[part]])
        total += reduce(stream, weight, weights.global_denominator).item()
    return total


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.floats(-5, 5), max_size=6), min_size=1, max_size=6),
    st.sampled_from(list(ReductionMode)),
    st.data(),
)
def test_any_order_and_any_cut_gives_the_definition(values_by_sequence, mode, data):
    size = sum(map(len, values_by_sequence))
    order = np.array(data.draw(st.permutations(range(size))), dtype=np.int64)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    got = reduced(values_by_sequence, mode, order, cuts)
    assert got == pytest.approx(loop_reduction(values_by_sequence, mode), rel=1e-9, abs=1e-12)


def test_weights_and_denominators():
    for mode, weights, denominator in (
        ("token_mean", [1, 0, 1, 1], 12),
        ("sequence_mean", [1 / 3, 0, 1 / 7, 1 / 2], 3),
        ("constant", [1, 0, 1, 1], 3 * CONSTANT),
    ):
        got = token_weights([3, 0, 7, 2], mode, CONSTANT if mode == "constant" else None)
        assert got.per_sequence.tolist() == pytest.approx(weights)
        assert got.global_denominator == denominator


@pytest.mark.parametrize("mode", ReductionMode)
def test_masked_out_sequences_count_nowhere(mode):
    # Two of four were cut and are masked: the same update as the two others alone.
    constant = CONSTANT if mode == "constant" else None
    four = token_weights([5, 0, 3, 0], mode, constant)
    two = token_weights([5, 3], mode, constant)
    assert four.global_denominator == two.global_denominator
    assert four.per_sequence[[0, 2]].tolist() == two.per_sequence.tolist()
    assert four.per_sequence[[1, 3]].tolist() == [0, 0]


@pytest.mark.parametrize("mode", ReductionMode)
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_step_without_tokens_divides_by_one(mode, lengths):
    assert token_weights(lengths, mode, CONSTANT).global_denominator == 1.0


def test_an_empty_stream_is_an_exact_zero_with_a_graph():
    parameter = torch.ones(4, requires_grad=True)
    value = reduce(parameter[:0] * 2, torch.zeros(0), 7.0)
    assert value.item() == 0.0
    value.backward()
    assert parameter.grad.tolist() == [0.0] * 4


def test_a_fully_masked_stream_is_an_exact_zero_with_a_graph():
    parameter = torch.full((4,), -3.0, requires_grad=True)
    value = reduce(parameter.exp(), torch.zeros(4), 7.0)
    assert value.item() == 0.0
    value.backward()
    assert parameter.grad.tolist() == [0.0] * 4


@pytest.mark.parametrize("shape", [(1,), (4,), (3, 1)])
def test_shapes_that_differ_are_refused(shape):
    with pytest.raises(ValueError, match="one length"):
        reduce(torch.ones(3), torch.ones(shape), 1.0)
    with pytest.raises(ValueError, match="one length"):
        sequence_sums(torch.ones(3), torch.zeros(shape, dtype=torch.int64), 1)


@pytest.mark.parametrize("denominator", [0.0, -1.0, float("nan"), float("inf")])
def test_a_denominator_that_is_not_positive_is_refused(denominator):
    with pytest.raises(ValueError, match="global_denominator"):
        reduce(torch.ones(3), torch.ones(3), denominator)


def test_bad_lengths_are_refused():
    with pytest.raises(ValueError, match="negative"):
        token_weights([3, -1], "token_mean")
    for constant in (None, 0.0, -2.0):
        with pytest.raises(ValueError, match="constant_length"):
            token_weights([3], "constant", constant)


def test_sums_reach_every_token_of_the_sequence():
    index = torch.tensor([9, 4, 9, 9])
    values = torch.tensor([1.0, 10.0, 2.0, 4.0])
    lengths = torch.tensor([3, 1, 3, 3])
    assert whole_sequence_sums(values, index, lengths).tolist() == [7.0, 10.0, 7.0, 7.0]
    assert sequence_sums(values, index, 10).tolist() == [0, 0, 0, 0, 10, 0, 0, 0, 0, 7]
    empty = torch.zeros(0, dtype=torch.int64)
    assert whole_sequence_sums(torch.zeros(0), empty, empty).shape == (0,)


def test_a_split_sequence_is_noticed():
    index = torch.tensor([9, 4, 9])
    with pytest.raises(ValueError, match="sequence 9 has 2 of its 3 loss tokens"):
        whole_sequence_sums(torch.ones(3), index, torch.tensor([3, 1, 3]))
