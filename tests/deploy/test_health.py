"""What watches a daemon, against a real one: probes, scrape config and dashboard."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed import DEPLOY, REGIONS, load, pod_containers, site

from tests.daemon.daemons import Daemons, daemons

METRIC = re.compile(r"\bgeotrain_\w+")
LIMIT_S = 30


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Daemons]:
    with daemons(tmp_path, 2) as running:
        yield running


def dashboard() -> dict:
    (document,) = load(DEPLOY / "grafana" / "dashboard.json")
    return document


def scrape() -> dict:
    (document,) = load(DEPLOY / "prometheus" / "scrape.yml")
    return document


def targets() -> list[dict]:
    return [target for panel in dashboard()["panels"] for target in panel["targets"]]


def exported(text: str) -> dict[str, set[str]]:
    """Metric -> its labels, as Prometheus reads the text."""
    found: dict[str, set[str]] = {}
    for name in re.findall(r"^# TYPE (\S+) ", text, flags=re.MULTILINE):
        found[name] = set()
    for name, labels in re.findall(r"^(\w+)\{(.*)\} ", text, flags=re.MULTILINE):
        found[name] |= set(re.findall(r'(\w+)="', labels))
    return found


def test_every_metric_and_label_in_the_dashboard_is_one_that_a_daemon_exports(pair):
    rank = pair.attach("a")
    rank.report({"step": 3, "num_tokens": 1000})
    pair.wait_for("a", lambda s: s["egress"]["usd_per_million_tokens"] is not None)
    pair.wait_for("a", lambda s: (s["links"]["b"].get("rtt_s") or {}).get("p99") is not None)
    metrics = exported(pair.get("a", scrape()["scrape_configs"][0]["metrics_path"]))
    rank.close()
    assert targets()
    for target in targets():
        (name,) = set(METRIC.findall(target["expr"]))
        assert name in metrics, target["expr"]
        known = metrics[name] | {"site"}
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, target
        assert set(re.findall(r"(\w+)=~?\"", target["expr"])) <= known, target
    for variable in dashboard()["templating"]["list"]:
        assert set(METRIC.findall(str(variable["query"]))) <= set(metrics)


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_a_probe_succeeds_while_the_daemon_runs_and_fails_without_it(pair, probe):
    command = pod_containers()["daemon"][probe]["exec"]["command"]
    assert command[0] == "geotrain"
    environment = {**os.environ, "GEOTRAIN_CONFIG": str(pair.config_path("a"))}
    # A proxy that the container has for other things must not be asked for loopback.
    environment["http_proxy"] = "http://127.0.0.1:9"

    def ask() -> int:
        argv = [sys.executable, "-m", "geotrain", *command[1:]]
        return subprocess.run(
            argv, env=environment, capture_output=True, timeout=LIMIT_S
        ).returncode

    assert ask() == 0
    pair.stop("a")
    assert ask() == 1


def test_the_page_that_the_readme_names_is_healthy(pair):
    assert pair.get("a", "/healthz") == "ok\n"


def test_the_scrape_config_asks_the_status_page():
    (job,) = scrape()["scrape_configs"]
    (static,) = job["static_configs"]
    assert static["targets"] == [site(region).site.status for region in REGIONS[:1]]
    assert {site(region).site.status for region in REGIONS} == set(static["targets"])
    assert static["labels"]["site"] in REGIONS
    assert set(job) <= {"job_name", "metrics_path", "static_configs", "metric_relabel_configs"}
    (keep,) = job["metric_relabel_configs"]
    assert (keep["source_labels"], keep["action"]) == (["__name__"], "keep")


def test_the_scrape_config_keeps_every_metric(pair):
    (keep,) = scrape()["scrape_configs"][0]["metric_relabel_configs"]
    names = exported(pair.get("a", "/metrics"))
    assert len(names) > 10
    assert all(re.fullmatch(keep["regex"], name) for name in names)


def test_dashboard_panels_have_ids_places_and_queries():
    board = dashboard()
    assert board["uid"] == "geotrain"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries", "state-timeline")
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["targets"]


def test_dashboard_queries_are_balanced_and_use_its_variables():
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert variables == {"datasource", "site"}
    for target in targets():
        expression = target["expr"]
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression
        assert '{site=~"$site"}' in expression
        assert target["datasource"]["uid"] == "${datasource}"
    refs = [[t["refId"] for t in panel["targets"]] for panel in dashboard()["panels"]]
    assert all(len(set(ids)) == len(ids) for ids in refs)


def test_a_counter_is_shown_as_a_rate():
    for target in targets():
        if METRIC.search(target["expr"]).group().endswith("_total"):
            assert "rate(" in target["expr"], target["expr"]
