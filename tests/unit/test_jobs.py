"""The commands that whole-run tests and the chaos run start."""

from __future__ import annotations

import pytest

from chaos.chaos import JOB
from support.jobs import command
from wayfinder.config.load import check_command, compose


@pytest.mark.parametrize("extra", [(), JOB], ids=["small", "chaos"])
def test_it_is_accepted_and_what_is_added_wins(tmp_path, extra):
    _, script, *arguments = command(tmp_path, "name", *extra)
    assert script == "run.py"
    check_command(arguments)
    config = compose(arguments)
    assert (config.steps, config.run.name) == (3 if extra else 2, "name")
