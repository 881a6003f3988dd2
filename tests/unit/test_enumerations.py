"""The configuration names what the algorithms know, although it may not import them."""

from __future__ import annotations

import pytest

from wayfinder.algo import advantage, filters, importance, kl, reduce, surrogate
from wayfinder.config import schema


@pytest.mark.parametrize(
    ("configured", "known"),
    [
        (schema.Advantage, advantage.AdvantageKind),
        (schema.Loss, surrogate.LossKind),
        (schema.Reduction, reduce.ReductionMode),
        (schema.KlKind, kl.KlKind),
        (schema.KlPlacement, kl.KlPlacement),
        (schema.Importance, importance.ImportanceMode),
        (schema.GroupFilter, filters.GroupFilter),
    ],
)
def test_every_choice_of_the_config_is_one_of_the_algorithm(configured, known):
    assert list(configured) == list(known)


def test_group_relative_advantages_are_those_of_the_rule():
    from wayfinder.config.rules import GROUP_RELATIVE

    expected = {str(kind) for kind in advantage.AdvantageKind if kind.is_group_relative}
    assert {str(kind) for kind in GROUP_RELATIVE} == expected
