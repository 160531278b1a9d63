"""The published schema, manual page, alerts and examples of shmacc-inspect are right."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any, Final

import jsonschema
import numpy as np
import pytest
from helpers import inspect_tool
from helpers.apart import Crew
from helpers.inspect_tool import ask, run, start
from helpers.support import run_to_end, until

import reference
import shmacc
import shmacc_inspect
from shmacc.inspection import StallKind
from shmacc_inspect import output
from shmacc_inspect.parsers import VERBS

DOCS: Final = Path(__file__).parents[2] / "docs"
STANDING_STILL: Final = DOCS / "standing-still.md"
OPERATING: Final = DOCS / "operating.md"
ALERTS: Final = DOCS / "inspect" / "alerts.yml"
DASHBOARD: Final = DOCS / "inspect" / "dashboard.json"
PAGE: Final = DOCS / "inspect.md"


def test_schema_and_manual_pages_are_up_to_date() -> None:
    """If this fails, run `make reference`."""
    schema = json.loads(reference.SCHEMA.read_text(encoding="utf-8"))
    assert schema == json.loads(reference.schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert reference.PAGE.read_text(encoding="utf-8") == reference.manual()
    assert reference.PAGE_OF_RUN.read_text(encoding="utf-8") == reference.manual_of_run()
    assert set(VERBS) == set(output.ANSWERS)


def test_every_field_of_the_schema_is_described() -> None:
    schema = json.loads(reference.schema())["$defs"]
    for record in reference.records():
        properties = schema[record.__name__]["properties"]
        properties.pop("schema_version", None)
        assert all(said.get("description") for said in properties.values()), record
        fields = {field.name for field in dataclasses.fields(record)}
        assert fields - output.NAME_FIELDS.keys() <= properties.keys(), record


@functools.cache
def _validator(verb: str) -> Any:
    schema = json.loads(reference.schema())
    return jsonschema.Draft202012Validator({**schema, "anyOf": [{"$ref": f"#/$defs/{verb}"}]})


def test_every_answer_follows_the_schema(crew: Crew) -> None:
    with shmacc.SparseConditionalAccumulator(np.float32, [100, 4], "table") as acc:
        acc.apply_grad([3, 5], np.ones((2, 4), np.float32))
        shmacc.ConditionalAccumulator(np.float32, [2], "left").close()
        inspect_tool.path_of("junk").write_bytes(b"no segment" * 1000)
        taker = start(crew, inspect_tool.wait_in_queue, "table", 5)
        until(lambda: acc.stats().waiting == 1)
        for command, status in (
            ("list", 0), ("show table --rows 1 --values", 0), ("show junk", 1), ("check", 1),
            ("clean", 0), ("remove table", 1), ("remove left --yes", 0),
            ("wait table --for count=1", 0), ("metrics", 0), ("cancel table --yes", 0),
        ):  # fmt: skip
            verb, *arguments = command.split()
            answer = ask(verb, *arguments, status=status)
            _validator(verb).validate(answer)
            with pytest.raises(jsonschema.ValidationError):
                _validator(verb).validate({**answer, "schema_version": 1})
        watched = run("watch", "--count", "1", "--interval", "0.05", "--json").stdout
        for line in watched.splitlines():
            _validator("watch").validate(json.loads(line))
        taker.result()
        acc.unlink()
    inspect_tool.path_of("junk").unlink()


@pytest.mark.skipif(shutil.which("man") is None, reason="needs man")
def test_the_manual_page_is_well_formed() -> None:
    done = run_to_end(
        ["man", "--warnings", "-E", "UTF-8", "-l", reference.PAGE],
        env={"MANWIDTH": "100", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
    )
    assert done.stderr == ""
    assert "'emb*' --sort bytes" in done.stdout


def metrics_that_there_are() -> set[str]:
    """Return the names of all samples, for each kind of segment."""
    only_at_times = {
        *("head_waits_seconds", "head_requires", "failure_timestamp_seconds", "stall"),
        *("late_seconds_total", "late_rounds_total"),
        *("run_restarts_total", "run_state"),  # of runs: tests/inspection/test_runs.py
    }
    names = {f"shmacc_{name}" for name in only_at_times}
    with (
        shmacc.Parameters({"w": np.zeros(2), "emb": shmacc.TableSpec((2,))}, "params") as params,
        shmacc.AccumulatorGroup(params.member_specs(), "group") as group,
    ):
        metrics = ask("metrics")["metrics"]
        group.unlink()
        params.unlink()
    for metric in metrics:
        names |= {sample["name"] for sample in metric["samples"]}
        assert metric["samples"] or metric["name"] in {
            name.removesuffix("_total") for name in names
        }
    return names


def named(expressions: list[str]) -> set[str]:
    return set(re.findall(r"shmacc_\w+", " ".join(expressions)))


def test_alerts_use_existing_metrics() -> None:
    expressions = re.findall(r"^ +expr: (.*)$", ALERTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(expressions) >= 10
    assert named(expressions) <= metrics_that_there_are()


# Flags that other metrics show better. They are in `show`, and users can make rules of them.
NOT_ON_THE_DASHBOARD: Final = {"shmacc_finished", "shmacc_sealed", "shmacc_round_final"}


def test_the_dashboard_shows_every_metric() -> None:
    """Only NOT_ON_THE_DASHBOARD is left out. No panel uses a metric that does not exist."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    variables = [each["query"] for each in dashboard["templating"]["list"][1:]]
    found = named(expressions) | named([each["query"] for each in variables])
    assert found == metrics_that_there_are() - NOT_ON_THE_DASHBOARD
    known = {each["name"] for each in dashboard["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$(\w+)", json.dumps(dashboard))) - {"__all"} == known
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        where = panel["gridPos"]
        assert where["x"] + where["w"] <= 24, panel["title"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_promtool_accepts_the_dashboards_expressions(tmp_path: Path) -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    rules = [
        {"record": f"panel:{number}", "expr": target["expr"].replace("$__rate_interval", "1m")}
        for number, target in enumerate(targets)
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    run_to_end(["promtool", "check", "rules", file])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_promtool_accepts_the_alerts() -> None:
    for what, file in (("check", ALERTS), ("test", ALERTS.with_suffix(".test.yml"))):
        run_to_end(["promtool", what, "rules", file])


def test_every_alert_is_explained_and_tested() -> None:
    alerts = ALERTS.read_text(encoding="utf-8")
    rules = set(re.findall(r"alert: (\w+)", alerts))
    assert len(re.findall(r"^ +do: ", alerts, re.MULTILINE)) == len(rules)
    table = re.findall(r"^\| (Shmacc\w+) \|", OPERATING.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(table) == rules
    tests = ALERTS.with_suffix(".test.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"alertname: (\w+), eval_time: \w+, exp_alerts: \[\{", tests)) == rules


def test_every_cause_of_a_standstill_is_explained() -> None:
    page = STANDING_STILL.read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", page, re.MULTILINE)
    suspected = {StallKind.TAKER_IDLE, StallKind.APPLIER_IDLE}
    assert set(table) == set(StallKind) - suspected
    assert all(f"`{kind}`" in page for kind in suspected)


def test_screens_in_the_docs_have_the_columns_of_the_command() -> None:
    """The page has one screen each of `watch`, `list` and `show`, and no other tables."""
    page = PAGE.read_text(encoding="utf-8")
    screens = [
        block
        for block in page.split("```")[1::2]
        if re.search(r"^ *(NAME|PID) ", block, re.MULTILINE)
    ]
    assert len(screens) == 3
    code = "".join(path.read_text() for path in Path(shmacc_inspect.__file__).parent.rglob("*.py"))
    for screen in screens:
        heads = [line for line in screen.splitlines() if re.fullmatch(r"[ A-Z/]{20,}", line)]
        assert heads
        for head in heads:
            for column in re.split(r" {2,}", head.strip()):
                assert f'"{column}"' in code, column
