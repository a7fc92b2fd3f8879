"""The typed history: it is written as it was read, and one rule defines the rounds that measured all clients."""

import html
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from common.bounds import at_most
from results.follow import Follower
from results.history import ClientRound, History, Note, Refusal, Round, Scores, Traffic
from results.report import client_table, table, write_report
from results.run import read_run
from server_app.federation import Federation
from server_app.rounds import described
from strategies.core import Client
from tests.fuzz_replies import Answers, _joining
from tests.harness import federate, timeless

PATHOLOGICAL = "pathological, 2 classes per client"


def measured(number: int, names: str, *, trained: str | None = None, level: float = 0.5) -> Round:
    """Return a round in which the clients ``names`` were measured after training, and ``trained`` before it, too."""
    clients = {
        name: ClientRound(
            trained=name in (names if trained is None else trained),
            before=Scores(level / 2) if name in (names if trained is None else trained) else Scores(),
            after=Scores(level, level),
            loss=1.0,
            bytes=Traffic(1, 2),
            seconds=0.1,
        )
        for name in names
    }
    return Round.of(number, clients, {name: {"test": 4, "validation": 2} for name in names}, [], [], 1.0)


def test_a_round_counts_what_travelled_and_the_losses_of_those_that_trained() -> None:
    clients = {
        name: ClientRound(name == "a", Scores(), Scores(0.5), loss, Traffic(1, 2), None)
        for name, loss in (("a", 0.5), ("b", 9.0))
    }
    samples = {name: {"test": 4, "validation": 0} for name in clients}
    line = Round.of(1, clients, samples, [], [], 1.0, others=[Traffic(10, 20)])
    assert (line.bytes, line.loss) == (Traffic(12, 24), 0.5)


def test_what_one_real_node_says_counts_for_a_hundred_times_the_median() -> None:
    """A client that nobody knows says 1 of 10^9 samples, and a loss of 10^30."""
    clients = {
        name: ClientRound(True, Scores(), Scores(float(name == "d")), 1e30 if name == "d" else 0.5, Traffic(), None)
        for name in "abcd"
    }
    samples = {name: {"test": 10**9 if name == "d" else 4, "validation": 0} for name in "abcd"}
    line = Round.of(1, clients, samples, [], [], 1.0, bounded=True)
    assert line.after["test"].weighted_mean == pytest.approx(400 / 412)
    assert line.after["test"].mean == 0.25
    # The median is 0.5, and a loss of up to 100 may be honest.
    assert line.loss == pytest.approx((100 + 3 * 0.5) / 4)
    trusted = Round.of(1, clients, samples, [], [], 1.0)
    assert (trusted.after["test"].weighted_mean, trusted.loss) == pytest.approx((1.0, 2.5e29))
    assert at_most([0, 0, 7, 1000]) == [0, 0, 7, 1000]
    assert at_most([0, 0]) == [0, 0]
    # Nor for less: a loss may be below zero.
    losses = {"a": 0.5, "b": 0.6, "c": -3e38}
    clients = {name: ClientRound(True, Scores(), Scores(), loss, Traffic(), None) for name, loss in losses.items()}
    said = Round.of(
        1, clients, {name: dict.fromkeys(("test", "validation"), 4) for name in losses}, [], [], 1.0, bounded=True
    )
    assert said.loss == pytest.approx((0.5 + 0.6 - 100) / 3)


def complete(rounds: Sequence[Round], planned: int, every: int, when: str = "after") -> list[int]:
    return [line.round for line in History(tuple(rounds), planned, every).complete_rounds(when)]


def test_with_full_participation_every_round_is_complete() -> None:
    assert complete([measured(n, "abc") for n in (1, 2, 3)], planned=3, every=5) == [1, 2, 3]


def test_part_of_the_clients_train_and_all_are_asked_now_and_then() -> None:
    # Early on only those that have trained have a model to measure: round 2 asks all and measures three of four.
    rounds = [measured(n, names) for n, names in enumerate(["ab", "abc", "ad", "abcd", "bd", "abcd", "cd"], start=1)]
    assert complete(rounds, planned=100, every=2) == [4, 6]
    # In its last round a run asks all, whatever evaluate-every.
    assert complete([*rounds, measured(8, "abcd")], planned=8, every=100) == [4, 6, 8]


@pytest.mark.parametrize("done", [5, 6, 9])
def test_a_round_of_eight_of_ten_clients_is_not_complete(done: int) -> None:
    rounds = [measured(n, "abcdefghij" if n % 5 == 0 else "abcdefgh") for n in range(1, done + 1)]
    assert complete(rounds, planned=20, every=5) == [5]


def test_a_run_killed_before_all_were_asked_goes_by_the_round_that_measured_most() -> None:
    rounds = [measured(1, "ab"), measured(2, "abc"), measured(3, "ac")]
    assert complete(rounds, planned=20, every=5) == [2]
    assert complete([], planned=20, every=5) == []


def test_the_best_round_is_the_first_of_equals_on_the_validation_split() -> None:
    levels = [0.4, 0.7, 0.7, 0.6]
    history = History(tuple(measured(n, "ab", level=level) for n, level in enumerate(levels, 1)), 4, 1)
    best = history.best_by_validation()
    assert best
    assert best.round == 2
    figures = history.figures()
    assert figures.bytes == Traffic(up=8, down=16)
    assert figures.best_validation
    assert figures.best_validation.test_mean == 0.7


def test_a_client_that_left_does_not_make_the_rounds_after_it_incomplete() -> None:
    rounds = [measured(n, "abc" if n < 4 else "ab") for n in range(1, 7)]
    assert complete(rounds, planned=6, every=2) == [1, 2, 3, 4, 5, 6]
    history = History(tuple(rounds), 6, 2)
    last = history.last_complete()
    assert last is not None
    assert last.round == 6


def test_a_client_that_joined_makes_the_rounds_before_it_incomplete() -> None:
    rounds = [measured(n, "ab" if n < 4 else "abc") for n in range(1, 7)]
    assert complete(rounds, planned=6, every=2) == [4, 5, 6]


def test_a_round_that_measured_nobody_says_nothing_of_the_others() -> None:
    rounds = [measured(1, "a"), measured(2, "abc"), measured(3, "ab"), measured(4, "")]
    assert complete(rounds, planned=20, every=2) == [2]


def test_before_is_measured_where_clients_train() -> None:
    rounds = [measured(1, "ab"), measured(2, "abcd", trained="cd"), measured(3, "b")]
    assert complete(rounds, planned=20, every=2, when="before") == [1, 2]
    assert complete(rounds, planned=20, every=2) == [2]


def test_figures_of_a_killed_run_are_those_of_its_last_complete_round() -> None:
    rounds = [measured(1, "ab", level=0.9), measured(2, "abc", level=0.75), measured(3, "a", level=1.0)]
    figures = History(tuple(rounds), 20, 2).figures()
    assert figures.after == rounds[1].after["test"]
    assert figures.before == rounds[1].before["test"]
    assert figures.best_validation is not None
    assert (figures.best_validation.round, figures.best_validation.test_mean) == (2, 0.75)
    assert (figures.bytes, figures.seconds, figures.seconds_per_round) == (Traffic(6, 12), 3.0, 1.0)
    # One that came to its end says what its last round was, even if nobody was measured in it.
    ended = History((*rounds, measured(4, "")), 4, 2).figures(seconds=9.0)
    assert ended.after.to_json() is None
    assert ended.seconds == 9.0


def test_a_round_is_written_as_it_was_read() -> None:
    scores = {"test": 0.5, "validation": None}
    spread = {"mean": 0.5, "weighted_mean": 0.5, "std": 0.0, "worst_decile": 0.5}
    line: dict[str, Any] = {
        "round": 3,
        "clients": {
            "a": {"trained": True, "before": scores, "after": scores, "loss": 0.25, "bytes": {"up": 1, "down": 2}}
            | {"seconds": 0.5},
            "b": {"trained": False, "before": None, "after": scores, "loss": None, "bytes": {"up": 0, "down": 2}}
            | {"seconds": None},
        },
        "accuracy": {
            "before": {"test": spread, "validation": None},
            "after": {"test": spread, "validation": None},
        },
        "loss": 0.25,
        "bytes": {"up": 1, "down": 4},
        "refused": [{"client": "c", "reason": "tensor head.bias is missing"}],
        "notes": [{"client": "a", "note": "a file is damaged"}],
        "seconds": 1.5,
    }
    read = Round.from_json(line)
    assert json.dumps(read.to_json()) == json.dumps(line)
    again = Round.of(
        3,
        read.clients,
        {"a": {"test": 4, "validation": 0}, "b": {"test": 2, "validation": 0}},
        [Refusal("c", "tensor head.bias is missing")],
        [Note("a", "a file is damaged")],
        1.5,
    )
    assert again == read


def test_a_line_of_an_earlier_version_is_read() -> None:
    old = Round.from_json({"round": 1, "clients": {"a": {"trained": True, "after": {"test": 1}}}})
    assert old.clients["a"].after == Scores(1.0)
    assert (old.notes, old.refused, old.bytes, old.seconds) == ((), (), Traffic(), 0.0)


@pytest.mark.parametrize(
    ("telling", "words"),
    [
        (["exact", "exact", "exact"], ""),
        (["rounded", "exact", "rounded"], "2 of 3 clients tell their accuracies in steps of 5 points"),
        (["none", "exact", "exact"], "1 of 3 clients tell no accuracies"),
        (["none", "rounded", "exact"], "1 of 3 clients tell their accuracies in steps of 5 points, 1 none"),
    ],
)
def test_accuracies_that_nodes_round_or_keep_are_not_quoted_as_exact(
    tmp_path: Path, telling: list[str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "query.describe":
            reply.content.config_records["client"]["accuracies"] = telling[message.metadata.dst_node_id - 1000]
        return reply

    caplog.set_level("INFO", "flwr")
    outcome = federate(tmp_path / "runs", 3, tamper=tamper, report=True, method="fedper", rounds=1, local_epochs=1)
    for place, said in enumerate(telling):
        more = {"exact": "", "rounded": "; it rounds accuracies", "none": "; it tells no accuracies"}[said]
        assert re.search(rf"Client {place} joined \(\d+ training samples{more}\)", caplog.text)
    assert outcome.summary.get("accuracies") == (dict(Counter(telling)) if words else None)
    run = read_run(outcome.directory)
    page = " ".join((outcome.directory / "report.html").read_text().split())
    for text in (client_table(run), table([run, run]), page):
        assert words in text
        assert words or not re.search("clients tell", text)
    assert f"over clients. {words}." in page or not words
    follower = Follower(outcome.directory)
    follower.look()
    assert follower.news(-1, 0)["about"]["words"][3:] == [words] * bool(words)


def test_a_client_that_comes_back_with_another_policy_is_told() -> None:
    federation = Federation(Answers({}), _joining())
    client = Client("a", 1, 10, 1, 2)
    federation.roster.add(client)
    before = described(federation)
    federation.roster.add(replace(client, accuracies="rounded"))
    assert described(federation) != before


@pytest.mark.parametrize(
    ("own", "dataset", "partition", "words"),
    [
        (0, "digits", "pathological", PATHOLOGICAL),
        (1, *[f"{said}, and own data of 1 of 2 clients" for said in ("digits", "pathological", PATHOLOGICAL)]),
        (2, *["each client's own data"] * 3),
    ],
)
def test_data_of_the_nodes_are_not_called_those_of_the_run(
    tmp_path: Path, own: int, dataset: str, partition: str, words: str
) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "query.describe":
            said = reply.content.config_records["client"]
            said["own-data"] = True
            if message.metadata.dst_node_id >= 1000 + own:
                del said["own-data"], said["accuracies"]  # as an earlier Floret says it
        return reply

    outcome = federate(tmp_path / "runs", 2, tamper=tamper, report=True, method="fedper", rounds=1, local_epochs=1)
    assert (outcome.summary["dataset"], outcome.summary["partition"]) == (dataset, partition)
    clients = json.loads((outcome.directory / "config.json").read_text())["clients"]
    assert [name for name, client in clients.items() if client.get("own")] == ["0", "1"][:own]
    run = read_run(outcome.directory)
    assert (run.dataset, run.partition) == (dataset, words)
    page = html.unescape((outcome.directory / "report.html").read_text())
    assert f"<h1>fedper on {dataset}</h1>" in page
    assert f"<title>fedper on {dataset}</title>" in page
    assert f"mlp · {words} · 2\nclients" in page
    follower = Follower(outcome.directory)
    follower.look()
    about = follower.news(0, 0)["about"]
    assert (about["dataset"], about["words"][1]) == (dataset, words)


def test_what_the_server_has_in_memory_is_what_its_files_say(tmp_path: Path) -> None:
    outcome = federate(tmp_path / "runs", 4, report=True, rounds=5, participation=0.5, evaluate_every=2)
    run = read_run(outcome.directory)
    assert [line.to_json() for line in run.rounds] == outcome.history
    for key, value in run.figures.to_json().items():
        assert value == outcome.summary[key]
    assert timeless(run.history.figures().to_json()) == timeless(run.figures.to_json())
    # The server wrote its report from what it had in memory.
    write_report([run], tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (outcome.directory / "report.html").read_bytes()
