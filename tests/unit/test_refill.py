"""How many more groups the loop rolls out under each filter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from wayfinder.loop import _groups_to_refill


def groups(with_signal: int, without: int) -> list[SimpleNamespace]:
    def group(*rewards: float) -> SimpleNamespace:
        return SimpleNamespace(valid=[SimpleNamespace(reward=reward) for reward in rewards])

    return [group(1.0, 0.0)] * with_signal + [group(0.0, 0.0)] * without


@pytest.mark.parametrize(
    ("filter_", "rolled_out", "expected"),
    [
        ("refill", (4, 0), 0),
        ("refill", (1, 3), 3),
        ("refill", (1, 5), 1),  # 2 of the 3 extra groups are spent
        ("refill", (0, 7), 0),  # all of them are: a hopeless task set ends
        ("drop", (0, 4), 0),
        ("keep", (0, 4), 0),
    ],
)
def test_refill_asks_for_what_lacks_within_its_bound(filter_, rolled_out, expected):
    algorithm = SimpleNamespace(filter=filter_, tasks_per_step=4, refill_groups=3)
    assert _groups_to_refill(algorithm, groups(*rolled_out)) == expected
