"""A run resumed after its server was killed: the numbers of an uninterrupted run, or one line with the reason."""

import errno
import json
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.numpy import load_file, save

from client_app.app import app as client_app
from common.durable import UnreadableError, digest, read_manifest, write_manifest, write_whole
from common.errors import FloretError
from common.privacy.accounting import Release, epsilon_of
from common.privacy.ledger import Ledger
from common.run_config import default_config
from common.simulation import KeptState
from data.files import sha256_of
from results.follow import Follower
from results.run import read_run
from results.rundir import RunDirectory
from server_app.checkpoint import Checkpoint, Checkpoints, Mail
from server_app.settings import read_config
from strategies.core import Client
from tests.harness import EVERY_METHOD, ON_MLP, ROOT, DirectGrid, Outcome, federate, kept, timeless

CLIENTS = 5


class ServerKilledError(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def killing(at: int, last: int = 1) -> Callable[[Message, Message], Message]:
    """Return a ``tamper`` that loses the server when so many clients have answered in round ``at``."""
    answered = 0

    def tamper(message: Message, reply: Message) -> Message:
        nonlocal answered
        if message.metadata.message_type == "train" and message.metadata.group_id == str(at):
            answered += 1
            if answered == last:
                raise ServerKilledError
        return reply

    return tamper


def crash(output: Path, states: Path, at: int, last: int = 1, **keys: Any) -> Path:
    """Run until ``last`` clients have answered in round ``at``, then lose the server; return the run directory."""
    with pytest.raises(ServerKilledError):
        federate(output, CLIENTS, states=states, tamper=killing(at, last), **keys)
    (directory,) = output.iterdir()
    return directory


def keys_of(method: str) -> dict[str, Any]:
    return {"method": method, "rounds": 5, "participation": 0.6, "local_epochs": 1, "evaluate_every": 2} | ON_MLP.get(
        method, {}
    )


def personal(outcome: Outcome) -> list[Path]:
    return sorted((outcome.directory / "checkpoints" / "personal").iterdir())


def assert_same(one: Outcome, other: Outcome) -> None:
    assert timeless(one.history) == timeless(other.history)
    assert timeless(one.summary) == timeless(other.summary)
    for first, second in zip(one.grid.contexts.values(), other.grid.contexts.values(), strict=True):
        states = kept(first), kept(second)
        assert states[0].round == states[1].round
        tensors = [state.load() for state in states]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_a_resumed_run_ends_with_the_same_numbers(tmp_path: Path, method: str) -> None:
    keys = keys_of(method)
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    directory = crash(tmp_path / "cut", tmp_path / "states", 4, **keys)
    resumed = federate(tmp_path / "cut", CLIENTS, states=tmp_path / "states", resume=str(directory), **keys)
    assert_same(whole, resumed)


def test_checkpoints_that_are_rarer_than_rounds_and_crashes_that_are_not(tmp_path: Path) -> None:
    keys = keys_of("pfps-lwc") | {"rounds": 8, "checkpoint_every": 3}
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    states, output = tmp_path / "states", tmp_path / "cut"
    directory = crash(output, states, 3, **keys)  # before any checkpoint but that of the start
    for at in (6, 6, 8):
        again = crash(output, states, at, **keys, resume=str(directory))
        assert again == directory
    resumed = federate(output, CLIENTS, states=states, **keys, resume="latest")
    assert_same(whole, resumed)
    told = json.loads((directory / "config.json").read_text())
    assert [line["round"] for line in told["resumed"]] == [0, 3, 3, 6]
    assert sorted(path.name for path in (directory / "checkpoints").glob("round-*")) == [
        f"round-00000{n}.{kind}" for n in (6, 8) for kind in ("json", "safetensors")
    ]


def test_a_round_takes_as_long_as_its_checkpoint_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, longest = Checkpoints.write, 0.5

    def slow(checkpoints: Checkpoints, checkpoint: Checkpoint) -> None:
        time.sleep(longest)
        write(checkpoints, checkpoint)

    monkeypatch.setattr(Checkpoints, "write", slow)
    begun = time.perf_counter()
    outcome = federate(tmp_path / "runs", rounds=3, checkpoint_every=1)
    assert sum(line["seconds"] for line in outcome.history) <= time.perf_counter() - begun
    # The first round has none before it.
    assert all(line["seconds"] >= longest for line in outcome.history[1:])


def test_clients_are_told_after_which_rounds_a_run_was_resumed(tmp_path: Path) -> None:
    """What a client made after them did not happen, also where it takes part in no such round again."""
    keys = keys_of("fedper") | {"checkpoint_every": 2}

    def told(outcome: Outcome) -> set[tuple[Any, ...]]:
        configs = [message.content.config_records["config"] for message in outcome.grid.messages]
        return {tuple(config["session.resumed"]) for config in configs if "session.resumed" in config}  # type: ignore[arg-type]

    assert told(federate(tmp_path / "whole", CLIENTS, **keys)) == {()}
    directory = crash(tmp_path / "cut", tmp_path / "states", 4, **keys)
    crash(tmp_path / "cut", tmp_path / "states", 5, **keys, resume=str(directory))
    resumed = federate(tmp_path / "cut", CLIENTS, states=tmp_path / "states", **keys, resume=str(directory))
    assert told(resumed) - {()} == {(2, 4)}


def test_tensors_in_any_order_of_memory_come_back_as_they_were(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    sent = np.arange(24.0).reshape(2, 3, 4)
    tensors = {"columns": np.asfortranarray(sent), "turned": sent.T, "wide": np.broadcast_to(sent[0], (2, 3, 4))}
    tensors |= {"number": np.array(3.0)}
    checkpoints.write(Checkpoint(1, "x", (), tensors, tensors, {}, [], {}, 1.0))
    (read, _) = checkpoints.read()
    for found in (read.arrays, read.strategy):
        assert all(np.array_equal(found[name], array) for name, array in tensors.items())
        assert found["number"].shape == ()


def test_half_a_line_at_the_end_of_the_history_is_run_again(tmp_path: Path) -> None:
    keys = keys_of("fedper")
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    directory = crash(tmp_path / "cut", tmp_path / "states", 4, **keys)
    with (directory / "history.jsonl").open("a") as file:
        file.write('{"round": 4, "clients": {"0": {"trai')
    resumed = federate(tmp_path / "cut", CLIENTS, states=tmp_path / "states", resume=str(directory), **keys)
    assert_same(whole, resumed)


def test_what_is_no_text_after_the_checkpoint_is_run_again(tmp_path: Path) -> None:
    directory = crash(tmp_path / "cut", tmp_path / "states", 4, **keys_of("fedper"))
    with (directory / "history.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\x00")
    keys = {**keys_of("fedper"), "resume": str(directory)}
    resumed = federate(tmp_path / "cut", CLIENTS, states=tmp_path / "states", **keys)
    assert [line["round"] for line in resumed.history] == [*range(1, len(resumed.history) + 1)]


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = keys_of("fedavg")
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    directory = crash(tmp_path / "cut", tmp_path / "states", 4, **keys)
    newest = directory / "checkpoints" / "round-000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    resumed = federate(tmp_path / "cut", CLIENTS, states=tmp_path / "states", resume=str(directory), **keys)
    assert_same(whole, resumed)
    assert f"{newest} is damaged" in caplog.text
    assert "going back to round 2" in caplog.text


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    keys = keys_of("fedper") | {"evaluate_every": 1}
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    short = federate(tmp_path / "more", CLIENTS, states=tmp_path / "states", **keys | {"rounds": 3})
    longer = federate(tmp_path / "more", CLIENTS, states=tmp_path / "states", **keys, resume=str(short.directory))
    assert_same(whole, longer)
    with pytest.raises(FloretError, match="rounds = 5: the run to resume has finished round 5"):
        federate(tmp_path / "more", CLIENTS, states=tmp_path / "states", **keys, resume=str(short.directory))


def test_no_run_goes_on_with_fewer_rounds_than_it_has(tmp_path: Path) -> None:
    keys, states = keys_of("fedper"), tmp_path / "states"
    run = federate(tmp_path / "runs", CLIENTS, states=states, **keys | {"rounds": 3}).directory
    (run / "summary.json").unlink()
    before = (run / "history.jsonl").read_bytes()
    with pytest.raises(FloretError, match="rounds = 2: the run to resume has finished round 3"):
        federate(tmp_path / "runs", CLIENTS, states=states, **keys | {"rounds": 2}, resume=str(run))
    assert (run / "history.jsonl").read_bytes() == before


def test_a_run_that_goes_on_is_unfinished_until_its_new_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of("fedper") | {"evaluate_every": 1}
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    short = federate(tmp_path / "more", CLIENTS, states=tmp_path / "states", **keys | {"rounds": 3})
    more = keys | {"states": tmp_path / "states", "resume": str(short.directory)}

    def killed(*_: Any) -> None:
        raise ServerKilledError

    for at in (5, 6):  # while round 5 is made, and when all rounds are
        with monkeypatch.context() as patches:
            patches.setattr(RunDirectory, "write_summary", killed)
            with pytest.raises(ServerKilledError):
                federate(tmp_path / "more", CLIENTS, tamper=killing(at), **more)
        run = read_run(short.directory)
        assert not run.finished
        assert run.history.rounds[-1].round == at - 1
    longer = federate(tmp_path / "more", CLIENTS, **more)
    assert timeless(whole.history) == timeless(longer.history)
    assert timeless(whole.summary) == timeless(longer.summary)


@pytest.fixture
def like_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the harness for a simulation on Ray, whose clients keep their states in files of the run directory."""
    for place in ("server_app.app", "server_app.federation", "strategies.core.exchange"):
        monkeypatch.setattr(f"{place}.is_simulated", lambda _: True)
    monkeypatch.setattr("client_app.app.in_simulation", lambda: True)
    monkeypatch.setattr("server_app.app.find_by_node", lambda _: None)


@pytest.mark.usefixtures("like_ray")
def test_a_simulation_is_resumed_with_the_clients_that_it_had(tmp_path: Path) -> None:
    directory = crash(tmp_path / "cut", tmp_path / "states", 4, **keys_of("fedper"))
    before = (directory / "config.json").read_bytes()
    with pytest.raises(
        FloretError, match=r"resume: the run to resume had 5 clients with \d+ samples, now there are 8 "
    ):
        federate(tmp_path / "cut", 8, states=tmp_path / "states", resume=str(directory), **keys_of("fedper"))
    assert (directory / "config.json").read_bytes() == before


@pytest.mark.usefixtures("like_ray")
def test_a_simulation_is_not_resumed_with_a_file_that_was_replaced(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).standard_normal((120, 8), dtype=np.float32), np.arange(120) % 3
    keys = keys_of("fedper") | {"dataset": "npz", "data_dir": str(tmp_path / "mine.npz"), "partition": "iid"}
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x[:30], y_test=y[:30])
    directory = crash(tmp_path / "cut", tmp_path / "states", 4, **keys)
    before = (directory / "history.jsonl").read_bytes()
    had = sha256_of(tmp_path / "mine.npz")[:16]
    assert json.loads((directory / "config.json").read_text())["digest"] == had
    np.savez(tmp_path / "mine.npz", x_train=-x, y_train=y, x_test=x[:30], y_test=y[:30])
    has = sha256_of(tmp_path / "mine.npz")[:16]
    line = f"resume: the run to resume read other data (SHA-256 {had}...) than data-dir = {tmp_path}/mine.npz has "
    line += f"({has}...); give the same"
    with pytest.raises(FloretError, match=f"^{re.escape(line)}$"):
        federate(tmp_path / "cut", CLIENTS, resume=str(directory), **keys)
    assert (directory / "history.jsonl").read_bytes() == before


@pytest.mark.usefixtures("like_ray")
def test_a_resumed_simulation_ends_where_its_budget_does(tmp_path: Path) -> None:
    """Rounds that it makes again have the same noise; the round that ends it is measured and kept as the last one."""
    spent = epsilon_of([Release(4.0, 0.6, 5)], 1e-5)
    keys = keys_of("fedper") | {"rounds": 9, "checkpoint_every": 3, "evaluate_every": 4, "num_classes": 10}
    keys |= {"privacy__unit": "client", "privacy__where": "server", "privacy__noise": 4.0}
    keys |= {"privacy__epsilon": spent + 1e-6}
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    assert [line["round"] for line in whole.history] == [1, 2, 3, 4, 5]
    assert whole.summary["ended_after"] == 5
    assert len(whole.history[-1]["clients"]) == CLIENTS
    assert whole.summary["epsilon"] == pytest.approx(spent)
    assert read_run(whole.directory).fewer_rounds == "ended where privacy.epsilon was spent: 5 of 9 rounds"
    states = tmp_path / "states"
    directory = crash(tmp_path / "cut", states, 5, **keys)
    resumed = federate(tmp_path / "cut", CLIENTS, states=states, resume=str(directory), **keys)
    assert timeless(whole.history) == timeless(resumed.history)
    assert [line.round for line in Ledger(directory / "privacy.jsonl").lines()] == [1, 2, 3, 4, 5]
    again = federate(tmp_path / "cut", CLIENTS, states=states, resume=str(directory), **keys)
    assert timeless(whole.history) == timeless(again.history)
    assert timeless(whole.summary) == timeless(again.summary)


@pytest.mark.usefixtures("like_ray")
@pytest.mark.parametrize("silent", [1, CLIENTS])
def test_a_run_that_its_budget_ends_is_that_of_its_last_round_whoever_goes_away_in_it(
    tmp_path: Path, silent: int
) -> None:
    def tamper(message: Message, reply: Message) -> Message | None:
        last = message.metadata.message_type == "evaluate" and message.metadata.group_id == "3"
        return None if last and message.metadata.dst_node_id < 1000 + silent else reply

    keys = keys_of("fedper") | {"rounds": 6, "round_timeout": 5.0, "num_classes": 10}
    keys |= {"privacy__unit": "client", "privacy__where": "server", "privacy__noise": 4.0}
    keys |= {"privacy__epsilon": epsilon_of([Release(4.0, 0.6, 3)], 1e-5) + 1e-6}
    outcome = federate(tmp_path / "runs", CLIENTS, tamper=tamper, **keys)
    assert [line["round"] for line in outcome.history] == [1, 2, 3]
    last = outcome.history[-1]["accuracy"]["after"]["test"]
    assert outcome.summary["accuracy"]["after"]["mean"] == last["mean"]
    run = read_run(outcome.directory)
    assert (run.figures.after.mean, run.planned_rounds, run.ended_after) == (last["mean"], 6, 3)
    follower = Follower(outcome.directory)
    follower.look()
    assert follower.finished


@pytest.mark.usefixtures("like_ray")
def test_a_simulation_that_is_resumed_with_other_noise_pays_for_what_it_has_released(tmp_path: Path) -> None:
    keys = keys_of("fedper") | {"rounds": 6, "checkpoint_every": 3, "num_classes": 10}
    keys |= {"privacy__unit": "client", "privacy__where": "server", "privacy__epsilon": 3.0}
    states = tmp_path / "states"
    directory = crash(tmp_path / "cut", states, 6, **keys)
    resumed = federate(tmp_path / "cut", CLIENTS, states=states, resume=str(directory), **keys | {"rounds": 9})
    lines = Ledger(directory / "privacy.jsonl").lines()
    # With the new noise there is room for one round beside the five.
    assert [line.round for line in lines] == [1, 2, 3, 4, 5, 4]
    assert len({line.noise for line in lines}) == 2
    assert resumed.summary["epsilon"] == epsilon_of([line.release for line in lines], 1e-5)
    assert resumed.summary["epsilon"] <= 3.0


@pytest.mark.usefixtures("like_ray")
def test_a_simulation_that_is_resumed_without_checkpoints_has_its_personal_models(tmp_path: Path) -> None:
    keys = keys_of("fedper")
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    directory = crash(tmp_path / "cut", tmp_path / "states", 4, **keys)
    resumed = federate(tmp_path / "cut", CLIENTS, resume=str(directory), **keys | {"checkpoint_every": 0})
    assert timeless(whole.history) == timeless(resumed.history)


@pytest.mark.usefixtures("like_ray")
@pytest.mark.parametrize("where", ["client_app", "server_app"])
def test_personal_models_that_find_no_room_are_written_when_the_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    keys = keys_of("fedper")
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    full = "No space left on device"

    def no_room(path: Path, *content: Any, **how: Any) -> None:
        if path.parent.name == "personal" and path.stem in ("1", "3"):
            raise OSError(errno.ENOSPC, full, str(path))
        write_whole(path, *content, **how)

    line = f"2 personal models were not exported, that of client 1: .*1.safetensors.*{full}.*; resume the run, and it "
    with monkeypatch.context() as patches:
        patches.setattr(f"{where}.app.write_whole", no_room)
        if where == "server_app":  # clients on another machine do not see the folder, and send their models
            patches.setattr("client_app.app.Path.is_dir", lambda path: path.name != "personal" and Path.exists(path))
        with pytest.raises(FloretError, match=line):
            federate(tmp_path / "full", CLIENTS, **keys)
    (directory,) = (tmp_path / "full").iterdir()
    assert not read_run(directory).finished
    resumed = federate(tmp_path / "full", CLIENTS, resume=str(directory), **keys)
    assert timeless(whole.history) == timeless(resumed.history)
    assert [path.read_bytes() for path in personal(resumed)] == [path.read_bytes() for path in personal(whole)]


@pytest.mark.usefixtures("like_ray")
def test_personal_models_that_find_no_room_are_told_where_no_checkpoint_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(path: Path, *content: Any, **how: Any) -> None:
        if path.parent.name == "personal":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_whole(path, *content, **how)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("client_app.app.write_whole", no_room)
        outcome = federate(tmp_path / "full", CLIENTS, **keys_of("fedper") | {"checkpoint_every": 0})
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == CLIENTS
    assert all(line.endswith(".safetensors cannot be written (No space left on device)") for line in told)
    assert read_run(outcome.directory).finished


@pytest.mark.usefixtures("like_ray")
def test_a_run_finishes_without_the_personal_model_of_a_client_whose_state_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of("fedper") | {"participation": 1.0}
    directory = crash(tmp_path / "cut", tmp_path / "states", 4, **keys)
    for file in (directory / "checkpoints" / "clients").rglob("0/*.safetensors"):
        file.write_bytes(b"damaged")
    resumed = federate(tmp_path / "cut", CLIENTS, resume=str(directory), **keys)
    assert [path.stem for path in personal(resumed)] == ["1", "2", "3", "4"]
    assert "The personal model of client 0 was not exported: no intact version of the client's state" in caplog.text


@pytest.mark.usefixtures("like_ray")
def test_the_personal_models_of_a_resumed_simulation_are_those_of_its_last_round(tmp_path: Path) -> None:
    """The clients of round 3 had trained when the server was lost; the run is then resumed to end after round 2."""
    keys = keys_of("fedper") | {"rounds": 2}
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    directory = crash(tmp_path / "cut", tmp_path / "states", at=3, last=3, **keys | {"rounds": 5})
    resumed = federate(tmp_path / "cut", CLIENTS, resume=str(directory), **keys)
    assert timeless(whole.history) == timeless(resumed.history)
    assert [model.read_bytes() for model in personal(whole)] == [model.read_bytes() for model in personal(resumed)]
    assert {path.stem for path in personal(whole)} < set("01234")


@pytest.mark.usefixtures("like_ray")
def test_the_noise_of_a_simulated_server_is_the_same_after_a_resume(tmp_path: Path) -> None:
    keys = keys_of("fedper") | {"privacy__unit": "client", "privacy__where": "server", "privacy__noise": 1.0}
    keys |= {"privacy__epsilon": 0.0, "rounds": 4}
    whole = federate(tmp_path / "whole", CLIENTS, **keys)
    half = federate(tmp_path / "cut", CLIENTS, **keys | {"rounds": 2})
    resumed = federate(tmp_path / "cut", CLIENTS, resume=str(half.directory), **keys)
    assert [line["accuracy"] for line in whole.history] == [line["accuracy"] for line in resumed.history]


def test_another_run_in_between_takes_nothing_of_a_run_that_is_resumed(tmp_path: Path) -> None:
    keys = keys_of("fedper") | {"participation": 1.0, "evaluate_every": 1, "states": tmp_path / "states"}
    whole = federate(tmp_path / "whole", CLIENTS, **keys | {"states": tmp_path / "other"})
    directory = crash(tmp_path / "cut", at=4, last=CLIENTS, **keys)
    federate(tmp_path / "between", CLIENTS, **keys | {"rounds": 2, "seed": 7})
    resumed = federate(tmp_path / "cut", CLIENTS, resume=str(directory), **keys)
    assert timeless(whole.history) == timeless(resumed.history)


@pytest.mark.parametrize(("method", "rounds"), [("fedper", 5), ("local", 20)])
def test_a_client_without_the_version_that_is_asked_for_says_so(tmp_path: Path, method: str, rounds: int) -> None:
    """Not even a milestone, of which rounds are missing, takes its place."""
    keys = keys_of(method) | {"participation": 1.0, "rounds": rounds, "states": tmp_path / "states"}
    directory = crash(tmp_path / "cut", at=rounds - 1, last=CLIENTS, **keys)
    newest = directory / "checkpoints" / f"round-{rounds - 2:06d}.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    resumed = federate(tmp_path / "cut", CLIENTS, resume=str(directory), **keys)
    for line in resumed.history[rounds - 3 :]:
        assert not any(client["trained"] for client in line["clients"].values())
        assert len({refusal["client"] for refusal in line["refused"]}) == CLIENTS
        assert all("and nothing earlier is left" in refusal["reason"] for refusal in line["refused"])


def test_a_start_that_was_given_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 0 trains in rounds 4 and 5 of a start of which no checkpoint is left, and is away in those of the next."""
    keys = keys_of("fedper") | {"participation": 1.0, "evaluate_every": 1, "checkpoint_every": 3, "rounds": 8}
    keys |= {"min_clients": 2, "states": tmp_path / "states"}
    away = False

    def present(grid: DirectGrid) -> list[int]:
        asked = [int(m.metadata.group_id) for m in grid.messages if m.metadata.message_type in ("train", "evaluate")]
        return [node for node in grid.contexts if not (away and node == 1000 and max(asked, default=3) + 1 in (4, 5))]

    crash(tmp_path / "cut", at=4, **keys)
    with monkeypatch.context() as patches:
        patches.setattr(DirectGrid, "get_node_ids", present)
        copies = [tmp_path / "once", tmp_path / "twice"]
        for copy in copies:
            shutil.copytree(tmp_path / "cut", copy / "run")
            shutil.copytree(tmp_path / "states", copy / "states")
        histories = []
        for copy in copies:
            (run,) = (copy / "run").iterdir()
            again = keys | {"states": copy / "states", "resume": str(run)}
            away = False
            if copy.name == "twice":
                with pytest.raises(ServerKilledError):
                    federate(copy / "run", CLIENTS, tamper=killing(6), **again)
            away = True
            histories.append(timeless(federate(copy / "run", CLIENTS, **again).history))
    assert "0" not in histories[0][3]["clients"]
    assert histories[0] == histories[1]


def test_what_cannot_be_resumed_says_why_and_loses_nothing(tmp_path: Path) -> None:
    keys = keys_of("fedprox")
    directory = crash(tmp_path / "cut", tmp_path / "states", 3, **keys)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}

    def resume(message: str, resume: str = str(directory), **other: Any) -> None:
        with pytest.raises(FloretError, match=message):
            federate(tmp_path / "cut", CLIENTS, states=tmp_path / "states", **keys | other, resume=resume)

    resume(r"lr = 0.5: the run to resume has 0.01; give the same config again", lr=0.5)
    resume(r"fedprox.mu = 3.0: the run to resume has 0.01", fedprox__mu=3.0)
    resume(r"method = 'fedper': the run to resume has 'fedprox'", method="fedper")
    resume(r"resume = '/nowhere': is not a run directory; it has no config.json", resume="/nowhere")
    resume(r"resume = 'here': must be an absolute path", resume="here")
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    shutil.rmtree(directory / "checkpoints")
    resume(r"resume: .*checkpoints has no checkpoint to go on from: the run wrote none \(checkpoint-every = 0\)")
    with pytest.raises(FloretError, match=r"resume = 'latest': there is no run in .*empty"):
        federate(tmp_path / "empty", CLIENTS, states=tmp_path / "states", **keys, resume="latest")


def test_the_latest_run_is_the_last_to_begin_when_clocks_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, *_ = read_config(default_config(ROOT) | {"output-dir": str(tmp_path), "resume": "latest"})
    try:
        for run, zone in ((0, "EARLY-14"), (1, "LATE+12")):
            time.sleep(1.1 * run)
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            last = RunDirectory.new(config, run, simulated=True).path
            (last / "config.json").write_text("{}")
        assert RunDirectory.find(config).path == last
    finally:
        monkeypatch.undo()
        time.tzset()


def test_one_run_directory_has_one_run(tmp_path: Path) -> None:
    keys = keys_of("fedper")
    directory = crash(tmp_path / "cut", tmp_path / "states", 3, **keys)

    def tamper(message: Message, reply: Message) -> Message:
        with pytest.raises(FloretError, match="is in use; its run is still going"):
            federate(tmp_path / "cut", CLIENTS, states=tmp_path / "states", **keys, resume=str(directory))
        raise ServerKilledError

    with pytest.raises(ServerKilledError):
        federate(tmp_path / "cut", CLIENTS, states=tmp_path / "states", tamper=tamper, **keys, resume=str(directory))


def test_a_new_run_goes_on_from_the_personal_models_unless_it_is_to_start_afresh(tmp_path: Path) -> None:
    keys = keys_of("fedper") | {"participation": 1.0, "rounds": 3}
    first = federate(tmp_path / "runs", CLIENTS, states=tmp_path / "states", **keys)
    again = federate(tmp_path / "runs", CLIENTS, states=tmp_path / "states", **keys)
    assert timeless(again.history) != timeless(first.history)
    fresh = federate(tmp_path / "runs", CLIENTS, states=tmp_path / "states", **keys, client_state="fresh")
    assert timeless(fresh.history) == timeless(first.history)
    other = federate(tmp_path / "runs", CLIENTS, states=tmp_path / "states", **keys, federation="other")
    assert timeless(other.history) == timeless(first.history)


def test_a_state_of_another_model_is_refused_with_a_way_out(tmp_path: Path) -> None:
    keys = keys_of("local") | {"participation": 1.0, "rounds": 1}
    federate(tmp_path / "runs", CLIENTS, states=tmp_path / "states", **keys)
    states, fails = tmp_path / "states", "no reply of any round was used"
    outcome = federate(tmp_path / "runs", CLIENTS, states=states, **keys, head_layers=2, fails=fails)
    reasons = [refusal["reason"] for refusal in outcome.history[0]["refused"]]
    assert len(reasons) == 2 * CLIENTS  # training, and the evaluation of the last round
    wrong = "the client's state is of another model ({}); give this federation another name with the key federation, "
    wrong += 'or start it with client-state="fresh"'
    # Every client names the same tensor, so that the log has one line for all.
    assert set(reasons) == {wrong.format("the model has no tensor extractor.fc2.bias")}
    outcome = federate(tmp_path / "runs", CLIENTS, states=states, **keys, num_classes=12, fails=fails)
    reasons = [refusal["reason"] for refusal in outcome.history[0]["refused"]]
    found = "tensor head.bias has shape (10,), that of the model (12,)"
    assert set(reasons) == {wrong.format(found)}


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    checkpoint = Checkpoint(
        round=7,
        lineage="x",
        resumed=(2, 5),
        arrays={"a.b": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3)},
        strategy={"own/a": np.ones(2, dtype=np.float32)},
        mail={"a/b": Mail(5, lambda: {"w": np.full((2, 2), 3, dtype=np.float32)})},
        clients=[Client("a", 5, 10, 2, 3, "id")],
        about={"num-classes": 10},
        seconds=1.5,
    )
    Checkpoints(tmp_path).write(checkpoint)
    back, notes = Checkpoints(tmp_path).read()
    assert notes == []
    assert (back.round, back.lineage, back.resumed, back.clients, back.about, back.seconds) == (
        (7, "x", (2, 5), checkpoint.clients, checkpoint.about, 1.5)
    )
    assert back.mail["a/b"].round == 5
    assert back.mail["a/b"].tensors()["w"].tolist() == [[3, 3], [3, 3]]
    for mine, theirs in ((checkpoint.arrays, back.arrays), (checkpoint.strategy, back.strategy)):
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
        assert all(mine[name].dtype == theirs[name].dtype for name in mine)


def test_checkpoints_are_ordered_by_their_rounds(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for server_round in (999_998, 999_999, 1_000_000):
        checkpoints.write(Checkpoint(server_round, "x", (), {"w": np.ones(1)}, {}, {}, [], {}, 1.0))
    assert checkpoints.newest() == 1_000_000
    assert Checkpoints(tmp_path).read()[0].round == 1_000_000
    assert {path.name for path in tmp_path.glob("*.json")} == {"round-999999.json", "round-1000000.json"}


def mail_files(folder: Path) -> dict[str, set[str]]:
    """Return which clients' tensors each file of mail holds."""
    return {
        path.name: {key.split("/")[0] for key in load_file(path)} for path in sorted(folder.glob("mail-*.safetensors"))
    }


def test_a_checkpoint_writes_what_clients_sent_since_the_last_one(tmp_path: Path) -> None:
    written: dict[str, int] = {}

    def tamper(message: Message, reply: Message) -> Message:
        for path in tmp_path.glob("runs/*/checkpoints/mail-*.safetensors"):
            written.setdefault(path.name, path.stat().st_size)
        return reply

    keys: dict[str, Any] = {"method": "ua-pdfl", "rounds": 8, "participation": 0.25, "local_epochs": 1}
    outcome = federate(tmp_path / "runs", 8, tamper=tamper, **keys)
    folder = outcome.directory / "checkpoints"
    trained = {
        line["round"]: {name for name, client in line["clients"].items() if client["trained"]}
        for line in outcome.history
    }
    # each file has the two clients of its round, and no file is there that nobody's last mail is in
    for name, clients in mail_files(folder).items():
        assert clients == trained[int(name[5:11])]
    checkpoint, _ = Checkpoints(folder).read()
    last = {name: server_round for server_round, names in trained.items() for name in names}
    assert {client: mail.round for client, mail in checkpoint.mail.items()} == last
    assert {f"mail-{server_round:06d}.safetensors" for server_round in last.values()} <= set(mail_files(folder))
    model = 4 * (10 + 128 + 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10)
    assert all(2 * model < size < 2.1 * model for size in written.values())


def box(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(1000, value, dtype=np.float32)}


def test_files_of_mail_do_not_pile_up(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)

    def write(server_round: int, rounds: dict[str, int]) -> None:
        checkpoints.write(
            Checkpoint(
                round=server_round,
                lineage="x",
                resumed=(),
                arrays={},
                strategy={},
                mail={client: Mail(sent, partial(box, sent)) for client, sent in rounds.items()},
                clients=[],
                about={},
                seconds=0.0,
            )
        )
        total = sum(path.stat().st_size for path in tmp_path.glob("mail-*"))
        assert total < 4 * len(rounds) * 4000

    rounds = {"a": 1, "b": 1, "c": 1}
    write(1, rounds)
    for server_round in range(2, 12):
        rounds["a"] = server_round
        write(server_round, rounds)
    # what a and b sent is read from files of different ages
    back, _ = Checkpoints(tmp_path).read()
    assert {client: float(mail.tensors()["w"][0]) for client, mail in back.mail.items()} == {"a": 11, "b": 1, "c": 1}
    # Of each round one client's mail stays, and that of nine others is given up.
    for server_round in range(12, 40):
        rounds[str(server_round)] = server_round
        write(server_round, rounds | {f"guest {n}": server_round for n in range(9)})
    back, _ = Checkpoints(tmp_path).read()
    assert {client: mail.round for client, mail in back.mail.items()}.items() >= rounds.items()


def test_what_a_manifest_names_that_cannot_be_read_now_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)

    def write(server_round: int) -> None:
        mail = {"a": Mail(server_round, partial(box, server_round))}
        checkpoints.write(Checkpoint(server_round, "x", (), {"w": np.ones(1)}, {}, mail, [], {}, 1.0))

    write(1)
    write(2)

    def unreadable(path: Path) -> dict[str, Any]:
        if path.name == "round-000002.json":
            raise UnreadableError("no rights now")
        return read_manifest(path)

    with monkeypatch.context() as patched:
        patched.setattr("server_app.checkpoint.read_manifest", unreadable)
        write(3)
    (tmp_path / "round-000003.json").unlink()
    back, notes = Checkpoints(tmp_path).read()
    assert (back.round, notes, back.mail["a"].tensors()["w"][0]) == (2, [], 2)


def test_a_damaged_file_of_mail_is_found(tmp_path: Path) -> None:
    keys = keys_of("ua-pdfl")
    directory = crash(tmp_path / "cut", tmp_path / "states", 4, **keys)
    newest = max((directory / "checkpoints").glob("mail-*"))
    newest.write_bytes(newest.read_bytes()[:-10])
    (checkpoint, notes) = Checkpoints(directory / "checkpoints").read()
    assert checkpoint.round == 2
    assert notes == [f"{newest} is damaged: {newest.stat().st_size} bytes instead of {newest.stat().st_size + 10}"]


def with_states(folder: Path, rounds: list[dict[str, int]], size: int = 1000) -> Checkpoints:
    """Write a checkpoint for each entry of ``rounds``, which says from which round each client's state is."""
    checkpoints = Checkpoints(folder)
    for server_round, clients in enumerate(rounds, start=1):
        states = {
            name: KeptState(at, json.dumps({"round": at}).encode(), bytes([at]) * size) for name, at in clients.items()
        }
        about = Checkpoint(server_round, "run", (), {"w": np.ones(1)}, {}, {}, [], {}, 1.0, states)
        checkpoints.write(about)
    return checkpoints


def test_a_checkpoint_writes_the_states_that_changed_since_the_last_one(tmp_path: Path) -> None:
    same = {"c": 1, "d": 1}
    with_states(tmp_path, [{"a": 1, "b": 1, **same}, {"a": 2, "b": 1, **same}, {"a": 2, "b": 3, **same, "e": 3}])
    held = {path.name: {name[0] for name in load_file(path)} for path in tmp_path.glob("states-*.safetensors")}
    assert held == {
        "states-000001.safetensors": set("abcd"),
        "states-000002.safetensors": {"a"},
        "states-000003.safetensors": {"b", "e"},
    }
    back, notes = Checkpoints(tmp_path).read()
    assert not notes
    assert {client: state.round for client, state in back.states.items()} == {"a": 2, "b": 3, **same, "e": 3}
    assert back.states["a"] == KeptState(2, b'{"round": 2}', bytes([2]) * 1000)


def test_large_states_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server_app.checkpoint._FULL", 2500)
    with_states(tmp_path, [dict.fromkeys("abcdefg", 1)])
    assert len(list(tmp_path.glob("states-*.safetensors"))) == 3
    back, _ = Checkpoints(tmp_path).read()
    assert set(back.states) == set("abcdefg")


def test_a_damaged_file_of_states_is_found(tmp_path: Path) -> None:
    with_states(tmp_path, [{"a": 1}, {"a": 2}])
    newest = max(tmp_path.glob("states-*"))
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    back, notes = Checkpoints(tmp_path).read()
    assert (back.round, back.states["a"].round) == (1, 1)
    assert notes == [f"{newest} is damaged: its checksum is wrong"]


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Until mail had files of its own, it was what the strategy of UA-PDFL remembered; nor did a client say whose its
    data are.
    """
    content = save({"strategy/a/w": box(1)["w"], "strategy/a/unit": box(2)["w"], "strategy/b/w": box(3)["w"]})
    (tmp_path / "round-000004.safetensors").write_bytes(content)
    client = {"name": "a", "node_id": 5, "train": 10, "validation": 2, "test": 3, "identity": "id", "key": ""}
    manifest = {"round": 4, "lineage": "x", "resumed": [], "clients": [client], "about": {}, "seconds": 1.0}
    write_manifest(tmp_path / "round-000004.json", manifest | {"bytes": len(content), "sha256": digest(content)})
    back, notes = Checkpoints(tmp_path).read()
    assert not notes
    assert back.clients == [Client("a", 5, 10, 2, 3, "id", own=False)]
    assert not back.strategy
    assert {client: set(mail.tensors()) for client, mail in back.mail.items()} == {"a": {"w", "unit"}, "b": {"w"}}
    assert back.mail["b"].tensors()["w"][0] == 3


def checkpointed(folder: Path) -> Path:
    """Write checkpoints of rounds 1 and 2 with mail; return the manifest of the later one."""
    checkpoints = Checkpoints(folder)
    for r in (1, 2):
        checkpoints.write(
            Checkpoint(
                round=r,
                lineage="x",
                resumed=(),
                arrays=box(r),
                strategy={},
                mail={"a": Mail(r, partial(box, r))},
                clients=[Client("a", 5, 10, 2, 3, "id")],
                about={},
                seconds=1.0,
            )
        )
    return folder / "round-000002.json"


def moved(content: dict[str, Any], name: str) -> None:
    """Let a manifest say that its file of mail is called ``name``."""
    old = content["files"][0]["name"]
    content["files"][0]["name"] = name
    content["mail"] = {
        client: [name if file == old else file, *rest] for client, (file, *rest) in content["mail"].items()
    }


ODD: dict[str, Any] = {
    "no round": lambda c: c.pop("round"),
    "no clients": lambda c: c.pop("clients"),
    "no sum": lambda c: c.pop("sha256"),
    "a text for a round": lambda c: c.update(round="2"),
    "a round below 0": lambda c: c.update(round=-2),
    "a huge round": lambda c: c.update(round=2**62),
    "resumed": lambda c: c.update(resumed=["a"]),
    "no list of resumed": lambda c: c.update(resumed=7),
    "a client with other fields": lambda c: c.update(clients=[{"who": "a"}]),
    "a client with a number for a name": lambda c: c["clients"][0].update(name=7),
    "a client whose data are whose is a number": lambda c: c["clients"][0].update(own=1),
    "a client that tells what there is not": lambda c: c["clients"][0].update(accuracies="all"),
    "clients as text": lambda c: c.update(clients="ab"),
    "files as text": lambda c: c.update(files="ab"),
    "a file elsewhere": lambda c: moved(c, "../x"),
    "a file that a path names": lambda c: moved(c, f"./{c['files'][0]['name']}"),
    "mail of nobody": lambda c: c["mail"].update(b=[c["files"][0]["name"], 2, 4000]),
    "mail without a file": lambda c: c["mail"].update(a=["none", 2, 4000]),
    "mail as a list": lambda c: c.update(mail=[1]),
    "no time": lambda c: c.update(seconds=None),
    "about": lambda c: c.update(about=[]),
}


@pytest.mark.parametrize("damage", ODD)
def test_a_checkpoint_with_a_right_checksum_that_is_none_is_passed_over(tmp_path: Path, damage: str) -> None:
    path = checkpointed(tmp_path)
    content = read_manifest(path)
    ODD[damage](content)
    write_manifest(path, content)
    checkpoint, notes = Checkpoints(tmp_path).read()
    assert checkpoint.round == 1
    assert len(notes) == 1
    assert notes[0].startswith(f"{path} is damaged: ")
    checkpointed(tmp_path)  # what is odd is no hindrance to the next ones


@pytest.mark.parametrize("kind", ["round", "mail"])
@pytest.mark.parametrize("content", [b"garbage" * 99, b"\x80\x04\x95.", b"", save({"global/w": np.full(9, np.nan)})])
def test_tensors_of_a_checkpoint_that_are_none_are_passed_over(tmp_path: Path, kind: str, content: bytes) -> None:
    path = checkpointed(tmp_path)
    manifest = read_manifest(path)
    file = tmp_path / f"{kind}-000002.safetensors"
    file.write_bytes(content)
    said = {"bytes": len(content), "sha256": digest(content)}
    if kind == "round":
        manifest |= said
    else:
        manifest["files"][-1] |= said
    write_manifest(path, manifest)
    checkpoint, notes = Checkpoints(tmp_path).read()
    assert (checkpoint.round, len(notes)) == (1, 1)
    assert "is damaged" in notes[0]


def test_a_checkpoint_of_deep_tables_is_passed_over(tmp_path: Path) -> None:
    path = checkpointed(tmp_path)
    path.write_bytes(b'{"about": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert Checkpoints(tmp_path).read()[0].round == 1


@pytest.mark.parametrize("method", ["../../elsewhere", "/absolute", "core.base", "core", "fedper.", "__init__", "none"])
def test_a_method_that_is_none_makes_no_directory(tmp_path: Path, method: str) -> None:
    """The server half refuses it, too; this is a server that does not."""
    outcome = federate(tmp_path / "runs", 1, states=tmp_path / "states", method="fedper", rounds=1)
    (context,) = outcome.grid.contexts.values()
    context.run_config = {**context.run_config, "method": method.replace("/absolute", str(tmp_path / "absolute"))}
    before = sorted(tmp_path.rglob("*"))
    for message in outcome.grid.messages:
        again = message.content
        reply = client_app(Message(again, 1000, message.metadata.message_type), context)
        if message.metadata.message_type not in ("query.describe", "query.export"):
            reason = str(reply.content.config_records["error"]["reason"])
            assert reason.startswith("method = ")
            assert "must be one of apfl, " in reason
    assert sorted(tmp_path.rglob("*")) == before
