"""The notebooks run on the real results that the repository holds, and show what those say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

# The code cells in order in one namespace, as a kernel would run them; then one expression.
EXECUTE = """
import json, pathlib, sys
path, question = sys.argv[1:]
names = {}
for number, cell in enumerate(json.loads(pathlib.Path(path).read_text())["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
print("answer", json.dumps(eval(question, names)))
"""


def _answer(name: str, question: str) -> object:
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, name, question],
        cwd=NOTEBOOKS,
        env=os.environ | {"MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1].removeprefix("answer "))


def _metrics(run: str) -> list[dict[str, float]]:
    lines = (NOTEBOOKS / "data" / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_notebook_of_one_run_shows_what_the_run_recorded():
    answer = _answer(
        "maze_results.ipynb",
        "{'rates': rates['rate'].to_list(), 'modes': modes.sum(axis=1).to_list(),"
        " 'solved': [int(part['solved'].sum()) for part in (first, last)],"
        " 'mismatch': mismatch.max().max(), 'seconds': budget['seconds'].sum()}",
    )
    lines = _metrics("maze_easy/seed-0")
    evaluated = [line for line in lines if "eval/solve_rate" in line]
    assert answer["rates"] == [line["eval/solve_rate"] for line in evaluated]
    assert answer["modes"] == [line["eval/num_episodes"] for line in evaluated]
    assert answer["solved"] == [evaluated[i]["eval/num_solved"] for i in (0, -1)]
    assert answer["mismatch"] == max(
        line.get("mismatch/abs_logprob_diff_max", 0.0) for line in lines
    )
    summary = json.loads((NOTEBOOKS / "data/maze_easy/seed-0/summary.json").read_text())
    assert answer["seconds"] == pytest.approx(summary["wall_s"])


def test_the_notebook_of_a_sweep_shows_every_run():
    answer = _answer(
        "sweep_results.ipynb",
        "{'names': list(table['name']), 'last': list(table['solve_rate_last']),"
        " 'runs': int(pd.concat(means)['runs'].sum()), 'left_out': len(left_out),"
        " 'difference': comparison.difference[0], 'gained': len(comparison.gained)}",
    )
    names = [f"maze_easy/seed-{seed}" for seed in range(3)]
    assert answer["names"] == names
    assert answer["last"] == [
        [line["eval/solve_rate"] for line in _metrics(name) if "eval/solve_rate" in line][-1]
        for name in names
    ]
    assert (answer["runs"], answer["left_out"]) == (3, 0)
    rates = [line["eval/solve_rate"] for line in _metrics(names[0]) if "eval/solve_rate" in line]
    assert answer["difference"] == pytest.approx(rates[-1] - rates[0])
    assert answer["gained"] > 0


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_is_kept_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
