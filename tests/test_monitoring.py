"""What is shipped for Prometheus and Grafana speaks of the metrics that there are.

`promtool` is Prometheus' own checker, Debian's package `prometheus`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from pdproxy.core.record import EngineReport
from tests.documents import ROOT
from tests.runtime.test_metrics import Rig

PROMETHEUS = ROOT / "config" / "prometheus"
DASHBOARD = ROOT / "config" / "grafana" / "pdproxy.json"
EXPRESSION = re.compile(r"^ +expr: (?:>-\n((?: {10,}.*\n)+)|(.*)\n)", re.MULTILINE)
# Of Prometheus itself.
OTHERS = {"up"}


def promtool(*args: str, text: str = "") -> str:
    """Run promtool and return its output."""
    ended = subprocess.run(
        ["promtool", *args],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=PROMETHEUS,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def page() -> str:
    """A page on which every metric has a series."""
    rig = Rig()
    rig.everything()
    said = EngineReport(capacity_tokens=200, kv_usage=0.5, running=3, waiting=1)
    rig.fleet.judge.engine_reported(rig.d1, said)
    rig.request(is_stream=True, gaps_s=(1.0, 1.0))
    return rig.metrics.exposition()[0].decode()


def panels() -> list[dict[str, Any]]:
    return [panel for panel in orjson.loads(DASHBOARD.read_bytes())["panels"] if "targets" in panel]


def shown_expressions() -> Iterator[str]:
    for panel in panels():
        for target in panel["targets"]:
            expression: str = target["expr"]
            yield expression.replace("$__rate_interval", "5m").replace("$job", "pdproxy")


def alert_expressions() -> list[str]:
    found = EXPRESSION.findall((PROMETHEUS / "alerts.yml").read_text("utf-8"))
    return [folded or plain for folded, plain in found]


@pytest.mark.needs("promtool")
def test_page_follows_the_conventions_of_prometheus(page: str) -> None:
    assert promtool("check", "metrics", text=page) == ""


@pytest.mark.needs("promtool")
def test_scrape_configuration_and_alerts_are_valid() -> None:
    output = promtool("check", "config", "prometheus.yml")

    assert f"{len(alert_expressions())} rules found" in output


@pytest.mark.needs("promtool")
def test_each_alert_rises_when_it_should_and_not_before() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_every_alert_is_tried_both_ways() -> None:
    names = re.findall(r"- alert: (\w+)", (PROMETHEUS / "alerts.yml").read_text("utf-8"))
    tried = re.findall(r"alertname: (\w+)", (PROMETHEUS / "alerts_test.yml").read_text("utf-8"))

    assert sorted(tried) == sorted(names * 2)
    assert len(alert_expressions()) == len(names)


@pytest.mark.needs("promtool")
def test_every_expression_of_the_dashboard_can_be_read(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression}
        for number, expression in enumerate(shown_expressions())
    ]
    path = tmp_path / "rules.yml"  # JSON is YAML
    path.write_bytes(orjson.dumps({"groups": [{"name": "panels", "rules": rules}]}))

    assert f"{len(rules)} rules found" in promtool("check", "rules", str(path))


@pytest.mark.needs("promtool")
def test_panel_of_the_kv_cache_shows_what_engines_say_else_the_forecast(tmp_path: Path) -> None:
    (expression,) = (each for each in shown_expressions() if "kv_usage_ratio" in each)

    def series(name: str, engine: str) -> str:
        return f'{name}{{job="pdproxy", exported_instance="{engine}"}}'

    engine, forecast = "pdproxy_instance_engine_kv_usage_ratio", "pdproxy_instance_kv_usage_ratio"
    given = {series(engine, "d:1"): 0.5, series(forecast, "d:1"): 1.2, series(forecast, "d:2"): 0.7}
    shown = [(series(engine, "d:1"), 0.5), (series(forecast, "d:2"), 0.7)]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": f"{value}x5"} for name, value in given.items()],
        "promql_expr_test": [
            {
                "expr": expression,
                "eval_time": "3m",
                "exp_samples": [{"labels": name, "value": value} for name, value in shown],
            }
        ],
    }
    path = tmp_path / "panel_test.yml"  # JSON is YAML
    path.write_bytes(orjson.dumps({"rule_files": [], "tests": [test]}))

    promtool("test", "rules", str(path))


def test_every_metric_and_label_that_is_asked_for_exists(page: str) -> None:
    series: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)(\{.*\})? ", page, re.MULTILINE):
        series.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    # What the scraper adds, and how it calls the label that is its own.
    added = {"job", "instance"}
    for expression in (*shown_expressions(), *alert_expressions()):
        for name, matchers in re.findall(r"\b([a-z_]+)\{([^}]*)\}", expression):
            if name in OTHERS:
                continue
            assert name in series, f"{name} in {expression}"
            for label in re.findall(r"(\w+)=", matchers):
                assert label in series[name] | added, f"{label} of {name}"
        names = re.findall(r"\b((?:pdproxy|process)_[a-z_]+)\b", expression)
        assert set(names) <= series.keys(), expression
        grouped = ",".join(re.findall(r"by \(([^)]*)\)", expression)).split(",")
        known = set().union(*(series[name] for name in names)) | {"", "exported_instance"}
        assert {label.strip() for label in grouped} <= known, expression


def test_panels_do_not_overlap_and_each_has_its_title() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not own & cells, panel["title"]
        cells |= own
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles)
