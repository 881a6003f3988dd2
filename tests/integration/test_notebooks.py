"""The notebooks run on the real results that the repository holds, and show what those say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from support.runs import make_run

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.fixture(autouse=True)
def _own_settings(tmp_path, monkeypatch):
    """A kernel that finds no settings of the user and leaves none."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))


def _answer(name: str, question: str, figures: int, **changes: str) -> object:
    """Run a notebook in a kernel of its own. Then: the value of an expression after its cells.

    `changes`: other values, as Python writes them, of what its first cell sets.
    """
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    settings = next(cell for cell in notebook.cells if cell.cell_type == "code")
    for variable, value in changes.items():
        settings.source, count = re.subn(
            f"^{variable} = .*", f"{variable} = {value}", settings.source, flags=re.M
        )
        assert count == 1
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
        " 'solved': [int(outcomes.loc[step, 'solved'].sum()) for step in (0, 10)],"
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
        " 'runs': int(sum(mean['runs'].sum() for mean in means.values())),"
        " 'left_out': len(left_out),"
        " 'difference': comparison.difference[0], 'gained': len(comparison.gained)}",
        figures=6,
    )
    names = [f"maze_easy/seed-{seed}" for seed in range(3)]
    names += [
        f"maze_easy_short/model.lora.rank-{rank}_seed-{seed}" for rank in (32, 8) for seed in (0, 1)
    ]
    assert answer["names"] == names
    assert answer["last"] == [
        [line["eval/solve_rate"] for line in _metrics(name) if "eval/solve_rate" in line][-1]
        for name in names
    ]
    assert (answer["runs"], answer["left_out"]) == (7, 0)
    rates = [line["eval/solve_rate"] for line in _metrics(names[0]) if "eval/solve_rate" in line]
    assert answer["difference"] == pytest.approx(rates[-1] - rates[0])
    assert answer["gained"] > 0


@pytest.fixture
def odd_runs(tmp_path) -> Path:
    """A run without episodes, one that only evaluated, one that has not got that far, a sweep."""
    root = tmp_path / "runs"
    make_run(root / "evaluated", [], {0: 0.5})
    make_run(root / "begun", [], {}, status=None)
    for size in (4, 8):
        for rank in (8, 16):
            changes = [f"algorithm.group_size={size}", f"model.lora.rank={rank}"]
            make_run(root / "sweep", changes, {0: 0.25, 2: size * rank / 128})
    return root


@pytest.mark.parametrize(
    ("run", "rates", "figures"), [("evaluated", 1, 3), ("begun", 0, 1), ("sweep", 2, 4)]
)
def test_the_notebook_of_one_run_shows_what_there_is(odd_runs, run, rates, figures):
    path = next((odd_runs / run).glob("maze_easy/*"))
    question = "[len(rates), len(outcomes)]"
    answer = _answer("maze_results.ipynb", question, figures, RUN=f"Path({str(path)!r})")
    assert answer == [rates, 0]


def test_the_notebook_of_a_sweep_has_a_map_of_it(odd_runs):
    question = "[study.varied for study in studies(runs)]"
    answer = _answer("sweep_results.ipynb", question, 6, ROOT=f"Path({str(odd_runs)!r})")
    assert answer == [[], ["algorithm.group_size", "model.lora.rank"]]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_is_kept_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
