"""`muxtune plan`: the plan, the policies beside it, other hardware, and the picture."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from muxtune.engine.trace_file import read_lines, read_traces
from muxtune.plan.types import MicroBatch, Plan
from tests.cli.projects import TRAINED, write_config
from tests.cli.shell import Shell

THREE = {**TRAINED, "more": {"datasets": [{"path": "data/chat.jsonl"}], "peft": {"type": "ia3"}}}


@pytest.fixture(scope="module")
def config(project: Path, tiny_llama: Path) -> Path:
    return write_config(project / "planned.yaml", tiny_llama, "planned", THREE)


def _json(shell: Shell, config: Path, *arguments: str) -> dict[str, Any]:
    ended = shell.run("plan", config.name, "--json", *arguments)
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_every_job_is_in_one_htask_and_nothing_is_left_behind(shell: Shell, config: Path, project: Path) -> None:
    found = _json(shell, config)
    assert sorted(name for htask in found["plan"]["htasks"] for name in htask["tasks"]) == sorted(THREE)
    assert found["plan"]["policy"] == "muxtune" and found["iteration_s"] > 0
    assert {task["name"]: task["steps"] for task in found["tasks"]} == {"chat": 40, "sql": 4, "more": 4}
    done = {task["name"]: task["done_s"] for task in found["tasks"]}
    assert done["chat"] > 2 * done["sql"]
    assert not (project / "planned").exists()


def test_the_table_says_what_it_plans_and_why(shell: Shell, config: Path) -> None:
    ended = shell.run("plan", config.name, "--policy", "all")
    assert ended.code == 0, ended.err
    first, *rest = ended.out.splitlines()
    assert re.match(r"muxtune: 3 tasks in \d hTasks?, [\d.]+ s an iteration of \d+ tokens predicted", first), first
    headings = [line.split()[0] for line in rest if line]
    assert {"hTask", "policy", "muxtune", "sequential", "fuse-all", "padded", "task", *THREE} <= set(headings)


def test_policies_are_compared(shell: Shell, config: Path) -> None:
    found = _json(shell, config, "--policy", "all")
    policies = {one["policy"]: one for one in found["policies"]}
    assert list(policies) == ["muxtune", "sequential", "fuse-all", "padded"]
    assert policies["sequential"]["htasks"] == 3 and policies["fuse-all"]["htasks"] == 1
    assert min(one["slower"] for one in policies.values()) >= 0.999
    assert policies["padded"]["ineffective"] > policies["fuse-all"]["ineffective"]


def test_for_other_hardware(shell: Shell, config: Path, project: Path) -> None:
    (project / "two.yaml").write_text("devices: 2\npp: 2\nmemory: 8GB\npp_link: {bandwidth: 10GB/s, latency_s: 1e-5}\n")
    found = _json(shell, config, "--cluster", "two.yaml")
    assert found["plan"]["stages"] == 2 and len(found["utilisation"]) == 2
    shares = sum(found["utilisation"]) / 2 + found["bubble_share"] + found["stall_share"]
    assert shares == pytest.approx(1, abs=1e-6)
    text = (project / "two.yaml").read_text().replace("8GB", str(int(1.3 * found["plan"]["peak_bytes"])))
    (project / "tight.yaml").write_text(text)
    tight = _json(shell, config, "--cluster", "tight.yaml", "--policy", "sequential")
    assert all(reason["fits"] for reason in tight["reasons"]), "which one device with the whole model would not say"
    faster = project / "faster.yaml"
    faster.write_text("speed: 4\n")
    assert _json(shell, config, "--cluster", "faster.yaml")["iteration_s"] == pytest.approx(
        _json(shell, config)["iteration_s"] / 4, rel=0.01
    )


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_picture_needs_nothing_else_and_shows_what_ran(shell: Shell, config: Path, trained: Path) -> None:
    alone = shell.run("plan", config.name, "--html", "alone.html")
    assert alone.code == 0, alone.err
    ended = shell.run("plan", "trained.yaml", "--policy", "all", "--html", "plan.html", "--record", "trained")
    assert ended.code == 0, ended.err
    page = _Page((config.parent / "plan.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags and page.links == [] and page.tags.count("svg") > 2
    text = " ".join(page.text)
    assert "Predicted: one iteration" in text and "Measured: round" in text
    assert "Measured" not in " ".join(_Page((config.parent / "alone.html").read_text(encoding="utf-8")).text)


def test_a_run_records_the_plans_in_force(trained: Path) -> None:
    plans = [line for line in read_lines(trained) if isinstance(line, Plan)]
    assert [sorted(name for htask in plan.htasks for name in htask.tasks) for plan in plans] == [["chat", "sql"]]
    together = [
        {item.task for item in action.items}
        for record in read_traces(trained)
        for action in record.schedule.actions
        if isinstance(action, MicroBatch) and action.trains
    ]
    members = [set(htask.tasks) for htask in plans[0].htasks]
    assert all(any(names <= one for one in members) for names in together)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--policy", "best"), "should be one of sequential, fuse-all, padded, muxtune or all"),
        (("--html", "no/such/plan.html"), "cannot be written there"),
        (("--html", "planned.yaml"), "is there, and no picture of a plan"),
        (("--html", ""), "is no name of a file"),
        (("--html", "-"), "is no name of a file"),
        (("--record", "data", "--html", "x.html"), "no rounds are recorded here"),
        (("--record", "data"), "--record belongs to --html"),
        (("--cluster", "none.yaml"), "none.yaml"),
    ],
)
def test_what_is_wrong_is_said(shell: Shell, config: Path, arguments: tuple[str, ...], told: str) -> None:
    ended = shell.run("plan", config.name, *arguments)
    assert ended.code == 2 and told in ended.err.replace("\n", " ") and "Traceback" not in ended.err


def test_a_degree_that_was_not_measured(shell: Shell, config: Path, project: Path) -> None:
    (project / "many.yaml").write_text("devices: 64\ntp: 64\ntp_link: {bandwidth: 10GB/s}\n")
    ended = shell.run("plan", config.name, "--cluster", "many.yaml")
    assert ended.code == 2 and "degree 64 was not measured" in ended.err and "many.yaml:2 tp" in ended.err
    (project / "long.yaml").write_text("pp: 64\ndevices: 64\npp_link: {bandwidth: 10GB/s}\n")
    ended = shell.run("plan", config.name, "--cluster", "long.yaml")
    assert ended.code == 2 and "64 stages" in ended.err and "long.yaml:1 pp" in ended.err


def test_a_cluster_is_planned_for_whatever_memory_is_here(shell: Shell, config: Path, project: Path) -> None:
    """And what it lacks itself is said in readable sizes, at its own key."""
    tight = ("--set", "memory_limit=1MB")
    assert shell.run("plan", config.name, *tight).code == 2
    (project / "large.yaml").write_text("memory: 48GB\n")
    assert _json(shell, config, "--cluster", "large.yaml", *tight)["plan"]["cap_bytes"] == 48_000_000_000
    (project / "small.yaml").write_text("memory: 1MB\n")
    ended = shell.run("plan", config.name, "--cluster", "small.yaml")
    assert ended.code == 2 and "small.yaml:1 memory: job " in ended.err and " bytes" not in ended.err


def test_jobs_that_wait_are_counted_and_named(shell: Shell, project: Path, tiny_llama: Path) -> None:
    """A limit between what the jobs need one by one and together: found by halving."""
    many = {f"wide-{number}": {**TRAINED["sql"], "peft": {"type": "lora", "r": 512}} for number in range(4)}
    config = write_config(project / "crowd.yaml", tiny_llama, "crowd", many)
    told = shell.run("plan", config.name, "--set", "memory_limit=1MB").err.replace("\n", " ")
    least = re.search(r"memory_limit: ([\d.]+)(MB|GB)", told)
    assert least is not None, told
    ended = shell.run("plan", config.name, "--html", "crowd.html", "--set", f"memory_limit={least[1]}{least[2]}")
    assert ended.code == 0, ended.err
    assert re.match(r"muxtune: [123] of 4 tasks in", ended.out), ended.out
    assert "note: in none of these numbers, since they wait for memory: " in ended.out
    text = " ".join(_Page((project / "crowd.html").read_text(encoding="utf-8")).text)
    assert "of 4 tasks" in text and "until these tasks are done" in text
    assert "note: memory_limit has room for chunks of" in ended.out or "computed twice" in ended.out


def test_an_earlier_picture_is_replaced_and_nothing_else(shell: Shell, config: Path, project: Path) -> None:
    before = config.read_bytes()
    assert shell.run("plan", config.name, "--html", config.name).code == 2 and config.read_bytes() == before
    (project / "again.html").touch()
    for _ in range(2):
        assert shell.run("plan", config.name, "--html", "again.html").code == 0
    assert not [path for path in project.iterdir() if path.name.endswith(".staged")]


def test_a_record_of_other_jobs_is_said_to_be_one(shell: Shell, project: Path, tiny_llama: Path, trained: Path) -> None:
    other = write_config(project / "other.yaml", tiny_llama, "other", {"else": TRAINED["sql"]})
    ended = shell.run("plan", other.name, "--html", "other.html", "--record", trained.name)
    assert ended.code == 0 and "no round of this run trained any of these tasks" in ended.err
    assert "nothing measured is shown" in (project / "other.html").read_text(encoding="utf-8")
    assert "1 task in 1 hTask" in ended.out and "0s" not in ended.out


def test_the_folder_of_a_finished_run_is_in_nobodys_way(shell: Shell, trained: Path) -> None:
    before = sorted(path.name for path in trained.rglob("*"))
    assert shell.run("plan", "trained.yaml").code == 0
    assert sorted(path.name for path in trained.rglob("*")) == before
