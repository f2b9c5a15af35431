"""The dashboard and the alerts, against the names that metrics have in Prometheus, and in a real Prometheus."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import SERVERS, need, running
from loopback import free_port
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, start_http_server

import ckptstore
from ckptstore.errors import StepExists
from ckptstore.integrations.otel import instrument

pytestmark = pytest.mark.slow

GRAFANA = Path(__file__).parents[2] / "docs/how-to/grafana"
DASHBOARD = json.loads((GRAFANA / "ckptstore.json").read_text())
RULES = GRAFANA / "ckptstore-rules.yml"
BINARIES = SERVERS / "prometheus/root/usr/bin"
WAIT_SECONDS = 120.0


def expressions() -> dict[str, str]:
    """Every PromQL expression that users get, by where it stands."""
    found = {
        f"{panel['title']} {one['refId']}": one["expr"] for panel in DASHBOARD["panels"] for one in panel["targets"]
    }
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    return found | {rule["alert"]: rule["expr"] for rule in rules}


@contextmanager
def exported() -> Iterator[CollectorRegistry]:
    """Metrics of this process, as Prometheus reads them."""
    registry = CollectorRegistry()
    provider = MeterProvider([PrometheusMetricReader(registry=registry)])
    with instrument(None, provider):
        yield registry
    provider.shutdown()


def save_and_load(root: Path, *steps: int) -> None:
    """Some saves, a load, and a save that fails."""
    import torch

    fast = ckptstore.FastTier(root.with_name("fast"))
    with ckptstore.open_store(root.with_name("tiered"), group="solo", fast=fast) as store:
        store.save_async(steps[-1], {"w": torch.zeros(10)}).durable()
    with ckptstore.open_store(root, group="solo") as store:
        for step in steps:
            store.save_directory(step, Path(__file__).parent)
        with pytest.raises(StepExists):
            store.save_directory(steps[-1], None, exists="error")
        assert store.resume() is not None


def test_every_expression_names_metrics_and_labels_that_exist(tmp_path: Path) -> None:
    with exported() as registry:
        save_and_load(tmp_path / "store", 1)
        samples = [sample for metric in registry.collect() for sample in metric.samples]
    metrics = {sample.name for sample in samples}
    labels = {name for sample in samples for name in sample.labels}
    used = set()
    for place, expression in expressions().items():
        words = set(re.findall(r"\bckptstore_\w+|\berror_type\b", re.sub(r'"[^"]*"', '""', expression)))
        assert words <= metrics | labels, f"{place} names {words - metrics - labels}"
        assert words & metrics, place
        used |= words
    families = {re.sub("_(bucket|sum|count|created)$", "", name) for name in used & metrics}
    exported_families = {name for name in metrics if name.startswith("ckptstore_")}
    assert {re.sub("_(bucket|sum|count|created)$", "", name) for name in exported_families} == families, "all are shown"


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    assert DASHBOARD["schemaVersion"] >= 36  # that of Grafana 10 and later
    assert DASHBOARD["title"]
    assert DASHBOARD["uid"]
    variables = {item["name"] for item in DASHBOARD["templating"]["list"]}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for one in panel["targets"]:
            assert one["datasource"]["uid"] == "${datasource}"
            assert set(re.findall(r"\$(\w+)", one["expr"])) <= variables
    assert {"datasource", "store", "window"} == variables


def promtool(*arguments: str | Path) -> str:
    need(BINARIES / "promtool")
    done = subprocess.run([BINARIES / "promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """By Prometheus's own tester of rules, in its time: a checkpoint that grows old, and a save that fails."""
    assert "SUCCESS: 3 rules found" in promtool("check", "rules", RULES)
    store = 'ckptstore_store="s3://bucket/run"'
    series = [
        {"series": f'ckptstore_durable_age_seconds{{{store}, ckptstore_rank="0"}}', "values": "0+60x90"},
        {"series": f'ckptstore_durable_age_seconds{{{store}, ckptstore_rank="1"}}', "values": "1+60x90"},
        {"series": f'ckptstore_failures_total{{{store}, ckptstore_operation="save"}}', "values": "0x90"},
        {"series": f'ckptstore_drain_age_seconds{{{store}, ckptstore_rank="0"}}', "values": "0x10 0+60x70 0x10"},
        {"series": f'ckptstore_drain_age_seconds{{{store}, ckptstore_rank="1"}}', "values": "0x90"},
        {
            "series": f'ckptstore_failures_total{{{store}, ckptstore_operation="save", error_type="StorageFull"}}',
            "values": "_x40 1x50",
        },
    ]

    def at(minutes: int, alert: str, labels: dict[str, str] | None) -> dict[str, Any]:
        expected = [] if labels is None else [{"exp_labels": {"ckptstore_store": "s3://bucket/run", **labels}}]
        return {"eval_time": f"{minutes}m", "alertname": alert, "exp_alerts": expected}

    def failures(store: str, rank: int, error_type: str, values: str) -> dict[str, str]:
        labels = f'ckptstore_store="{store}", ckptstore_rank="{rank}", ckptstore_operation="save"'
        return {"series": f'ckptstore_failures_total{{{labels}, error_type="{error_type}"}}', "values": values}

    series += [
        failures("first", 0, "StorageFull", "_x10 1x30"),  # the first save of a process
        *(failures("two", rank, "", f"0x{minutes}") for rank, minutes in ((0, 90), (1, 60))),
        *(failures("two", rank, "StorageFull", f"_x2 1x{minutes}") for rank, minutes in ((0, 88), (1, 58))),
    ]
    old, fail = "CkptstoreDurableCheckpointTooOld", "CkptstoreSavesFail"
    behind = "CkptstoreStoreBehindNodes"
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        del rule["annotations"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    tests = [
        at(59, old, None),
        at(70, old, {"severity": "critical"}),
        at(39, fail, None),
        at(45, fail, {"severity": "warning"}),
        at(70, fail, None),  # nor of the rank that has ended, whose failure is an hour old
        {
            "eval_time": "12m",
            "alertname": fail,
            "exp_alerts": [
                {"exp_labels": {"ckptstore_store": name, "severity": "warning"}} for name in ("first", "two")
            ],
        },
        at(74, behind, None),
        at(80, behind, {"severity": "warning"}),
        at(85, behind, None),
    ]
    whole = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": tests}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(whole))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "test.yml")


class Prometheus:
    """A server that reads the metrics of this process every second."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **query: str) -> Any:
        """What its HTTP API answers."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            told = json.load(answer)
        assert told["status"] == "success"
        return told["data"]

    def values(self, expression: str) -> list[float]:
        """The values of an expression now."""
        return [float(item["value"][1]) for item in self.ask("query", query=expression)["result"]]

    def wait(self, expression: str, wanted: float) -> None:
        """Until it has that one value."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (found := self.values(expression)) != [wanted]:
            assert time.monotonic() < deadline, f"{expression} is {found}"
            time.sleep(0.2)


def test_a_real_prometheus_answers_what_the_dashboard_asks(tmp_path: Path) -> None:
    need(BINARIES / "prometheus")
    with exported() as registry:
        server, thread = start_http_server(0, "127.0.0.1", registry)
        try:
            port = free_port()
            config = {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(RULES)],
                "scrape_configs": [
                    {"job_name": "job", "static_configs": [{"targets": [f"127.0.0.1:{server.server_port}"]}]}
                ],
            }
            (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
            command = [str(BINARIES / "prometheus"), f"--config.file={tmp_path}/prometheus.yml"]
            command += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"]
            with running(command, port=port, log=tmp_path / "log"):
                check_answers(Prometheus(f"http://127.0.0.1:{port}"), tmp_path / "store")
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def check_answers(prometheus: Prometheus, root: Path) -> None:
    """Save, and read back from Prometheus what was saved."""
    save_and_load(root, 1)
    place = f'{{ckptstore_store="{root}"}}'
    prometheus.wait(f"ckptstore_durable_step{place}", 1)
    save_and_load(root, 2, 3)
    prometheus.wait(f"ckptstore_durable_step{place}", 3)
    prometheus.wait("ckptstore_fast_step", 3)
    prometheus.wait("sum(ckptstore_failures_total)", 2)
    prometheus.wait("sum(ckptstore_load_duration_seconds_count)", 2)
    with ckptstore.open_store(root, group="solo") as store:
        size_bytes = sum(store[step].size_bytes for step in (1, 2, 3))
    written = f'ckptstore_io_bytes_total{{ckptstore_io_direction="write", ckptstore_store="{root}"}}'
    assert prometheus.values(written) == [size_bytes]
    assert prometheus.values(f'ckptstore_durable_step{{ckptstore_store="{root}"}}') == [3]

    alerts = {rule["name"] for rule in prometheus.ask("rules")["groups"][0]["rules"]}
    deadline = time.monotonic() + WAIT_SECONDS
    while {rule["health"] for rule in prometheus.ask("rules")["groups"][0]["rules"]} != {"ok"}:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for place, expression in expressions().items():
        asked = expression.replace("$store", ".*").replace("$window", "5m").replace("> 3600", ">= 0")
        if "[5m:]" in asked:
            asked = asked.replace("[5m:]", "[5m:1s]")  # a run of seconds has no sample in most minutes
        if place in alerts:
            asked = asked.replace("[15m:30s]", "[15m:1s]")
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := prometheus.values(asked)):  # a rate wants two samples
            assert time.monotonic() < deadline, f"{place}: {asked} is empty"
            time.sleep(0.2)
        assert all(value >= 0 for value in found), f"{place}: {found}"
