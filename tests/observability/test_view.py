"""What the viewer's server answers, from folders as runs write them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp.test_utils import TestClient, TestServer
from support_view import ATTACK, make_run, sample, write_step
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from roll_lite.cli import main
from roll_lite.files import write_whole
from roll_lite.observability.view import report
from roll_lite.observability.view.index import SampleIndex
from roll_lite.observability.view.report import _every, content, write_report
from roll_lite.observability.view.runs import Run, find_runs
from roll_lite.observability.view.server import application

NAME = "small/first"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / NAME)
    make_run(tmp_path / "small/second", steps=2, exit_state="running", seed=8, trackers=[{"name": "wandb", "args": {"api_key": "secret"}}])
    (tmp_path / "latest").symlink_to("small/second")
    return tmp_path


@pytest.fixture
async def client(runs: Path) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(application([runs]))) as one:
        await answer(one, "runs")
        while [await counted(one, NAME), await counted(one, "small/second")] != [26, 14]:
            await answer(one, "runs")
        yield one


async def answer(client: TestClient[Any, Any], what: str, status: int = 200, **given: Any) -> Any:
    pairs = [(key, str(one)) for key, value in given.items() for one in (value if isinstance(value, list) else [value])]
    response = await client.get(f"/api/{what}", params=pairs)
    assert response.status == status, await response.text()
    return await response.json()


async def counted(client: TestClient[Any, Any], run: str) -> int:
    return sum(one["count"] for one in await answer(client, "counts", run=run, by="kind"))


async def test_the_list_has_each_run_once_with_its_state(client: TestClient[Any, Any]) -> None:
    first, second = await answer(client, "runs")
    assert [first["name"], second["name"]] == [NAME, "small/second"], "latest is a link to one of them"
    assert first["summary"]["exit"] == "completed" and second["summary"]["exit"] == "running"
    assert first["steps"] == [1, 2, 3, 4] and first["domains"] == ["add", "make"] and "reward/mean" in first["metrics"]


async def test_curves_are_columns_by_step(client: TestClient[Any, Any]) -> None:
    got = await answer(client, "series", run=NAME, name=["reward/mean", "domain/add/"])
    assert got["steps"] == [1, 2, 3, 4] and got["values"]["reward/mean"] == [0.25, 0.5, 0.75, 1.0]
    assert "domain/add/rollout/truncated" in got["values"] and "domain/make/reward/mean" not in got["values"]


@pytest.mark.parametrize(
    ("given", "total"),
    [
        ({}, 26),
        ({"kind": "step"}, 24),
        ({"domain": "add", "kind": "step"}, 12),
        ({"domain": ["add", "make"], "step_min": 2, "step_max": 3}, 12),
        ({"score_min": 0.5}, 13),
        ({"correct": "false"}, 9),
        ({"outcome": "failed"}, 4),
        ({"finish_reason": "length", "step_min": 1}, 8),
        ({"response_tokens_min": 5, "step_max": 1}, 2),
        ({"turns_min": 2}, 4),
        ({"advantage_min": 1}, 4),
        ({"text": "ANSWER 4"}, 3),
        ({"text": "ünïCODE"}, 4),
        ({"text": "the tool says"}, 4),
        ({"text": "100%' OR 1=1 --"}, 0),
        ({"text": ATTACK, "domain": "make"}, 0),
    ],
)
async def test_a_filter_finds_what_it_names(client: TestClient[Any, Any], given: dict[str, Any], total: int) -> None:
    got = await answer(client, "samples", run=NAME, count=500, **given)
    assert total == len(got) == sum(one["count"] for one in await answer(client, "counts", run=NAME, by="kind", **given))


async def test_held_out_samples_are_found_by_their_part(tmp_path: Path) -> None:
    folder = make_run(tmp_path / NAME)
    rows = [sample(0, "add", 50 + level, 0, parts=[f"level:{level}", "subject:sums"]) for level in (1, 2)]
    (folder / "samples/validation_000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = SampleIndex(folder)
    index.refresh()
    assert [(one["value"], one["count"]) for one in index.counts({}, "part")] == [("subject:sums", 2), ("level:1", 1), ("level:2", 1)]
    assert [row["group"] for row in index.page({"part": ["level:2"]}, "-step", 0, 9)] == [52]
    index.close()


def test_a_line_that_cannot_be_read_is_left_out(runs: Path) -> None:
    [file, *_] = (runs / NAME / "samples").glob("step_*.jsonl")
    file.write_text(file.read_text() + file.read_text().splitlines()[0].replace("{", '{"details": "\\ud800", ', 1) + "\n")
    index = SampleIndex(runs / NAME)
    index.refresh()
    assert sorted((one["value"], one["count"]) for one in index.counts({}, "domain")) == [("add", 14), ("make", 12)]
    index.close()


async def test_pages_follow_one_another_in_the_chosen_order(client: TestClient[Any, Any]) -> None:
    whole = await answer(client, "samples", run=NAME, sort="response_tokens")
    parts = [
        row
        for start in range(0, 26, 10)
        for row in (await answer(client, "samples", run=NAME, sort="response_tokens", start=start, count=10))
    ]
    assert parts == whole and [row["response_tokens"] for row in whole] == sorted(row["response_tokens"] for row in whole)
    newest = await answer(client, "samples", run=NAME)
    assert [row["step"] for row in newest] == sorted((row["step"] for row in newest), reverse=True)
    lowest = await answer(client, "samples", run=NAME, sort="score")
    assert lowest[0]["score"] == 0.25 and lowest[-1]["score"] is None, "samples without a score come last"


async def test_counts_have_means_and_causes_of_failure(client: TestClient[Any, Any]) -> None:
    by_domain = {one["value"]: one for one in await answer(client, "counts", run=NAME, by="domain", kind="step")}
    assert by_domain["add"] == {"value": "add", "count": 12, "score": 0.625, "correct": 0.5}
    failures = await answer(client, "counts", run=NAME, by="failure", step_min=2, step_max=2)
    assert {one["value"]: one["count"] for one in failures} == {"": 5, f"reward timed out {ATTACK}": 1}


async def test_a_group_has_whole_records_and_their_tokens(client: TestClient[Any, Any]) -> None:
    group = await answer(client, "group", run=NAME, step=2, group=4)
    assert [(one["index"], one["credit"] and one["credit"]["advantage"]) for one in group] == [(0, -0.5), (1, 0.5), (2, None)]
    assert group[0]["details"] == {"extracted": "6"} and group[2]["failure"].startswith("reward timed out")
    tokens = await answer(client, "tokens", run=NAME, step=2, group=4)
    assert tokens["0"][0]["texts"] == ["[5]", "[6]", "[7]", "[8]"], "there is no tokenizer"
    assert tokens["0"][0]["rollout_log_probs"] == [None, 0.0, -0.5, -1.5] and tokens["0"][0]["chosen"] == [False, False, True, True]
    assert tokens["1"][0]["prompt_length"] == 2, "another rank has written it"
    assert await answer(client, "tokens", run=NAME, step=2, group=5) == {}
    rows = (await answer(client, "tokens", run=NAME, step=3, group=7))["2"]
    assert [(row["branch"], row["prompt_length"], row["texts"][0]) for row in rows] == [(0, 2, "[5]"), (1, 3, "[9]")]


def test_tokens_are_texts_once_a_tokenizer_is_there(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    make_run(runs / "small/third", model={"path": f"hf://someone/tiny?revision={'a' * 40}"})
    local, hub = Run(NAME, runs / NAME), Run("small/third", runs / "small/third")

    def texts(run: Run) -> Any:
        return run.tokens(2, 4)[0][0]["texts"]

    assert texts(local) == texts(hub) == ["[5]", "[6]", "[7]", "[8]"], "nothing is downloaded"
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate("abcdefghi")}))
    for folder in (runs / NAME / "model", tmp_path / "hub/models--someone--tiny/snapshots" / ("a" * 40)):
        folder.mkdir(parents=True)
        tokenizer.save(str(folder / "tokenizer.json"))
    assert texts(local) == texts(hub) == ["f", " g", " h", " i"]


async def test_a_timeline_has_phases_samples_and_engines(client: TestClient[Any, Any]) -> None:
    got = await answer(client, "timeline", run=NAME, step=3)
    assert got["phases"] == [["generate", 3.0], ["train", 1.0], ["train/actor_train", 0.9], ["step", 4.1]]
    assert got["engines"] == {"6": [1, 0, None], "7": [1, 0, None]} and len(got["spans"]) == 6
    assert got["processes"][0]["pid"] == 17
    assert [(name, role, rank) for name, _, _, role, rank in got["work"]] == [
        *((name, "", None) for name in ("step", "generate", "train")),
        *((f"actor_train[{rank}] train", "actor_train", rank) for rank in range(2)),
    ]


async def test_many_long_names_fit_in_a_question(client: TestClient[Any, Any]) -> None:
    names = [f"domain/domain_number_{number:03}/reward/mean" for number in range(500)]
    assert (await answer(client, "series", run=NAME, name=[*names, "reward/mean"]))["values"].keys() == {"reward/mean"}


async def test_a_place_without_runs_leaves_the_others_in_the_list(runs: Path) -> None:
    async with TestClient(TestServer(application([runs / NAME, runs / "small/second"]))) as one:
        (runs / "small/second").rename(runs / "moved")
        first, second = await answer(one, "runs")
        assert "No such file" in (await answer(one, "config", 500, run="small/second"))["error"]
    assert first["steps"] == [1, 2, 3, 4] and "unreadable: " in second["summary"]["exit"]


async def test_a_run_that_continues_with_other_settings_shows_them(client: TestClient[Any, Any], runs: Path) -> None:
    file = runs / NAME / "config.yaml"
    await asyncio.to_thread(file.write_text, yaml.safe_dump({"steps": 9, "seed": 8, "domains": {"new": {}}}))
    assert (await answer(client, "config", run=NAME))["seed"] == 8
    first, _ = await answer(client, "runs")
    assert (first["steps_planned"], first["domains"]) == (9, ["new"])


async def test_settings_come_without_secrets(client: TestClient[Any, Any]) -> None:
    got = await answer(client, "config", run=NAME)
    assert got["seed"] == 7 and got["domains"]["add"] == {"share": 1}
    other = await answer(client, "config", run="small/second")
    assert other["trackers"] == [{"name": "wandb", "args": {"api_key": "***"}}]


@pytest.mark.parametrize(
    ("what", "given", "status", "words"),
    [
        ("samples", {"run": "small/third"}, 404, "small/third: there is no such run"),
        ("samples", {"run": "../../etc"}, 404, "no such run"),
        ("nothing", {"run": NAME}, 404, "nothing: there is no such"),
        ("samples", {}, 404, "run"),
        ("samples", {"run": NAME, "score_min": "high"}, 400, "'high'"),
        ("samples", {"run": NAME, "sort": "step; DROP TABLE samples"}, 400, "is none of step"),
        ("counts", {"run": NAME, "by": 'x" FROM files --'}, 400, "is none of domain"),
        ("group", {"run": NAME, "step": "../../x", "group": 1}, 400, "../../x"),
    ],
)
async def test_a_wrong_question_is_told_what_is_wrong(
    client: TestClient[Any, Any], what: str, given: dict[str, Any], status: int, words: str
) -> None:
    assert words in (await answer(client, what, status, **given))["error"]


@pytest.mark.parametrize(
    "path", ["/page/../server.py", "/page/%2e%2e/server.py", "/page/..%2fserver.py", "/page//etc/passwd", "/../config.yaml", "/page/"]
)
async def test_no_path_leads_out_of_the_page(client: TestClient[Any, Any], path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())  # clients would shorten the path
    got = await reader.read()
    writer.close()
    assert got.split()[1] in (b"403", b"404") and b"import" not in got


async def test_kind_names_no_other_file(client: TestClient[Any, Any]) -> None:
    assert [one["kind"] for one in await answer(client, "group", run=NAME, kind="../../second/samples/step", step=1, group=2)] == [
        "step"
    ] * 3


async def test_a_foreign_name_is_refused_and_the_page_loads_nothing_from_elsewhere(client: TestClient[Any, Any]) -> None:
    assert (await client.get("/", headers={"Host": "attacker.example"})).status == 403
    page = await client.get("/")
    assert page.status == 200 and "default-src 'self'" in page.headers["Content-Security-Policy"]
    assert "http" not in await page.text()


async def test_a_live_run_shows_new_steps_and_drops_those_it_repeats(client: TestClient[Any, Any], runs: Path) -> None:
    write_step(runs / "small/second", 3)
    assert (await answer(client, "runs"))[1]["steps"] == [1, 2, 3]
    while await counted(client, "small/second") != 20:
        await answer(client, "runs")
    (runs / "small/second/samples/step_000003.jsonl").unlink()
    text = (runs / "small/second/metrics.jsonl").read_text().splitlines(keepends=True)
    (runs / "small/second/metrics.jsonl").write_text("".join(text[:1]) + '{"step": 2, "torn')
    assert (await answer(client, "runs"))[1]["steps"] == [1], "a torn line waits for its rest"
    while await counted(client, "small/second") != 14:
        await answer(client, "runs")


def test_a_run_that_went_back_and_on_past_its_old_length_is_read_again(runs: Path) -> None:
    run, file = Run("second", runs / "small/second"), runs / "small/second/metrics.jsonl"
    assert list(run.records()) == [1, 2]
    repeated = [json.dumps({"step": step, "reward/mean": step / 7, "time/step": 1.0}) for step in range(2, 20)]
    file.write_text("\n".join([file.read_text().splitlines()[0], *repeated, "torn, by a full disk", '{"step": 20, "time/step": 2.0}', ""]))
    assert list(run.records()) == list(range(1, 21))
    assert run.records()[2] == {"reward/mean": 2 / 7, "time/step": 1.0}
    file.write_text("")
    assert run.records() == {} and run.records() == {}


def test_requests_at_the_same_time_read_each_line_once(runs: Path) -> None:
    file = runs / NAME / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, "time/step": 1.0}) + "\n" for step in range(2000)))
    for _ in range(5):
        run = Run(NAME, runs / NAME)
        with ThreadPoolExecutor(8) as pool:
            assert [len(one) for one in pool.map(lambda _, run=run: run.records(), range(8))] == [2000] * 8
        with file.open("a") as more:
            more.write('{"step": 0, "reward/mean": 2.0}\n')
        assert run.records()[0]["reward/mean"] == 2.0


async def test_a_run_that_cannot_be_read_leaves_the_others_in_the_list(runs: Path) -> None:
    (runs / NAME / "config.yaml").write_text("steps: [")
    (runs / "small/second/summary.json").write_text("{")
    make_run(runs / "small/third")
    async with TestClient(TestServer(application([runs]))) as one:
        first, second, third = await answer(one, "runs")
    assert "unreadable: while parsing" in first["summary"]["exit"] and "unreadable: Expecting" in second["summary"]["exit"]
    assert third["steps"] == [1, 2, 3, 4]


def indexed(runs: Path) -> list[Path]:
    return [file.parent for file in runs.rglob("view.duckdb")]


async def test_a_run_is_indexed_when_its_samples_are_asked_for(runs: Path) -> None:
    async with TestClient(TestServer(application([runs]))) as one:
        first, second = await answer(one, "runs")
        assert indexed(runs) == [] and "changes" not in first
        assert await counted(one, NAME) == 26, "the first answer has all samples of a small run"
        first, second = await answer(one, "runs")
        assert first["changes"] == 1 and "changes" not in second
    assert indexed(runs) == [runs / NAME]


def test_the_index_is_kept_and_follows_changed_files(runs: Path) -> None:
    folder = runs / NAME
    index = SampleIndex(folder)
    index.refresh()
    other = SampleIndex(folder)  # in this process DuckDB shares the file
    assert len(other.page({}, "-step", 0, 50)) == 26
    path = folder / "samples/step_000004.jsonl"
    broken = ['{"step": 4, "torn', json.dumps({**sample(4, "add", 8, 0), "score": float("nan"), "response": "\ud800"})]
    path.write_text("".join(f"{line}\n" for line in [*path.read_text().splitlines()[:2], *broken]))
    other.refresh()
    assert len(other.page({"step_min": ["4"]}, "-step", 0, 50)) in (2, 3), "lines that cannot be read are left out"


@pytest.mark.parametrize("moment", ["glob", "exists"])
@pytest.mark.parametrize("kind", ["samples", "credit"])
def test_files_may_be_deleted_while_they_are_indexed(runs: Path, monkeypatch: pytest.MonkeyPatch, kind: str, moment: str) -> None:
    """`moment`: method of Path that still finds the file."""
    file, before = runs / NAME / kind / "step_000003.jsonl", getattr(Path, moment)
    others = 20 if kind == "samples" else 26

    def last(path: Path, *given: Any) -> Any:
        found = before(path, *given)
        found = found if moment == "exists" else list(found)
        if path in (file, file.parent) or moment == "glob":
            file.unlink(missing_ok=True)
        return found

    index = SampleIndex(runs / NAME)
    with monkeypatch.context() as patch:
        patch.setattr(Path, moment, last)
        index.refresh()
    assert not file.exists()
    index.refresh()
    rows = index.page({}, "step", 0, 50)
    assert len(rows) == others and {row["step"] for row in rows if row["advantage"] is not None} == {1, 2, 4}
    index.close()


def test_a_folder_that_cannot_be_written_to_is_shown_all_the_same(runs: Path, tmp_path: Path) -> None:
    (runs / NAME / "view.duckdb").mkdir()
    index = SampleIndex(runs / NAME)
    index.refresh()
    assert len(index.page({}, "-step", 0, 50)) == 26


def test_places_without_runs_are_named(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(find_runs([runs / "latest"])) == ["small/second"]
    (tmp_path / "empty").mkdir()
    for place in ("none", "empty"):
        assert main(["view", str(tmp_path / place)]) == 2 and main(["report", str(tmp_path / place)]) == 2
        assert capsys.readouterr().err.count(f"{tmp_path / place}: no run here; name a run's folder") == 2
    assert main(["report", str(runs)]) == 0
    assert capsys.readouterr().out.count("report.html") == 2, "one for each run"


def test_a_port_in_use_is_told_with_a_remedy(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["view", str(runs), "--port", str(taken.getsockname()[1])]) == 2
    assert "--port 0 for any that is free" in capsys.readouterr().err


def test_the_command_serves_until_it_is_interrupted(runs: Path) -> None:
    command = [sys.executable, "-m", "roll_lite.cli", "view", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        address = process.stdout.readline()
        assert "http://127.0.0.1:" in address and ":0 " not in address
        process.send_signal(2)
        assert process.wait(20) == 0


# ---------------------------------------------------------------- report


def test_a_report_is_one_safe_file(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs / NAME)]) == 0
    path = Path(capsys.readouterr().out.strip())
    text = path.read_text(encoding="utf-8")
    assert path == (runs / NAME / "report.html") and ATTACK not in text and "<script>window" not in text
    assert "src=" not in text.replace("img-src", "").replace("script-src", "").partition('id="content"')[0], "nothing is loaded"


def test_a_report_holds_some_samples_of_every_domain(runs: Path) -> None:
    found = content(Run(NAME, runs / NAME))
    shown = [(one["kind"], one["step"], one["domain"]) for one in found["samples"]]
    assert set(shown) == {("validation", 0, "add"), *(("step", step, domain) for step in range(1, 5) for domain in ("add", "make"))}
    assert found["series"]["values"]["reward/mean"] == [0.25, 0.5, 0.75, 1.0] and set(found["tokens"]) == {"4 8", "4 9"}


def test_long_texts_are_cut_and_many_steps_thinned(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "small/long", steps=1)
    for step in range(2, 1501):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "reward/mean": 1.0, "time/step": 1.0}) + "\n")
    records = [
        sample(1, domain, group, index, response="x" * 100_000) for group, domain in ((2, "add"), (3, "make")) for index in range(400)
    ]
    (folder / "samples/step_000001.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    started = time.process_time()
    text = write_report(folder).read_text()
    assert time.process_time() - started < 4, "usually well under a second"
    assert len(text) < 8_000_000 and "96,000 more characters" in text
    found = content(Run("x", folder))
    assert 150 < len(found["series"]["steps"]) <= 300 and found["series"]["steps"][-1] == 1500
    assert 150 < len(found["phases"]) <= 300


@pytest.mark.parametrize("count", [1, 299, 300, 301, 599, 600, 601, 12_345])
def test_curves_have_up_to_300_points_with_the_last(count: int) -> None:
    every = _every(count)
    shown = {*range(0, count, every), count - 1}
    assert min(count, 151) <= len(shown) <= 300


def test_a_report_that_cannot_be_written_leaves_the_others(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(runs / "small/third")
    (runs / NAME / "config.yaml").write_text("steps: [")

    def full(path: Path, text: str) -> None:
        if path.parent.name == "second":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_whole(path, text)

    monkeypatch.setattr(report, "write_whole", full)
    assert main(["report", str(runs)]) == 2
    output, said = capsys.readouterr()
    assert output == f"{runs / 'small/third/report.html'}\n"
    assert f"{runs / NAME}: no report: while parsing" in said and "second: no report: [Errno 28] No space left on device" in said
