"""The notebooks run on the real results that the repository holds, and show what those say."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.fixture(autouse=True)
def _own_settings(tmp_path, monkeypatch):
    """A kernel that finds no settings of the user and leaves none."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))


def _answer(name: str, question: str, figures: int) -> object:
    """Run a notebook in a kernel of its own. Then: the value of an expression after its cells."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    ask = f"import json; print(json.dumps({question}))"
    notebook.cells.append(nbformat.v4.new_code_cell(ask))
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": NOTEBOOKS}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = [output.text for output in outputs if output.get("name") == "stderr"]
    assert said == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == figures
    return json.loads(outputs[-1].text)


def _metrics(run: str) -> list[dict[str, float]]:
    lines = (NOTEBOOKS / "data" / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_notebook_of_one_run_shows_what_the_run_recorded():
    answer = _answer(
        "maze_results.ipynb",
        "{'rates': rates['rate'].to_list(), 'modes': modes.sum(axis=1).to_list(),"
        " 'solved': [int(part['solved'].sum()) for part in (first, last)],"
        " 'mismatch': mismatch.max().max(), 'seconds': budget['seconds'].sum()}",
        figures=5,
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
        figures=3,
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
