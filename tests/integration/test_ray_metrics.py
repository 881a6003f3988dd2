"""Figures of a run as Prometheus finds them at a real Ray, and the dashboard that asks for them."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from wayfinder.record.metrics import RESERVED, read_metrics
from wayfinder.record.tracking import Trackers
from wayfinder.runtime.ray_metrics import RayMetrics, gauge_name

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
# Every metric that a run had, with its last value.
METRICS = {
    name: value
    for line in read_metrics(ROOT / "experiments" / "05-maze-hard" / "seed-0" / "metrics.jsonl")
    for name, value in line.items()
    if name not in RESERVED
}
DASHBOARD = ROOT / "experiments" / "hyperpod" / "grafana_dashboard.json"
RUN = "maze_easy/seed-0"
_SAMPLE = re.compile(r"^(\w+)\{([^}]*)\} (\S+)$", re.M)


@pytest.fixture(scope="module")
def scraped():
    """name -> [(labels, value)] of the local endpoint, after two steps of the second run of a
    process: the jobs of a sweep follow each other in one, each with a Ray of its own."""
    with _running_ray():
        RayMetrics("maze_easy/before").log(1, METRICS)
    with _running_ray():
        trackers = Trackers([])
        trackers.add(lambda: RayMetrics(RUN), "ray metrics")
        trackers.log(1, {**METRICS, "eval/solve_rate": 0.25, "train/entropy": float("nan")})
        trackers.log(2, METRICS)
        assert trackers.disabled == {}
        (node,) = ray.nodes()
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        expected = {f"ray_{gauge_name(name)}" for name in METRICS} | {"ray_node_mem_used"}
        deadline = time.monotonic() + 120
        while not expected <= (found := _scrape(url)).keys():
            assert time.monotonic() < deadline, f"{url} lacks {sorted(expected - found.keys())}"
            time.sleep(2)
        return found


@contextmanager
def _running_ray():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


def _scrape(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    except OSError:  # the agent is not up yet
        return {}
    found: dict[str, list] = {}
    for name, labels, value in _SAMPLE.findall(text):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found.setdefault(name, []).append((pairs, float(value)))
    return found


def test_every_metric_is_there_with_its_last_value_and_its_run(scraped):
    for name, value in {**METRICS, "step": 2}.items():
        ((labels, shown),) = scraped[f"ray_{gauge_name(name)}"]
        assert labels["run"] == RUN
        assert shown == pytest.approx(value), name


def test_every_query_of_the_dashboard_names_a_metric_that_is_there(scraped):
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    assert len(queries) > 20
    for query in queries:
        names = set(re.findall(r"\bray_\w+", query))
        assert names, query
        assert names <= scraped.keys(), query


def test_panels_of_the_dashboard_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(places)) == len(places)
    assert all(x < 24 for x, _ in places)
    assert len({panel["id"] for panel in panels}) == len(panels)
