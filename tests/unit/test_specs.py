"""What the stages are given of the configuration, where it is more than a copy."""

from __future__ import annotations

import os

import pytest

from support.configs import model_directory
from wayfinder import specs
from wayfinder.config.load import compose


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ((), 4),
        (("cluster.slots=2",), 2),
        (("cluster.slots=8",), 1),
        # Where other jobs have slots too, or the slots other cores than this machine's.
        (("cluster.address=auto",), 1),
        (("cluster.address=auto", "cluster.slots=2", "cluster.cpus_per_slot=16"), 16),
        (("cluster.address=auto", "cluster.cpus_per_slot=0.5"), 1),
        (("cluster.address=auto", "cluster.threads_per_slot=3"), 3),
    ],
)
def test_a_slot_has_the_threads_of_its_share_of_the_cores(tmp_path, monkeypatch, changes, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    model = model_directory(tmp_path / "model")
    config = compose(["+experiment=maze_easy", f"model.path={model}", *changes])
    assert specs.cluster_spec(config).threads_per_slot == threads
