"""Log-probabilities of sampled tokens against float64, in value and in gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from wayfinder.chat.vision import BANNED_BIAS
from wayfinder.train.logprobs import chunked_logprobs, token_logprobs

NONE = torch.zeros(0, dtype=torch.int64)
BANNED = torch.tensor([3, 4, 5, 6])
ROWS, VOCAB, WIDTH = 13, 40, 8


def logits_and_targets(scale: float = 5.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = scale * torch.randn(ROWS, VOCAB, generator=generator)
    targets = torch.randint(10, VOCAB, (ROWS,), generator=generator)
    return logits, targets


def reference(logits: torch.Tensor, temperature: float, banned: torch.Tensor) -> np.ndarray:
    """Log-probabilities [rows, vocab] in float64; a banned token is not in the distribution."""
    values = logits.double().numpy() / temperature
    values[:, banned.numpy()] = -np.inf
    top = values.max(axis=1, keepdims=True)
    return values - top - np.log(np.exp(values - top).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("banned", [NONE, BANNED], ids=["nothing banned", "vision banned"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_equal_to_float64(temperature, banned, record_property):
    logits, targets = logits_and_targets()
    logprobs, entropies = token_logprobs(logits, targets, temperature, banned)
    expected = reference(logits, temperature, banned)
    rows = np.arange(ROWS)
    record_property("error", float(np.abs(logprobs.numpy() - expected[rows, targets]).max()))
    np.testing.assert_allclose(logprobs, expected[rows, targets], rtol=1e-5, atol=1e-6)
    probabilities = np.exp(expected)
    entropy = -np.where(probabilities > 0, probabilities * np.maximum(expected, -1e9), 0).sum(1)
    np.testing.assert_allclose(entropies, entropy, rtol=1e-4, atol=1e-6)


def test_temperature_divides_logits_not_logprobs():
    logits, targets = logits_and_targets()
    hot, _ = token_logprobs(logits, targets, 2.0, NONE)
    halved, _ = token_logprobs(logits / 2, targets, 1.0, NONE)
    assert torch.equal(hot, halved)
    plain, _ = token_logprobs(logits, targets, 1.0, NONE)
    assert not torch.allclose(hot, plain / 2, atol=0.1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_banned_token_has_no_probability_and_the_rest_has_it_all(temperature):
    logits, targets = logits_and_targets()
    logits[:, BANNED] += 20.0  # the model wants nothing more than an image
    every = torch.arange(VOCAB)
    for row in range(ROWS):
        logprobs, _ = token_logprobs(logits[row].expand(VOCAB, -1), every, temperature, BANNED)
        allowed = ~torch.isin(every, BANNED)
        assert float(logprobs[BANNED].double().exp().max()) < 1e-30
        assert float(logprobs[allowed].double().exp().sum()) == pytest.approx(1, abs=1e-6)
    without, _ = token_logprobs(logits, targets, temperature, NONE)
    banned, _ = token_logprobs(logits, targets, temperature, BANNED)
    assert (banned > without).all()


def test_the_bias_comes_before_the_temperature():
    # As in the engine: bias first, then the temperature divides both.
    logits = torch.zeros(1, 2)
    logprobs, _ = token_logprobs(logits, torch.tensor([1]), 10.0, torch.tensor([1]))
    expected = BANNED_BIAS / 10 - math.log1p(math.exp(BANNED_BIAS / 10))
    assert float(logprobs) == pytest.approx(expected)


@pytest.mark.parametrize("banned", [NONE, BANNED], ids=["nothing banned", "vision banned"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_is_read_in_float32(dtype, banned):
    logits, targets = logits_and_targets()
    logits = logits.to(dtype)
    logprobs, entropies = token_logprobs(logits, targets, 0.7, banned)
    assert logprobs.dtype == entropies.dtype == torch.float32
    expected = reference(logits, 0.7, banned)[np.arange(ROWS), targets]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("extra", [5, -5])
def test_unequal_lengths_are_refused(extra):
    _, targets = logits_and_targets()
    rows = ROWS + extra
    with pytest.raises(ValueError, match=f"{rows} rows of logits for {ROWS} targets"):
        token_logprobs(torch.zeros(rows, VOCAB), targets, 1.0, NONE)
    for chunk in (4, 100):
        with pytest.raises(ValueError, match=f"{rows} rows of hidden states for {ROWS} targets"):
            chunked_logprobs(
                torch.zeros(rows, WIDTH), torch.nn.Linear(WIDTH, VOCAB), targets, 1.0, NONE, chunk
            )


def run_chunked(chunk: int) -> list[torch.Tensor]:
    """Log-probs, entropies, and the gradients of a mixture of both."""
    generator = torch.Generator().manual_seed(2)
    head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCAB, WIDTH, generator=generator))
    hidden = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
    _, targets = logits_and_targets()
    logprobs, entropies = chunked_logprobs(hidden, head, targets, 0.7, BANNED, chunk)
    weights = torch.linspace(-1, 1, ROWS)
    (logprobs @ weights + (entropies**2).sum()).backward()
    return [logprobs.detach(), entropies.detach(), hidden.grad, head.weight.grad]


@pytest.mark.parametrize("chunk", [1, 4, ROWS - 1, ROWS])
def test_chunks_change_neither_values_nor_gradients(chunk):
    whole = run_chunked(ROWS + 1)
    assert all(float(values.abs().max()) > 0 for values in whole)
    for expected, found in zip(whole, run_chunked(chunk), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_the_analytic_one():
    logits, targets = logits_and_targets(1.0)
    logits.requires_grad_()
    logprobs, _ = token_logprobs(logits, targets, 0.5, NONE)
    logprobs.sum().backward()
    one_hot = torch.nn.functional.one_hot(targets, VOCAB)
    expected = (one_hot - torch.softmax(logits.detach().double() / 0.5, -1)) / 0.5
    torch.testing.assert_close(logits.grad.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 8])
def test_without_rows_there_is_nothing_to_pay(chunk):
    head = torch.nn.Linear(WIDTH, VOCAB)
    hidden = torch.zeros(0, WIDTH, requires_grad=True)
    logprobs, entropies = chunked_logprobs(hidden, head, NONE, 1.0, BANNED, chunk)
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert float(head.weight.grad.abs().sum()) == 0
