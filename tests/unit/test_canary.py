"""What the loop concludes from a step with learning rate 0."""

from __future__ import annotations

import pytest

from wayfinder.canary import check_nothing_learnt
from wayfinder.errors import InvariantError
from wayfinder.runtime.adapter_sync import Publication

BEFORE = Publication(3, "3", "a" * 64, 8)
SAME = Publication(4, "4", "a" * 64, 8)
OTHER = Publication(4, "4", "b" * 64, 8)


def test_ratios_of_one_and_an_equal_adapter_pass():
    check_nothing_learnt(4, {"train/ratio_mean": 1.00000001}, BEFORE, SAME)
    check_nothing_learnt(4, {}, BEFORE, SAME)  # no group had signal


@pytest.mark.parametrize(("ratio", "after"), [(1.001, SAME), (1.0, OTHER), (float("nan"), SAME)])
def test_anything_else_stops_the_run(ratio, after):
    with pytest.raises(InvariantError, match="learning rate 0"):
        check_nothing_learnt(4, {"train/ratio_mean": ratio}, BEFORE, after)
