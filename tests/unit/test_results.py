"""`task=report`: tables and figures from run directories, whatever state those are in."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from support.runs import evaluation_metrics, make_run, rewrite
from wayfinder.errors import RunDirError
from wayfinder.record import figures
from wayfinder.record.layout import CONFIG_FILE, LOCK_FILE, METRICS_FILE, SUMMARY_FILE
from wayfinder.record.lock import try_lock
from wayfinder.record.metrics import MetricsLog
from wayfinder.record.runs import read_runs
from wayfinder.record.summary import Status
from wayfinder.record.table import markdown, over_seeds, results, studies
from wayfinder.reporting import report_runs
from wayfinder.statistics import wilson_interval


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sizes by two ranks, two seeds each; the seed moves the last rate by a sixteenth."""
    root = tmp_path_factory.mktemp("sweep")
    for size in (4, 16):
        for rank in (8, 32):
            for seed in (0, 1):
                last = 0.5 + (size == 16) * 0.25 + (rank == 32) * 0.125 + seed / 16
                make_run(
                    root,
                    [f"algorithm.group_size={size}", f"model.lora.rank={rank}", f"seed={seed}"],
                    {0: 0.25, 2: last},
                )
    return root


def test_a_row_holds_what_the_run_recorded(sweep):
    runs, left_out = read_runs(sweep)
    assert left_out == []
    table = results(runs).set_index("name")
    row = table.loc["maze_easy/algorithm.group_size-16_model.lora.rank-32_seed-1"]
    expected = {
        "experiment": "maze_easy",
        "status": "finished",
        "seed": 1,
        "algorithm.group_size": 16,
        "model.lora.rank": 32,
        "solve_rate_first": 0.25,
        "solve_rate_best": 0.9375,
        "solve_rate_best_step": 2,
        "solve_rate_last": 0.9375,
        "solve_rate_last_low": 0.8875,
        "solve_rate_last_high": 0.9875,
        "steps_done": 2,
        "steps_to_90": 2,
        "wall_s": 600.0,
        "sampled_tokens": 2000,
        "peak_memory_bytes": 5 * 2**30,
        "mismatch_max": 2e-6,
        "attempts": 1,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    stored = json.loads((sweep / row.name / CONFIG_FILE).read_text())
    assert (row["commit"], row["config_hash"]) == (stored["commit"], stored["config_hash"])
    assert row["overrides"].split() == stored["overrides"]
    assert table["steps_to_90"].notna().sum() == 1


def test_a_sweep_is_one_study_with_means_over_its_seeds(sweep):
    (study,) = studies(read_runs(sweep)[0])
    assert study.varied == ("algorithm.group_size", "model.lora.rank")
    assert list(study.configurations) == [(4, 8), (4, 32), (16, 8), (16, 32)]
    table = over_seeds(study)
    assert list(table["runs"]) == [2, 2, 2, 2]
    assert list(table["last"]) == [0.53125, 0.65625, 0.78125, 0.90625]
    assert list(table["last_least"]) == [0.5, 0.625, 0.75, 0.875]
    assert table["last_sd"].to_numpy() == pytest.approx(0.0625 / np.sqrt(2))
    assert list(table["reached_90"]) == [0, 0, 0, 1]


def test_only_finished_runs_are_averaged(tmp_path):
    make_run(tmp_path, ["seed=0"], {0: 0.25, 2: 0.75})
    make_run(tmp_path, ["seed=1"], {0: 0.25}, Status.FAILED, "SyncError: lost")
    make_run(tmp_path, ["seed=2"], {}, status=None)
    (study,) = studies(read_runs(tmp_path)[0])
    assert study.varied == ()
    (row,) = over_seeds(study).to_dict("records")
    assert (row["runs"], row["others"], row["last"]) == (1, 2, 0.75)


def test_commands_that_name_other_keys_are_other_studies(tmp_path):
    make_run(tmp_path, ["algorithm.group_size=4"], {0: 0.5})
    make_run(tmp_path, ["algorithm.group_size=16"], {0: 0.5})
    make_run(tmp_path, ["env.history=full"], {0: 0.5})
    make_run(tmp_path, ["env.history=4"], {0: 0.5})
    make_run(tmp_path, ["algorithm=dr_grpo"], {0: 0.5})
    runs, _ = read_runs(tmp_path)
    found = {study.keys: list(study.configurations) for study in studies(runs)}
    assert found == {
        ("algorithm",): [()],
        ("algorithm.group_size",): [(4,), (16,)],
        ("env.history",): [(4,), ("full",)],
    }
    assert len({study.slug for study in studies(runs)}) == 3
    table = results(runs).set_index("name")
    assert table.loc["maze_easy/algorithm-dr_grpo_seed-0", "algorithm"] == "dr_grpo"
    assert table.loc["maze_easy/env.history-full_seed-0", "algorithm"] == "grpo"
    assert set(table["env.history"]) == {"1", "4", "full"}


def test_the_files_can_be_read_back(sweep, capsys):
    report_runs(sweep)
    directory = sweep / "report"
    table = results(read_runs(sweep)[0])
    pd.testing.assert_frame_equal(pd.read_parquet(directory / "results.parquet"), table)
    text = pd.read_csv(directory / "results.csv")
    assert list(text.columns) == list(table.columns)
    assert list(text["solve_rate_last"]) == list(table["solve_rate_last"])
    pictures = sorted(path.name for path in directory.glob("*.png"))
    assert [name.split(".")[-2] for name in pictures] == ["cost", "curves", "heat"]
    page = (directory / "results.md").read_text()
    assert all(f"![{name}]({name})" in page for name in pictures)
    assert "| 16 | 32 | 2 | 0 | 0.250 | 0.906 |" in page
    assert str(sweep) not in page
    assert capsys.readouterr().out.count("wrote ") == 6
    before = {path: path.read_bytes() for path in directory.iterdir()}
    report_runs(sweep)  # a report is no run, and says the same again
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_partial_failed_running_and_older_runs_are_rows_and_the_rest_is_named(tmp_path, capsys):
    failed = make_run(tmp_path, ["seed=1"], {0: 0.25}, Status.FAILED, "SyncError: a | b\nlost")
    killed = make_run(tmp_path, ["seed=2"], {0: 0.25, 1: 0.5}, status=None)
    with open(killed / METRICS_FILE, "a") as file:
        file.write('broken\n{"step": 2, "elap')
    older = make_run(tmp_path, ["seed=3"])
    (older / METRICS_FILE).unlink()
    log = MetricsLog(older / METRICS_FILE)
    log.log(0, {"eval/solve_rate": 0.5, "eval/num_episodes": 64.0})
    log.log(1, {"eval/solve_rate": float("nan")})
    stored = json.loads((older / CONFIG_FILE).read_text())
    del stored["config"]["model"], stored["commit"], stored["dirty"]
    (older / CONFIG_FILE).write_text(json.dumps(stored))
    running = make_run(tmp_path, ["seed=4"], {0: 0.25}, status=None)
    no_config = make_run(tmp_path, ["seed=5"], {0: 0.25})
    (no_config / CONFIG_FILE).unlink()
    half = make_run(tmp_path, ["seed=6"], {0: 0.25})
    (half / CONFIG_FILE).write_text('{"format": 1, "conf')
    bad_summary = make_run(tmp_path, ["seed=7"], {0: 0.25})
    (bad_summary / SUMMARY_FILE).write_text("[]")
    make_run(tmp_path, ["seed=8"], {}, status=None)
    lock = try_lock(running / LOCK_FILE)
    try:
        report_runs(tmp_path)
    finally:
        lock.release()
    table = pd.read_csv(tmp_path / "report" / "results.csv").set_index("seed")
    assert dict(table["status"]) == {
        1: "failed",
        2: "unfinished",
        3: "finished",
        4: "running",
        7: "unfinished",
        8: "unfinished",
    }
    assert table.loc[1, "error"] == "SyncError: a | b\nlost"
    assert (table.loc[2, "solve_rate_last"], table.loc[2, "steps_done"]) == (0.5, 1)
    assert table.loc[2, "wall_s"] >= 0
    low, high = wilson_interval(32, 64)
    assert table.loc[3, "solve_rate_last_low"] == pytest.approx(low)
    assert table.loc[3, "solve_rate_last_high"] == pytest.approx(high)
    said = capsys.readouterr().out
    page = (tmp_path / "report" / "results.md").read_text()
    for text in (said, page):
        assert f"maze_easy/seed-5: no {CONFIG_FILE}" in text
        assert f"maze_easy/seed-6: {CONFIG_FILE} is not JSON" in text
        assert f"maze_easy/seed-2: {METRICS_FILE}: 1 broken line" in text
        assert "maze_easy/seed-4: still running" in text
        assert f"maze_easy/seed-7: {SUMMARY_FILE} holds no object" in text
    assert f"{failed.name}: failed: SyncError: a | b lost" in page


def test_a_directory_of_nothing_readable_is_refused(tmp_path):
    with pytest.raises(RunDirError, match=r"found none\. Mend: set root="):
        report_runs(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / CONFIG_FILE).write_text("{}")
    with pytest.raises(RunDirError, match="none that can be read"):
        report_runs(tmp_path)
    assert not (tmp_path / "report").exists()


def test_one_run_directory_is_a_root_too(tmp_path, capsys):
    path = make_run(tmp_path, [], {0: 0.25})
    (path / "wandb" / "offline").mkdir()
    (path / "wandb" / "offline" / "events.log").touch()
    report_runs(path)
    assert list(pd.read_csv(path / "report" / "results.csv")["name"]) == [path.name]
    assert "left out" not in capsys.readouterr().out


def test_a_row_of_another_schema_cannot_spoil_the_table(tmp_path):
    make_run(tmp_path, ["seed=0"], {0: 0.25})
    other = make_run(tmp_path, ["seed=1"], {0: 0.25})
    rewrite(other / CONFIG_FILE, {"commit": 7, "created": "yesterday", "overrides": [7, None]})
    rewrite(other / SUMMARY_FILE, {"peak_memory_bytes": "much", "wall_s": None, "error": ["x"]})
    report_runs(tmp_path)
    table = pd.read_parquet(tmp_path / "report" / "results.parquet").set_index("seed")
    assert (table.loc[1, "commit"], table.loc[1, "error"]) == ("7", "['x']")
    assert pd.isna(table.loc[1, "peak_memory_bytes"])


def test_a_markdown_cell_cannot_break_its_row():
    frame = pd.DataFrame({"a": ["x|y\nz", None], "b": [0.5, float("nan")]})
    assert markdown(frame, {"b": ".2f"}) == (
        "| a | b |\n| --- | --- |\n| x\\|y z | 0.50 |\n|  |  |\n"
    )


# --- figures


def _pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def _num_like(data: bytes, color: tuple[int, int, int], tolerance: int = 12) -> int:
    return int((np.abs(_pixels(data) - color).max(axis=-1) < tolerance).sum())


TAB_BLUE, TAB_ORANGE = (31, 119, 180), (255, 127, 14)


def test_a_curve_has_a_color_for_each_configuration_and_a_band_over_its_seeds(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path, ["algorithm.group_size=4", f"seed={seed}"], {0: 0.2, 2: 0.6 + seed / 4})
    (study,) = studies(read_runs(tmp_path)[0])
    alone = figures.learning_curves(study)
    band = (0.85 * np.array([255] * 3) + 0.15 * np.array(TAB_BLUE)).round()
    assert _num_like(alone, TAB_BLUE) > 300
    assert _num_like(alone, TAB_ORANGE) == 0
    assert _num_like(alone, tuple(band), 4) > 3000
    make_run(tmp_path, ["algorithm.group_size=16"], {0: 0.2, 2: 0.4})
    (study,) = studies(read_runs(tmp_path)[0])
    assert _num_like(figures.learning_curves(study), TAB_ORANGE) > 300


def test_the_mean_curve_uses_the_steps_that_all_runs_have(tmp_path):
    make_run(tmp_path, ["seed=0"], {0: 0.25, 2: 0.5, 4: 1.0})
    make_run(tmp_path, ["seed=1"], {0: 0.75, 2: 1.0})
    runs, _ = read_runs(tmp_path)
    steps, rates = figures._common_steps(runs)
    assert steps == [0, 2]
    assert rates.tolist() == [[0.25, 0.5], [0.75, 1.0]]


def test_a_heat_map_needs_two_varied_keys(sweep):
    runs, _ = read_runs(sweep)
    (study,) = studies(runs)
    heat = figures.heat_maps(study)
    assert _num_like(heat, (68, 1, 84)) > 1000  # the least mean
    assert _num_like(heat, (253, 231, 37)) > 1000  # the greatest
    (one_key,) = studies([run for run in runs if run.value("model.lora.rank") == 8])
    assert one_key.varied == ("algorithm.group_size",)
    assert figures.heat_maps(one_key) is None


def test_a_third_key_gives_a_map_for_each_of_its_values(tmp_path):
    for size in (4, 8):
        for rank in (8, 32):
            for kl in (0, 0.001):
                make_run(
                    tmp_path,
                    [
                        f"algorithm.group_size={size}",
                        f"model.lora.rank={rank}",
                        f"algorithm.kl_coef={kl}",
                    ],
                    {0: size * rank / 256 + 100 * kl},
                )
    (study,) = studies(read_runs(tmp_path)[0])
    wide = _pixels(figures.heat_maps(study)).shape[1]
    (flat,) = studies([r for r in read_runs(tmp_path)[0] if r.value("algorithm.kl_coef") == 0])
    assert wide > 1.5 * _pixels(figures.heat_maps(flat)).shape[1]


def test_cost_has_a_point_for_each_finished_run(sweep, tmp_path):
    (study,) = studies(read_runs(sweep)[0])
    assert _num_like(figures.cost(study), TAB_BLUE) > 50
    make_run(tmp_path, [], {0: 0.5}, status=None)
    (study,) = studies(read_runs(tmp_path)[0])
    assert figures.cost(study) is None


def test_a_study_without_evaluations_has_no_figures(tmp_path):
    path = make_run(tmp_path, [])
    (study,) = studies(read_runs(tmp_path)[0])
    assert figures.learning_curves(study) is None
    MetricsLog(path / METRICS_FILE).log(1, evaluation_metrics(0.5))
    (study,) = studies(read_runs(tmp_path)[0])
    assert figures.learning_curves(study) is not None
