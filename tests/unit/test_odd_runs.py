"""A report of runs that are damaged, unequal, many, or oddly named: all the same, and said."""

from __future__ import annotations

import io
import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from PIL import Image

from support.configs import model_directory
from support.runs import make_run, rewrite
from wayfinder import multirun, reporting
from wayfinder.config.load import compose
from wayfinder.errors import RunDirError
from wayfinder.record import figures
from wayfinder.record.layout import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE
from wayfinder.record.metrics import MetricsLog
from wayfinder.record.runs import read_runs
from wayfinder.record.table import over_seeds, remarks, studies
from wayfinder.reporting import report, report_runs

WHOLE = {0: 0.25, 2: 0.5, 4: 1.0}


def one_study(root: Path):
    (study,) = studies(read_runs(root)[0])
    return study


def change_config(path: Path, **changes) -> None:
    """Of a key of the first level."""
    stored = json.loads((path / CONFIG_FILE).read_text())
    rewrite(path / CONFIG_FILE, {"config": stored["config"] | changes})


# --- what is no part of a mean, or an odd one


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ("a part of the last line", "metrics.jsonl: 1 broken lines were left out"),
        # Two lines are of step 4: the step is there.
        ("a part of the last line", "metrics.jsonl lacks the last evaluation, of 1"),
        ("all but the last line", "metrics.jsonl lacks the last evaluation, of 1"),
        ("the first line", "metrics.jsonl ends at step 0, summary.json at step 4"),
    ],
)
def test_a_run_whose_metrics_were_cut_is_not_in_the_means(tmp_path, capsys, kept, words):
    make_run(tmp_path, ["seed=0"], WHOLE)
    cut = make_run(tmp_path, ["seed=1"], WHOLE) / METRICS_FILE
    first, *_, last = lines = cut.read_bytes().splitlines(keepends=True)
    whole = b"".join(lines)
    left = {"the first line": first, "all but the last line": whole.removesuffix(last)}
    cut.write_bytes(left.get(kept, whole[:-40]))
    (row,) = over_seeds(one_study(tmp_path)).to_dict("records")
    report_runs(tmp_path)
    assert (row["runs"], row["others"], row["last"]) == (1, 1, 1.0)
    assert f"seed-1: {words}" in capsys.readouterr().out


def test_a_rate_that_is_no_number_is_none(tmp_path):
    make_run(tmp_path, ["seed=0"], {0: 0.5})
    nan = make_run(tmp_path, ["seed=1"])
    MetricsLog(nan / METRICS_FILE).log(0, {"eval/solve_rate": 0.0})
    text = (nan / METRICS_FILE).read_text()
    (nan / METRICS_FILE).write_text(
        text.replace('"eval/solve_rate": 0.0', '"eval/solve_rate": NaN')
    )
    study = one_study(tmp_path)
    (row,) = over_seeds(study).to_dict("records")
    assert (row["runs"], row["others"], row["last"]) == (1, 1, 0.5)
    assert remarks(study) == ["maze_easy: 1 finished without an evaluation, and not in the means"]


def test_runs_that_are_no_repetitions_of_each_other_are_named(tmp_path, capsys):
    first = make_run(tmp_path, ["seed=0"], {0: 0.5})
    again = make_run(tmp_path, ["seed=1"], {0: 0.5})
    change_config(again, seed=0)
    study = one_study(tmp_path)
    assert remarks(study) == ["maze_easy: seed 0 is 2 times in the means"]
    change_config(again, seed=1, steps=99)
    change_config(first, later_key=1)  # of another version
    report_runs(tmp_path)
    said = "maze_easy: the runs in one mean differ in steps"
    assert f"note maze_easy: {said}\n" in capsys.readouterr().out
    assert f"- {said}\n" in (tmp_path / "report" / "results.md").read_text()
    change_config(again, seed=1, steps=10, task="of another version")
    assert remarks(one_study(tmp_path)) == []


# --- what a reader did not expect


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (SUMMARY_FILE, {"peak_memory_bytes": 1234.5}),
        (SUMMARY_FILE, {"peak_memory_bytes": 10**400}),
        (CONFIG_FILE, {"seed": 0.5}),
        (CONFIG_FILE, {"seed": 10**30}),
    ],
)
def test_a_number_that_no_column_can_hold_is_missing(tmp_path, file, change):
    path = make_run(tmp_path, [], {0: 0.5})
    if file == CONFIG_FILE:
        change_config(path, **change)
    else:
        rewrite(path / file, change)
    report_runs(tmp_path)
    table = pd.read_parquet(tmp_path / "report" / "results.parquet")
    (name,) = change
    assert pd.isna(table.loc[0, name])


def test_a_step_that_cannot_be_is_a_broken_line(tmp_path, capsys):
    path = make_run(tmp_path, [], {0: 0.5})
    with open(path / METRICS_FILE, "a") as file:
        file.write(f'{{"step": {10**400}, "elapsed_s": 1.0}}\n{{"step": -1, "elapsed_s": 1.0}}\n')
    report_runs(tmp_path)
    assert "metrics.jsonl: 2 broken lines were left out" in capsys.readouterr().out


def test_runs_behind_links_are_found_once(tmp_path):
    path = make_run(tmp_path / "elsewhere", [], {0: 0.5})
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").symlink_to(path)
    (tmp_path / "root" / "b").symlink_to(path.parent)
    (tmp_path / "root" / "c").symlink_to(tmp_path / "root")
    assert [run.name for run in read_runs(tmp_path / "root")[0]] == ["a"]


def test_a_link_to_a_run_beside_it_does_not_take_its_name(tmp_path):
    path = make_run(tmp_path, [], {0: 0.5})
    (tmp_path / "best").symlink_to(path)
    (tmp_path / "above").symlink_to(tmp_path.parent)
    assert [run.name for run in read_runs(tmp_path)[0]] == ["maze_easy/seed-0"]
    assert [run.path for run in read_runs(tmp_path / "best")[0]] == [tmp_path / "best"]


def test_names_that_a_file_cannot_have_are_kept_apart(tmp_path):
    for experiment in ("実験", "試験", "maze_easy"):
        path = make_run(tmp_path / experiment, ["algorithm=rloo"], {0: 0.5})
        change_config(path, experiment=experiment)
    change_config(make_run(tmp_path / "x", [], {0: 0.5}), experiment="maze_easy+algorithm")
    change_config(make_run(tmp_path / "y", [], {0: 0.5}), experiment="maze_easy_algorithm")
    found = studies(read_runs(tmp_path)[0])
    assert len(found) == 5
    slugs = {study.slug for study in found}
    assert len(slugs) == 5
    assert all(slug.isascii() and "/" not in slug for slug in slugs)


def test_the_figures_of_runs_without_an_experiment_are_no_hidden_files(tmp_path):
    change_config(make_run(tmp_path, [], {0: 0.5}), experiment="")
    assert one_study(tmp_path).slug == "runs"


def test_a_dollar_sign_begins_no_formula(tmp_path):
    for name in ("/d/$a_{$", "/d/$b_{$"):
        make_run(tmp_path, [f"model.path='{name}'"], {0: 0.5})
    assert report_runs(tmp_path)


def _odd_first(write_page):
    def write(path: Path) -> Path:
        if path.name == "seed-0":
            raise TypeError("odd")
        return write_page(path)

    return write


def test_a_page_that_cannot_be_written_costs_no_other(tmp_path, capsys, monkeypatch):
    first, second = (make_run(tmp_path / "runs", [f"seed={seed}"], {0: 0.5}) for seed in (0, 1))
    (first / "page.html").mkdir()
    (first / METRICS_FILE).unlink()
    (first / METRICS_FILE).mkdir()
    model = model_directory(tmp_path / "model")
    config = compose(["task=report", f"root={tmp_path / 'runs'}", f"model.path={model}"])
    with pytest.raises(RunDirError, match="no page of maze_easy/seed-0: "):
        report(config, [], 0.0)
    assert (second / "page.html").stat().st_size > 10_000
    assert "note maze_easy/seed-0: metrics.jsonl: Is a directory" in capsys.readouterr().out
    # What nobody foresaw is told with its trace, and costs no more.
    (second / "page.html").unlink()
    monkeypatch.setattr(reporting, "write_page", _odd_first(reporting.write_page))
    with pytest.raises(RunDirError, match="no page of maze_easy/seed-0: TypeError: odd"):
        report(config, [], 0.0)
    assert (second / "page.html").exists()
    assert "TypeError: odd" in capsys.readouterr().err


def test_a_report_directory_that_is_a_file_is_refused(tmp_path):
    make_run(tmp_path, [], {0: 0.5})
    (tmp_path / "report").touch()
    with pytest.raises(RunDirError, match="report: a writable path was expected"):
        report_runs(tmp_path)


# --- the last word of a multirun


def finished_jobs(monkeypatch, *roots: Path) -> None:
    notes = multirun.JobNotes()
    monkeypatch.setattr(multirun, "_begun", [])
    notes.on_multirun_start()
    for root in roots:
        config = SimpleNamespace(paths=SimpleNamespace(root=str(root)))
        notes.on_job_start(config)
        notes.on_job_end(config, SimpleNamespace(status=SimpleNamespace(name="COMPLETED")))


def test_a_report_that_breaks_is_no_failed_job(tmp_path, monkeypatch, capsys):
    def broken(_):
        raise ZeroDivisionError("a bug of the report")

    monkeypatch.setattr(reporting, "report_runs", broken)
    finished_jobs(monkeypatch, tmp_path)
    assert multirun.conclude()
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "ZeroDivisionError: a bug of the report" in said
    assert f"no table of the runs below {tmp_path}" in said


def test_each_root_of_a_multirun_is_reported(tmp_path, monkeypatch):
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        make_run(root, [], {0: 0.5})
    finished_jobs(monkeypatch, *roots, roots[0])
    assert multirun.conclude()
    assert all((root / "report" / "results.csv").exists() for root in roots)


# --- figures of large studies


def size(data: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(data)).size


def texts(monkeypatch) -> list[str]:
    """What the figures that are drawn from now on say."""
    said: list[str] = []
    png = figures._png

    def noted(figure):
        from matplotlib.text import Text

        said.extend(text.get_text() for text in figure.findobj(Text))
        return png(figure)

    monkeypatch.setattr(figures, "_png", noted)
    return said


def test_a_search_is_drawn_against_each_key_and_not_as_a_map(tmp_path, monkeypatch):
    draw = random.Random(0)
    for _ in range(8):
        values = [f"algorithm.optimizer.lr={draw.uniform(1e-4, 3e-3)}"]
        values += [f"algorithm.kl_coef={draw.choice([0, 0.01])}"]
        make_run(tmp_path, values, {0: 0.2, 2: draw.random()})
    study = one_study(tmp_path)
    assert figures.heat_maps(study) is None
    said = texts(monkeypatch)
    width, height = size(figures.against_keys(study))
    assert width < 1500
    assert height < 600
    assert {"algorithm.kl_coef", "algorithm.optimizer.lr"} <= set(said)


def many_runs(root: Path, **values: range) -> None:
    """A run for every setting of four keys, without what a figure does not need."""
    keys = ("algorithm.group_size", "model.lora.rank", "algorithm.mini_batches", "steps")
    for number, setting in enumerate(itertools.product(*values.values())):
        path = root / str(number)
        path.mkdir(parents=True)
        changed = [f"{key}={value}" for key, value in zip(keys, setting, strict=True)]
        stored = {"overrides": changed, "config": {"experiment": "e", "seed": 0}}
        (path / CONFIG_FILE).write_text(json.dumps(stored))
        (path / SUMMARY_FILE).write_text('{"status": "finished"}')
        line = {"step": 0, "elapsed_s": 1.0, "eval/solve_rate": number / 1000}
        (path / METRICS_FILE).write_text(json.dumps(line) + "\n")


def test_many_settings_are_cut_and_the_figures_say_so(tmp_path, monkeypatch):
    many_runs(tmp_path, size=range(5), rank=range(5), mini_batches=range(4), steps=range(4))
    study = one_study(tmp_path)
    said = texts(monkeypatch)
    width, height = size(figures.heat_maps(study))
    assert "e (the first 12 of 16 settings of algorithm.mini_batches, steps)" in said
    assert sum(text.endswith("\nn=1") for text in said) == 12 * 25
    assert max(width, height) < 3000
    said.clear()
    assert max(size(figures.learning_curves(study))) < 1500
    assert "the best 20 of 400" in said
    named = [text for text in said if text.endswith(" (1 run)")]
    assert len(named) == 20
    assert all(text.startswith("group_size=4, ") for text in named)


def test_a_sweep_that_goes_on_has_a_key_to_its_colors(tmp_path, monkeypatch):
    for rank in (8, 32):
        make_run(tmp_path, [f"model.lora.rank={rank}"], {0: 0.25}, status=None)
    said = texts(monkeypatch)
    figures.learning_curves(one_study(tmp_path))
    assert {"rank=8 (0 of 1 finished)", "rank=32 (0 of 1 finished)"} <= set(said)
