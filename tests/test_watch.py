"""What ``floret watch`` says of a run: as its files grow, are cut, or are left behind; and to whom it says it."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from click.testing import CliRunner
from flwr.app import Message

import results.status
from cli.main import floret
from common.durable import write_whole
from common.errors import FloretError
from results.follow import CLIENT, ROUND, SPARK, Follower
from results.run import read_run
from results.rundir import RunDirectory, in_use
from results.status import MOST_NAMES, Status, StatusWriter, read_status
from results.watch import HEADERS, MOST_RUNS, Board, WatchServer, directories, hosts
from tests.conftest import BIN, PATIENCE
from tests.deployment import LONG, Deployment, finish, in_round
from tests.harness import federate
from tests.test_report import make_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def lines_of(run: Path) -> list[str]:
    return (run / "history.jsonl").read_text().splitlines(keepends=True)


def looked(run: Path) -> Follower:
    follower = Follower(run)
    follower.look()
    return follower


def rounds(news: dict[str, Any]) -> list[int]:
    return [row[ROUND.index("round")] for row in news["rounds"]]


def clients(news: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row[0]: dict(zip(CLIENT, row, strict=True)) for row in news["clients"]}


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Following


def test_a_history_that_grows_is_read_on_and_half_a_line_waits(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=4)
    (run / "summary.json").unlink()
    lines = lines_of(run)
    history = run / "history.jsonl"
    history.unlink()
    follower = looked(run)
    assert follower.news(0, 0)["last"] == 0
    generation = follower.generation
    with history.open("w") as file:
        for number, line in enumerate(lines, start=1):
            for part, known in ((line[:1], number - 1), (line[1:-1], number - 1), (line[-1:], number)):
                file.write(part)
                file.flush()
                follower.look()
                assert follower.last == known
                assert not follower.problems
            news = follower.news(generation, number - 1)
            assert not news["full"]
            assert rounds(news) == [number]
            assert clients(news).keys() == {"0", "1", "2", "3", "4"}
            assert follower.news(generation, number)["rounds"] == follower.news(generation, number)["clients"] == []
    assert follower.generation == generation


def test_figures_are_those_of_the_history(tmp_path: Path) -> None:
    refused = {2: ("3", "a tensor is not finite"), 5: ("3", "no answer")}
    run = make_run(tmp_path / "run", rounds=6, refused=refused)
    news = looked(run).news(0, 0)
    last = json.loads(lines_of(run)[-1])
    row = dict(zip(ROUND, news["rounds"][-1], strict=True))
    for when in ("before", "after"):
        spread = last["accuracy"][when]["test"]
        found = [row[when], row[f"{when}Std"], row[f"{when}Worst"]]
        assert found == pytest.approx([spread["mean"], spread["std"], spread["worst_decile"]], abs=1e-4)
    three = clients(news)["3"]
    assert three["after"] == pytest.approx(last["clients"]["3"]["after"]["test"], abs=1e-4)
    assert (three["seen"], three["trained"], three["up"], three["down"]) == (6, 6, 6 * 1003, 6 * 2000)
    assert (three["refusals"], three["refusal"]) == (2, (5, "no answer"))
    assert [point[0] for point in three["points"]] == [1, 2, 3, 4, 5, 6]
    assert (news["state"], news["left"], news["spent"]) == ("finished", None, sum(range(2, 8)))
    samples = json.loads((run / "config.json").read_text())["clients"]["3"]["samples"]["train"]
    assert three["samples"] == samples


def test_the_time_of_a_client_is_that_of_its_last_training(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=2)
    first, last = (json.loads(line) for line in lines_of(run))
    first["clients"]["0"] |= {"trained": True, "seconds": 4.0}
    last["clients"]["0"] |= {"trained": False, "seconds": 0.1}
    (run / "history.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    assert clients(looked(run).news(0, 0))["0"]["seconds"] == 4.0


def test_the_unit_of_privacy_is_told(tmp_path: Path) -> None:
    private: dict[str, Any] = {"privacy.unit": "client", "privacy.delta": 1e-5}
    run = make_run(tmp_path / "run", **private)
    assert looked(run).news(0, 0)["about"]["privacy"] == "per client, \u03b4 = 1e-05; "


def test_a_run_that_its_budget_ended_is_told_as_such(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=10, done=3)
    news = looked(run).news(0, 0)
    assert (news["state"], news["planned"], news["ended"]) == ("stopped", 10, None)
    summary = read_run(run).figures.to_json()
    (run / "summary.json").write_text(json.dumps(summary | {"ended_after": 3}))
    news = looked(run).news(0, 0)
    assert (news["state"], news["planned"], news["ended"]) == ("finished", 10, 3)


def test_a_client_that_was_only_refused_is_there(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=3, refused={2: ("late", HOSTILE)})
    follower = looked(run)
    late = clients(follower.news(0, 0))["late"]
    assert (late["seen"], late["after"], late["refusal"]) == (0, None, (2, HOSTILE))
    assert "late" in clients(follower.news(follower.generation, 1))
    assert "late" not in clients(follower.news(follower.generation, 2))


@pytest.mark.parametrize("done", [2, 3, 5, 7])
def test_complete_rounds_are_those_of_the_report(tmp_path: Path, done: int) -> None:
    run = make_run(tmp_path / "run", rounds=8, done=done, part=2)
    news = looked(run).news(0, 0)
    for when in ("before", "after"):
        place = ROUND.index(f"{when}Count")
        enough = [row[0] for row in news["rounds"] if row[place] and row[place] >= news["enough"][when]]
        assert enough == [line.round for line in read_run(run).history.complete_rounds(when)]


def test_a_resumed_run_cuts_the_history(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=9, done=7)
    follower = looked(run)
    before = follower.generation
    lines = lines_of(run)
    write_whole(run / "history.jsonl", "".join(lines[:3]).encode())
    about = json.loads((run / "config.json").read_text())
    write_whole(run / "config.json", json.dumps(about | {"resumed": [{"round": 3}]}).encode())
    follower.look()
    news = follower.news(before, 7)
    assert news["full"]
    assert rounds(news) == [1, 2, 3]
    assert news["about"]["resumed"] == [3]
    assert clients(news)["1"]["trained"] == 3
    with (run / "history.jsonl").open("a") as file:
        file.writelines(lines[3:5])
    follower.look()
    assert rounds(follower.news(news["generation"], 3)) == [4, 5]


def test_a_history_cut_and_grown_again_between_two_looks_is_noticed(tmp_path: Path) -> None:
    """Also in the same file, and of the same length or longer."""
    run = make_run(tmp_path / "run", rounds=9, done=4)
    follower = looked(run)
    other = make_run(tmp_path / "other", rounds=9, done=6, level=0.8)
    (run / "history.jsonl").write_text("".join(lines_of(other)))
    follower.look()
    fresh = looked(other)
    assert follower.news(0, 0)["rounds"] == fresh.news(0, 0)["rounds"]
    assert follower.news(0, 0)["clients"] == fresh.news(0, 0)["clients"]


def test_rounds_that_an_old_version_wrote_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=6, done=5)
    other = make_run(tmp_path / "other", rounds=6, done=6, level=0.7)
    with (run / "history.jsonl").open("a") as file:
        file.writelines(lines_of(other)[2:6])
    follower = looked(run)
    found = read_run(run)
    news = follower.news(0, 0)
    assert rounds(news) == [line.round for line in found.rounds] == [1, 2, 3, 4, 5, 6]
    means = [row[ROUND.index("after")] for row in news["rounds"]]
    assert means == pytest.approx([line.accuracy().mean for line in found.rounds], abs=1e-4)
    assert clients(news)["0"]["trained"] == 6


@pytest.mark.parametrize("damage", ['{"round": 2, "clients": {"0": 7}}', "{", "[" * 100_000, '"', "\x00\xff"])
def test_a_damaged_line_is_told_and_the_others_are_read(tmp_path: Path, damage: str) -> None:
    run = make_run(tmp_path / "run", rounds=5, done=4)
    lines = lines_of(run)
    lines[1] = damage + "\n"
    (run / "history.jsonl").write_text("".join(lines))
    news = looked(run).news(0, 0)
    assert rounds(news) == [1, 3, 4]
    (problem,) = news["problems"]
    assert problem.startswith("history.jsonl, line 2: cannot be read")
    json.dumps(news, allow_nan=False)


def test_a_damaged_config_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=3)
    config = (run / "config.json").read_text()
    (run / "config.json").write_text("{}")
    follower = looked(run)
    assert follower.news(0, 0)["problems"] == ["config.json cannot be read (KeyError)"]
    assert rounds(follower.news(0, 0)) == [1, 2, 3]
    (run / "config.json").write_text(config)
    follower.look()
    assert follower.news(0, 0)["problems"] == []
    assert follower.news(0, 0)["planned"] == 3


@pytest.mark.parametrize("name", ["config.json", "history.jsonl", "status.json"])
def test_a_file_that_never_ends_is_not_read(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run", rounds=3)
    for kind in ("pipe", "device"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name) if kind == "pipe" else (run / name).symlink_to("/dev/zero")
        news = looked(run).news(0, 0)
        assert (len(news["problems"]), rounds(news)) == (name != "status.json", [] if "history" in name else [1, 2, 3])


def test_a_line_without_an_end_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("results.follow._LONGEST_LINE", 10_000)
    run = make_run(tmp_path / "run", rounds=3)
    with (run / "history.jsonl").open("a") as file:
        file.write("x" * 10_001)
    news = looked(run).news(0, 0)
    assert news["problems"] == ["history.jsonl, line 4: is longer than 10000 bytes"]
    assert rounds(news) == [1, 2, 3]


def test_a_long_history_is_read_in_parts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=9)
    follower = Follower(run)
    size = len(lines_of(run)[0])
    seen = []
    while True:
        follower.look(3 * size)
        seen.append(follower.last)
        assert follower.news(0, 0)["state"] == "finished"
        if not follower.more:
            break
    assert len(seen) > 2
    assert follower.news(0, 0)["rounds"] == looked(run).news(0, 0)["rounds"]


@pytest.mark.thorough
def test_what_is_sent_of_200_clients_stays_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=301, done=300, names=[f"client-{place}" for place in range(200)])
    follower = looked(run)
    new = follower.news(follower.generation, 299)
    assert len(new["clients"]) == 200
    assert len(json.dumps(new, separators=(",", ":"))) < 25_000
    assert len(json.dumps(follower.news(follower.generation, 300), separators=(",", ":"))) < 1_000
    everything = follower.news(0, 0)
    assert all(len(client["points"]) == SPARK for client in clients(everything).values())
    assert len(json.dumps(everything, separators=(",", ":"))) < 300_000


# State


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Have another process write a run directory, as a run does."""
    code = "import sys,time; from pathlib import Path; from results.rundir import RunDirectory as R\n"
    code += "r = R(Path(sys.argv[1])); print('held', flush=True); time.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield
    finally:
        process.kill()
        process.wait()


def test_going_and_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=9, done=4)
    status = Status("pfakd", "digits", 9, 5, "training", 1.0, 1.0, 5, 5, 1, ("3", "4"), 1.0)
    (run / "status.json").write_text(json.dumps(status.to_json()))
    follower = Follower(run)
    with held(run):
        follower.look()
        news = follower.news(0, 0)
        assert news["state"] == "going"
        assert news["left"] is not None
        assert (news["now"]["phase"], news["now"]["waiting"]) == ("training", ["3", "4"])
    follower.look()
    news = follower.news(0, 0)
    assert (news["state"], news["left"]) == ("stopped", None)
    assert (news["now"]["round"], news["now"]["waiting"]) == (5, ["3", "4"])


def test_a_status_that_is_behind_the_history_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=9, done=4)
    for number, phase, said in (
        (4, "training", False),
        (4, "writing", True),
        (5, "training", True),
        (0, "waiting", True),
    ):
        status = Status("pfakd", "digits", 9, number, phase, 1.0, 1.0)
        (run / "status.json").write_text(json.dumps(status.to_json()))
        assert bool(looked(run).news(0, 0)["now"]) == said


def test_a_run_resumed_for_more_rounds_and_killed_is_not_finished(tmp_path: Path) -> None:
    """The summary of its first end is still there."""
    run = make_run(tmp_path / "run", rounds=5)
    assert looked(run).news(0, 0)["state"] == "finished"
    about = json.loads((run / "config.json").read_text())
    about["config"]["rounds"] = 8
    (run / "config.json").write_text(json.dumps(about))
    with held(run):
        assert looked(run).news(0, 0)["state"] == "going"
    assert looked(run).news(0, 0)["state"] == "stopped"


def test_whoever_looks_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    RunDirectory(folder)
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            in_use(folder)

    watchers = [threading.Thread(target=look) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(30):
            directory = RunDirectory(folder)
            assert in_use(folder)
            with pytest.raises(FloretError, match="is in use"):
                RunDirectory(folder)
            del directory
    finally:
        ended.set()
        for watcher in watchers:
            watcher.join()


def test_a_federation_says_what_it_waits_for(tmp_path: Path) -> None:
    output = tmp_path / "runs"
    seen: list[tuple[Status, str]] = []

    def tamper(message: Message, reply: Message) -> Message:
        (run,) = output.iterdir()
        phase = {"train": "training", "evaluate": "evaluating"}.get(message.metadata.message_type)
        moment = (phase, int(message.metadata.group_id or 0))
        if phase and moment not in [(status.phase, status.round) for status, _ in seen]:

            def says() -> bool:
                status = read_status(run)
                return status is not None and (status.phase, status.round) == moment and status.asked == status.clients

            until(says)
            status = read_status(run)
            assert status
            seen.append((status, looked(run).news(0, 0)["state"]))
        return reply

    outcome = federate(output, 4, tamper=tamper, rounds=2, participation=0.5, evaluate_every=2)
    said = [(status.round, status.phase, status.clients, status.asked, len(status.waiting)) for status, _ in seen]
    assert said == [(1, "training", 2, 2, 2), (2, "training", 2, 2, 2), (2, "evaluating", 2, 2, 2)]
    assert {state for _, state in seen} == {"going"}
    assert (seen[0][0].method, seen[0][0].dataset, seen[0][0].planned) == ("pfakd", "digits", 2)
    trained = [name for name, one in outcome.history[0]["clients"].items() if one["trained"]]
    assert list(seen[0][0].waiting) == trained
    assert not (outcome.directory / "status.json").exists()
    news = looked(outcome.directory).news(0, 0)
    assert (news["state"], news["now"], news["last"]) == ("finished", None, 2)


@pytest.mark.slow
def test_a_deployment_says_whom_it_waits_for(deployment: Deployment) -> None:
    deployment.node("a", "--partition", "0/2")
    run = deployment.run(rounds=3, **LONG)
    until(lambda: deployment.output.is_dir() and os.listdir(deployment.output))

    def now() -> dict[str, Any]:
        found: dict[str, Any] = looked(deployment.directory()).news(0, 0)["now"] or {}
        return found

    until(lambda: now().get("answered") == 1)
    assert (now()["phase"], now()["round"], now()["clients"]) == ("waiting for clients", 0, 2)
    b = deployment.node("b", "--partition", "1/2")
    in_round(b, 2)
    b.kill()
    until(lambda: now()["waiting"] == ["b"])
    assert (now()["phase"], now()["round"], now()["asked"], now()["answered"]) == ("training", 2, 2, 1)
    assert looked(deployment.directory()).news(0, 0)["state"] == "going"
    deployment.node("b", "--partition", "1/2")
    finish(run)
    until(lambda: looked(deployment.directory()).news(0, 0)["state"] == "finished")
    assert looked(deployment.directory()).news(0, 0)["now"] is None


def test_a_run_that_ends_in_an_error_leaves_no_status(tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            until((output / os.listdir(output)[0] / "status.json").exists)
            raise RuntimeError
        return reply

    output = tmp_path / "runs"
    with pytest.raises(RuntimeError):
        federate(output, 2, tamper=tamper)
    (run,) = output.iterdir()
    assert not (run / "status.json").exists()


def test_a_status_of_ten_thousand_clients_is_small_and_written_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def write(path: Path, content: bytes, *, sync: bool) -> None:
        sizes.append(len(content))
        write_whole(path, content, sync=sync)

    monkeypatch.setattr(results.status, "write_whole", write)
    begun = time.monotonic()
    with StatusWriter(tmp_path, "fedavg", "digits", 9) as status:
        status.round(1)
        status.phase("training", 10_000)
        for place in range(10_000):
            status.asked(f"client-{place}")
        now = status.now()
        assert (now.clients, now.asked, now.answered, len(now.waiting)) == (10_000, 10_000, 0, MOST_NAMES)
        for place in range(9_999):
            status.answered(f"client-{place}")
        until(lambda: (read_status(tmp_path) or now).answered == 9_999)
        written = read_status(tmp_path)
        assert written == status.now()
        assert written is not None
        assert written.waiting == ("client-9999",)
    took = time.monotonic() - begun
    assert not (tmp_path / "status.json").exists()
    assert max(sizes) < 1_000
    assert len(sizes) <= 2 + took / results.status._PAUSE


def test_a_status_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with StatusWriter(tmp_path / "gone", "fedavg", "digits", 9) as status:
        for number in range(1, 4):
            status.round(number)
            status.phase("training", 2)
            time.sleep(0.6)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'gone' / 'status.json'} cannot be written (No such file or directory); the run goes on"
    ]


ASKED = '"clients": 1, "asked": 1, "answered": 0, "waiting": [], "waiting_since": null}'
ENDLESS = [
    f'{{"method": "a", "dataset": "b", "planned": Infinity, "round": 9, "phase": "x", "since": 0, "began": 0, {ASKED}',
    f'{{"method": "a", "dataset": "b", "planned": 9, "round": 9, "phase": "x", "since": -Infinity, "began": 0, {ASKED}',
]


@pytest.mark.parametrize("text", ["", "{}", "[]", "[" * 100_000, '{"method": 1, "waiting": 3}', "\x00", *ENDLESS])
def test_a_status_that_is_something_else_counts_as_none(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "run", rounds=3, done=2)
    (run / "status.json").write_text(text)
    assert looked(run).news(0, 0)["now"] is None


def test_a_run_that_waits_for_its_clients_is_shown_before_it_has_a_config(tmp_path: Path) -> None:
    with StatusWriter(tmp_path, "fedper", "npz-clients", 9) as status:
        status.phase("waiting for clients")
        status.gathering(2, 5)
        until(lambda: read_status(tmp_path) == status.now())
        news = looked(tmp_path).news(0, 0)
    assert (news["about"]["method"], news["planned"], news["last"]) == ("fedper", 9, 0)
    assert (news["now"]["answered"], news["now"]["clients"]) == (2, 5)


# Runs


def test_which_runs_are_meant(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    newest = directories([], folder)
    assert newest() == []
    first = make_run(folder / "20260101-a", rounds=2)
    assert newest() == [first]
    second = make_run(folder / "20260102-b", rounds=2)
    assert newest() == [second]
    assert directories(["20260101-a", str(second)], folder)() == [first, second]
    sweep = tmp_path / "sweep"
    for cell, name in (("x", "1"), ("x", "3"), ("y", "2")):
        (sweep / "cells" / cell).mkdir(parents=True, exist_ok=True)
        make_run(sweep / "cells" / cell / name, rounds=2)
    found = directories([str(sweep)], folder)
    # In the order in which they began, whatever their cells are called.
    assert [path.relative_to(sweep / "cells").as_posix() for path in found()] == ["y/2", "x/3"]
    (sweep / "cells" / "z").mkdir()
    make_run(sweep / "cells" / "z" / "1", rounds=2)
    assert len(found()) == 3
    with pytest.raises(FloretError, match=r"^nowhere: neither a run directory nor the name of one in"):
        directories(["nowhere"], folder)


@pytest.mark.parametrize("name", ["file", "file/runs"])
def test_a_file_has_no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(WatchServer, "serve_forever", lambda *_, **__: None)
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(floret, ["watch", "--output-dir", str(tmp_path / name)])
    wrong = f"{tmp_path / 'file'} is a file; name the folder in which run directories are"
    assert str(done.exception) == f"--output-dir {tmp_path / name}: {wrong}"


@pytest.mark.parametrize(
    ("name", "said"), [("", "where no run is yet"), ("none/runs", "which does not exist yet; a run may make it")]
)
def test_that_there_is_no_run_yet_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.setattr(WatchServer, "serve_forever", lambda *_, **__: None)
    folder = tmp_path / name
    done = CliRunner().invoke(floret, ["watch", "--output-dir", str(folder)], catch_exceptions=False)
    assert done.output.splitlines()[0] == f"Watching {folder}, {said}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", '{"config": {}, "clients": {"0": {"samples": {"train": Infinity}}}}'),
        ("history.jsonl", '{"round": Infinity}\n'),
        ("history.jsonl", '{"round": 1, "clients": {"0": {"bytes": {"up": Infinity}}}}\n'),
        ("history.jsonl", '{"round": 1, "clients": {"0": {"after": {"test": 1e308}}}}\n'),
        ("history.jsonl", f'{{"round": 1, "loss": 1{"0" * 400}}}\n'),
        *(("status.json", text) for text in ENDLESS),
    ],
)
def test_a_damaged_run_leaves_the_others_on_the_board(tmp_path: Path, name: str, content: str) -> None:
    damaged, other = make_run(tmp_path / "a", rounds=3, done=2), make_run(tmp_path / "b", rounds=2)
    (damaged / name).write_text(content)
    _, shown = json.loads(json.dumps(Board(lambda: [damaged, other]).news({}), allow_nan=False))["runs"]
    assert rounds(shown) == [1, 2]


def test_several_runs_have_names_that_differ(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{place}", rounds=3, seed=place) for place in range(2)]
    runs.append(make_run(tmp_path / "other", rounds=3, method="fedper"))
    board = Board(lambda: runs)
    news = board.news({})["runs"]
    assert [run["label"] for run in news] == ["pfakd, seed 0", "pfakd, seed 1", "fedper"]
    seen = {run["id"]: (run["generation"], run["last"]) for run in news}
    del runs[0]
    again = board.news(seen)["runs"]
    assert [(run["id"], run["full"], run["rounds"]) for run in again] == [(n["id"], False, []) for n in news[1:]]


# The server


@contextmanager
def serving(*runs: Path) -> Iterator[WatchServer]:
    with WatchServer(Board(lambda: runs), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def fetch(
    server: WatchServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE)
    try:
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    finally:
        connection.close()


def test_page_and_data_need_the_token(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", names=[HOSTILE, "1"], rounds=3, refused={2: ("1", HOSTILE)}, model=HOSTILE)
    with serving(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        token = parse_qs(urlsplit(server.address).query)["token"][0]
        assert len(token) >= 32
        for path in ("/", "/data", "/?token=", "/?token=x", f"/data?token={token[:-1]}", f"/data?token={token}x"):
            status, headers, content = fetch(server, path)
            assert (status, content.count(b"\n")) == (403, 1)
            assert token.encode() not in content
            assert HEADERS.items() <= dict(headers.items()).items()
        status, headers, page = fetch(server, f"/?token={token}")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert HEADERS.items() <= dict(headers.items()).items()
        assert b"alert(" not in page  # nothing of a run is in the page
        status, headers, content = fetch(server, f"/data?token={token}&seen=")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert HEADERS.items() <= dict(headers.items()).items()
        (found,) = json.loads(content)["runs"]
        assert {client[0] for client in found["clients"]} == {HOSTILE, "1"}
        seen = f"{found['id']}.{found['generation']}.3"
        (again,) = json.loads(fetch(server, f"/data?token={token}&seen={seen}")[2])["runs"]
        assert (again["full"], again["rounds"], again["clients"]) == (False, [], [])


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example:{port}", ""])
def test_another_host_name_is_refused(tmp_path: Path, host: str) -> None:
    with serving() as server:
        path = f"/?token={server.token}"
        named = host.format(port=server.server_port)
        status, _, said = fetch(server, path, Host=named)
        assert (status, f"http://localhost:{server.server_port}/" in said.decode()) == (403, True)
        assert fetch(server, path, Host=f"localhost:{server.server_port}")[0] == 200


def test_the_port_of_http_is_left_out_by_browsers() -> None:
    assert {"127.0.0.1", "localhost", "localhost:80"} < set(hosts(80))
    assert hosts(8080) == ["127.0.0.1:8080", "localhost:8080"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"])
def test_only_get_is_answered(method: str) -> None:
    with serving() as server:
        status, headers, _ = fetch(server, f"/?token={server.token}", method)
        assert status == 405
        assert HEADERS.items() <= dict(headers.items()).items()


def test_no_path_of_a_request_reaches_a_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=2)
    with serving(run) as server:
        for path in ("/config.json", "/../../etc/passwd", f"/{run}/config.json", "//etc/passwd", "/data/", "/%2e%2e/"):
            assert fetch(server, f"{path}?token={server.token}")[0] == 404


@pytest.mark.parametrize(
    "seen", ["x", "1.2", "1.2.3.4", "1.1.999999999999999999", "-1.0.0", "1.1.1," * 1_000, "\u0661.1.1"]
)
def test_what_a_page_says_that_it_has_is_checked(tmp_path: Path, seen: str) -> None:
    run = make_run(tmp_path / "run", rounds=2)
    with serving(run) as server:
        status, _, content = fetch(server, f"/data?token={server.token}&seen={quote(seen)}")
        assert status == 200
        assert len(json.loads(content)["runs"]) == 1


def test_the_page_has_no_other_source() -> None:
    with serving() as server:
        page = fetch(server, f"/?token={server.token}")[2].decode()
    assert "innerHTML" not in page
    assert "insertAdjacentHTML" not in page
    assert not re.search(r"document\.write|eval\(|new Function", page)
    assert set(re.findall(r"https?://[^\"'\s)]+", page)) == {"http://www.w3.org/2000/svg"}  # the name of a language
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", page) == ["data:,"]


def test_many_runs_are_the_newest(tmp_path: Path) -> None:
    runs = []
    for place in range(MOST_RUNS + 5):
        (run := tmp_path / f"{place:03d}").mkdir()
        (run / "config.json").write_text("{}")
        runs.append(run)
    news = Board(lambda: runs).news({})["runs"]
    assert [run["about"]["name"] for run in news] == [run.name for run in runs[5:]]


def test_of_a_large_sweep_the_newest_runs_are_shown(tmp_path: Path) -> None:
    """The folder of a cell is named after what it computes: the first may have the newest run."""
    for place in range(MOST_RUNS + 5):
        run = tmp_path / "cells" / f"{place:016x}" / f"20260101-{900 - place:06d}-fedper"
        run.mkdir(parents=True)
        (run / "config.json").write_text("{}")
    other = make_run(tmp_path / "20250101-000000-old", rounds=2)
    news = Board(directories([str(tmp_path), str(other)], tmp_path)).news({})["runs"]
    names = [run["about"]["name"] for run in news]
    assert names == sorted(names)
    assert names == [f"20260101-{number:06d}-fedper" for number in range(901 - MOST_RUNS, 901)]


# The command


@contextmanager
def watching(*arguments: str, home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start ``floret watch`` and yield it with the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "watch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"FLORET_HOME": str(home)},
    )
    try:
        assert process.stdout
        process.stdout.readline()
        yield process, process.stdout.readline().removeprefix("Page: ").strip()
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path, end: signal.Signals) -> None:
    (tmp_path / "runs").mkdir()
    make_run(tmp_path / "runs" / "20260101-a", rounds=2)
    with watching(home=tmp_path) as (process, address):
        parts = urlsplit(address)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
        connection.request("GET", f"/data?{parts.query}")
        (run,) = json.loads(connection.getresponse().read())["runs"]
        assert run["about"]["name"] == "20260101-a"
        process.send_signal(end)  # with a connection that is still open
        assert process.wait(PATIENCE) == 0
        assert process.stderr
        assert process.stderr.read() == "Ended\n"
        connection.close()


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with serving() as server:
        done = subprocess.run(
            [BIN / "floret", "watch", "--port", str(server.server_port), "--output-dir", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert done.returncode == 2
    assert done.stderr == f"floret: --port {server.server_port}: cannot be used (Address already in use)\n"


def test_the_page_needs_no_package_of_the_extras(tmp_path: Path) -> None:
    code = (
        "import sys, results.watch; print(*({'matplotlib', 'jinja2', 'markupsafe', 'rich', 'torch'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout == "\n"
