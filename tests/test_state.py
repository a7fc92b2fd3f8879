"""A client's state: its versions, and which of them a message starts from after any interruption."""

import errno
import fcntl
import os
import resource
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from client_app.inventory import Shelf, entries, restore
from client_app.keeping import Quota, Version
from client_app.keeping import kept as stays
from client_app.state import ClientState, ContextStore, FileStore, RoundContext, identity
from common.config import RunConfig, read_keys
from common.durable import (
    DamagedError,
    UnreadableError,
    digest,
    open_file,
    open_plain,
    read_checked,
    read_manifest,
    write_manifest,
    write_whole,
)
from common.errors import ConfigError, FloretError
from common.starts import Start
from tests.harness import run_config


def store(folder: Path) -> FileStore:
    return FileStore.at(folder, "default", "fedper", "a", sync=True)


def at(server_round: int, **more: Any) -> RoundContext:
    return RoundContext(**{"lineage": "one", "round": server_round, **more})


def train(folder: Path, server_round: int, **more: Any) -> float:
    """Add 1 to what is kept, as the outcome of a round; return what it was before."""
    state = ClientState(store(folder), at(server_round, **more))
    before = float(state.load().get("w", torch.zeros(1)))
    state.commit(server_round, {"w": torch.full((1,), before + 1)}, {"x": server_round})
    return before


def value(folder: Path, context: RoundContext | None = None) -> float:
    return float(ClientState(store(folder), context).load()["w"])


def rounds(folder: Path) -> list[int]:
    return [version.round for version in store(folder).versions([])]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in store(folder).directory.iterdir() if path.name != "lock")


def test_the_last_two_versions_are_kept(tmp_path: Path) -> None:
    assert [train(tmp_path, r, checkpointed=r - 1) for r in (1, 2, 3, 7)] == [0, 1, 2, 3]
    assert rounds(tmp_path) == [7, 3]
    assert files(tmp_path) == [f"{n:08d}.{kind}" for n in (3, 4) for kind in ("json", "safetensors")]
    newest = ClientState(store(tmp_path))
    assert (newest.round, newest.about, newest.notes) == (7, {"x": 7}, [])


def test_a_round_delivered_twice_starts_from_the_version_before_it(tmp_path: Path) -> None:
    for r in (1, 2, 3):
        train(tmp_path, r)
    for _ in range(3):
        assert train(tmp_path, 3) == 2
    assert value(tmp_path) == 3
    assert train(tmp_path, 4) == 3


def test_the_first_round_delivered_twice_starts_from_nothing(tmp_path: Path) -> None:
    assert train(tmp_path, 5) == 0
    assert train(tmp_path, 5) == 0
    assert value(tmp_path) == 1


def test_evaluation_sees_the_round_that_is_over_and_training_does_not(tmp_path: Path) -> None:
    train(tmp_path, 1)
    train(tmp_path, 2)
    assert value(tmp_path, at(2)) == 1
    assert value(tmp_path, at(2, over=True)) == 2
    assert value(tmp_path, at(9, over=True)) == 2


def test_a_server_that_goes_back_to_its_checkpoint_finds_the_client_as_it_was(tmp_path: Path) -> None:
    for r in range(1, 11):
        train(tmp_path, r, checkpointed=4 if r > 4 else 0)
    assert rounds(tmp_path) == [10, 9, 4]
    assert train(tmp_path, 5, checkpointed=4, resumed=(4,)) == 4
    assert train(tmp_path, 6, checkpointed=4, resumed=(4,)) == 5
    assert rounds(tmp_path) == [6, 5, 4]


def test_each_resume_undoes_what_came_after_its_round() -> None:
    made = Version(number=1, lineage="one", attempt=0, round=4, first=1)
    assert at(6, resumed=(5,)).knows(made)
    assert not at(6, resumed=(5, 3)).knows(made)
    named = replace(made, start="a")
    starts = [Start("a"), Start("b", 5), Start("c", 3)]
    assert at(6, resumed=(5,), starts=tuple(starts[:2])).knows(named)
    assert not at(6, resumed=(5, 3), starts=tuple(starts)).knows(named)
    # Of a run whose id came again.
    assert not at(6, starts=(Start("d"),)).knows(named)


def test_a_server_cannot_have_a_checkpoint_of_a_round_that_is_to_come(tmp_path: Path) -> None:
    for r in (1, 2, 3):
        train(tmp_path, r, checkpointed=99)
    assert [version.checkpointed for version in store(tmp_path).versions([])] == [3, 2]
    # Nor one of a round that it sends again.
    assert train(tmp_path, 3, checkpointed=99) == 2
    assert rounds(tmp_path) == [3, 2]


def test_a_round_that_nothing_is_left_of_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    for r in range(1, 11):
        train(tmp_path, r, checkpointed=8)
    before = files(tmp_path)
    with pytest.raises(FloretError, match=r"asks for round 5, but this client's state is of round 8 and 9 and 10"):
        train(tmp_path, 5)
    assert files(tmp_path) == before


def test_a_new_run_goes_on_from_the_personal_model_or_starts_afresh(tmp_path: Path) -> None:
    for r in (1, 2, 3):
        train(tmp_path, r)
    assert train(tmp_path, 1, lineage="two") == 3
    assert train(tmp_path, 1, lineage="two") == 3  # delivered twice, in the round in which the client began
    assert train(tmp_path, 1, lineage="three", fresh=True) == 0
    assert train(tmp_path, 2, lineage="three", fresh=True) == 1
    assert train(tmp_path, 3, lineage="three", fresh=True, checkpointed=2) == 2
    assert value(tmp_path, at(1, lineage="four")) == 3  # of run three
    # What run two left is there as long as run three, which wanted nothing of it, goes on.
    left = [version for version in store(tmp_path).versions([]) if version.lineage == "two"]
    assert float(store(tmp_path).read(left[0])["w"]) == 4


@pytest.mark.parametrize("damage", ["half", "flip", "gone", "manifest half", "manifest flip"])
def test_a_damaged_version_is_reported_and_the_one_before_it_used(tmp_path: Path, damage: str) -> None:
    for r in (1, 2, 3):
        train(tmp_path, r)
    kind = "json" if damage.startswith("manifest") else "safetensors"
    path = store(tmp_path).directory / f"00000003.{kind}"
    content = bytearray(path.read_bytes())
    if damage.endswith("half"):
        path.write_bytes(content[: len(content) // 2])
    elif damage == "gone":
        path.unlink()
    else:
        place = content.index(b'"round": 3') + 9 if kind == "json" else len(content) - 2
        content[place] ^= 1
        path.write_bytes(content)
    state = ClientState(store(tmp_path), at(4))
    assert float(state.load()["w"]) == 2
    assert len(state.notes) == 2
    assert str(path) in state.notes[0]
    assert state.notes[1] == "went on from the client's state after round 2"
    state.commit(4, {"w": torch.tensor([10.0])})
    after = ClientState(store(tmp_path), at(5))
    assert (float(after.load()["w"]), after.notes) == (10, [])
    assert not path.exists() or 3 not in rounds(tmp_path)


def test_when_no_version_is_intact_nothing_is_begun_anew_behind_the_users_back(tmp_path: Path) -> None:
    train(tmp_path, 1)
    train(tmp_path, 2)
    for path in store(tmp_path).directory.glob("*.safetensors"):
        path.write_bytes(b"x")
    before = files(tmp_path)
    for context in (None, at(3), at(1, lineage="two")):
        with pytest.raises(FloretError, match="no intact version of the client's state is left"):
            ClientState(store(tmp_path), context)
    assert files(tmp_path) == before
    assert ClientState(store(tmp_path), at(1, lineage="two", fresh=True)).load() == {}


def test_what_a_crash_leaves_behind_is_no_version_and_is_cleared_away(tmp_path: Path) -> None:
    train(tmp_path, 1)
    folder = store(tmp_path).directory
    (folder / "00000002.safetensors").write_bytes(b"tensors without a manifest")
    (folder / ".00000002.json.new").write_bytes(b'{"round": 2')
    state = ClientState(store(tmp_path), at(2))
    assert (state.round, state.notes) == (1, [])
    state.commit(2, {"w": torch.ones(1)})
    assert files(tmp_path) == [f"{n:08d}.{kind}" for n in (1, 2) for kind in ("json", "safetensors")]


@pytest.mark.parametrize("private", [False, True])
def test_two_writers_of_a_file_leave_that_of_one_of_them_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    path, sync, (slow, quick) = tmp_path / "a.json", os.fsync, (threading.Event(), threading.Event())

    def meanwhile(number: int) -> None:
        """Let the other writer come between what the slow one has written and that it is there."""
        if threading.current_thread() is not threading.main_thread() and not slow.is_set():
            slow.set()
            assert quick.wait(60)
        sync(number)

    monkeypatch.setattr(os, "fsync", meanwhile)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_whole, path, b"slow" * 9, private=private)
        assert slow.wait(60)
        write_whole(path, b"quick" * 1000, private=private)
        assert path.read_bytes() == b"quick" * 1000
        quick.set()
        writing.result(60)
    assert path.read_bytes() == b"slow" * 9
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_another_writer_has_just_renamed_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, new, lock = tmp_path / "a.json", tmp_path / ".a.json.new", fcntl.flock
    new.write_bytes(b"of the other writer")

    def renamed_meanwhile(file: Any, how: int) -> None:
        if new.exists():
            new.rename(path)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", renamed_meanwhile)
    os.link(new, tmp_path / "linked")  # shows whether what was renamed is written
    write_whole(path, b"mine")
    assert (path.read_bytes(), (tmp_path / "linked").read_bytes()) == (b"mine", b"of the other writer")
    assert not new.exists()


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("kind", ["link", "second name", "pipe", "folder"])
def test_what_a_stranger_left_under_the_name_of_the_new_file_is_not_written(
    tmp_path: Path, kind: str, private: bool
) -> None:
    mine, path, new = tmp_path / "mine", tmp_path / "a.json", tmp_path / ".a.json.new"
    mine.write_bytes(b"mine")
    if kind == "link":
        new.symlink_to(mine)
    elif kind == "second name":
        os.link(mine, new)
    elif kind == "pipe":
        os.mkfifo(new)
    else:
        new.mkdir()
    write_whole(path, b"content", private=private)
    assert (path.read_bytes(), mine.read_bytes(), path.is_symlink()) == (b"content", b"mine", False)


def test_a_process_that_is_told_to_stop_while_it_writes_leaves_no_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a.json", b"content")
    assert not list(tmp_path.iterdir())


def test_a_log_or_a_history_that_is_a_link_is_not_written(tmp_path: Path) -> None:
    mine, link = tmp_path / "mine", tmp_path / "log.txt"
    mine.write_bytes(b"mine")
    link.symlink_to(mine)
    for mode in ("ab", "wb"):
        with pytest.raises(OSError, match="symbolic links"), open_file(link, mode, private=False):
            pass
    assert mine.read_bytes() == b"mine"


def test_a_file_of_another_size_is_not_read(tmp_path: Path) -> None:
    path, pipe = tmp_path / "a", tmp_path / "pipe"
    path.write_bytes(b"")
    os.truncate(path, 2**40)  # a hole, which no memory has
    with pytest.raises(DamagedError, match=f"a is damaged: {2**40} bytes instead of 3"):
        read_checked(path, 3, digest(b"abc"))
    with pytest.raises(DamagedError, match="bytes are no manifest"):
        read_manifest(path)
    os.mkfifo(pipe)
    with pytest.raises(UnreadableError, match="not a plain file"):
        read_manifest(pipe)


@pytest.mark.parametrize("private", [False, True])
def test_what_a_killed_writer_left_is_used_again(tmp_path: Path, private: bool) -> None:
    path, left = tmp_path / "a.json", tmp_path / ".a.json.new"
    left.write_bytes(b"half of something longer")
    left.chmod(0o644)
    with left.open("rb") as read:
        write_whole(path, b"whole", private=private)
        # Nobody who has it open reads what is private.
        assert read.read() == (b"half of something longer" if private else b"whole")
    assert path.read_bytes() == b"whole"
    assert bool(path.stat().st_mode & 0o077) is not private
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    train(tmp_path, 1)
    train(tmp_path, 2)
    before = {name: (store(tmp_path).directory / name).read_bytes() for name in files(tmp_path)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = ClientState(store(tmp_path), at(3))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(
            FloretError, match=r"state-dir: .*00000003.safetensors cannot be written \(File too large\)"
        ):
            state.commit(3, {"w": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {name: (store(tmp_path).directory / name).read_bytes() for name in files(tmp_path)} == before
    assert train(tmp_path, 3) == 2


@pytest.mark.parametrize("unreadable", ["00000002.json", "00000002.safetensors", "a"])
def test_what_cannot_be_read_now_is_no_reason_to_go_on_from_something_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    train(tmp_path, 1)
    train(tmp_path, 2)
    there = files(tmp_path)
    listed = os.listdir

    def failing(real: Any) -> Any:
        def call(path: Path) -> Any:
            if path.name == unreadable:
                raise OSError(errno.EIO, "Input/output error")
            return real(path)

        return call

    with monkeypatch.context() as patches:
        patches.setattr("common.durable.open_plain", failing(open_plain))
        patches.setattr(os, "listdir", failing(listed))
        with pytest.raises(FloretError, match=rf"{unreadable} cannot be read \(Input/output error\)$"):
            train(tmp_path, 3)
        if unreadable.endswith("json"):  # floret state list
            shelf = Shelf("default", "fedper", "a", store(tmp_path))
            newer, older = entries(shelf)
            assert newer.wrong.endswith("00000002.json cannot be read (Input/output error)")
            assert (older.wrong, older.used, older.version and older.version.round) == ("", False, 1)
            # Its owner may go on from it, and loses nothing.
            assert restore([shelf], tmp_path, 1)[1] == 3
            assert train(tmp_path, 3) == 1
            assert {"00000002.json", "00000002.safetensors"} < set(files(tmp_path))
            return
    assert files(tmp_path) == there
    assert train(tmp_path, 3) == 2


def test_what_cannot_be_read_when_a_version_is_kept_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, 1)
    train(tmp_path, 2)
    state, read = ClientState(store(tmp_path), at(1, lineage="two", fresh=True)), Path.read_bytes

    def failing(path: Path) -> bytes:
        if path.name == "00000002.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    with monkeypatch.context() as patches:
        patches.setattr(Path, "read_bytes", failing)
        state.commit(1, {"w": torch.zeros(1)})
    assert [(one.lineage, one.round) for one in store(tmp_path).versions([])][:2] == [("two", 1), ("one", 2)]


def test_a_disk_that_turns_read_only_at_a_write_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, 1)
    there = files(tmp_path)

    def failing(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    def read_only(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as patches:
        patches.setattr("client_app.state.write_whole", failing)
        patches.setattr(Path, "unlink", read_only)
        with pytest.raises(FloretError, match=r"cannot be written \(Input/output error\); the client's state is as it"):
            ClientState(store(tmp_path), at(2)).commit(2, {"w": torch.zeros(1)})
    assert files(tmp_path) == there


def test_a_directory_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    train(tmp_path, 1)
    folder = store(tmp_path).directory
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    above = [path for path in folder.parents if path.stat().st_uid == os.geteuid() and path != Path("/")]
    modes = {path: path.stat().st_mode for path in above}
    folder.chmod(0o555)
    root = os.geteuid() == 0
    try:
        if root:  # for whom no directory is read-only
            for path in above:
                path.chmod(path.stat().st_mode | 0o055)
            os.seteuid(65534)
        state = ClientState(store(tmp_path), at(2))
        with pytest.raises(FloretError, match=r"cannot be written \(Permission denied\)"):
            state.commit(2, {"w": torch.zeros(1)})
        with (
            pytest.raises(FloretError, match=r"cannot be written \(Permission denied\)"),
            store(tmp_path / "no").claim(),
        ):
            pass
    finally:
        if root:
            os.seteuid(0)
            for path, mode in modes.items():
                path.chmod(mode)
        folder.chmod(0o755)
    assert train(tmp_path, 2) == 1


def test_two_processes_never_have_one_clients_state(tmp_path: Path) -> None:
    with store(tmp_path).claim():
        child = os.fork()
        if child == 0:
            try:
                with store(tmp_path).claim():
                    os._exit(1)
            except FloretError as error:
                os._exit(0 if "is in use by another process" in str(error) else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with store(tmp_path).claim():
        pass


def test_a_folder_that_is_removed_while_it_is_claimed_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def removed(file: Any, kind: int) -> None:
        shutil.rmtree(tmp_path / "default")
        flock(file, kind)

    monkeypatch.setattr("client_app.state.fcntl.flock", removed)
    with pytest.raises(FloretError, match="is in use by another process"), store(tmp_path).claim():
        pass


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b", "x" * 101, "a\n"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(FloretError, match=r"client-name = .*: must be 1 to 100 letters"):
        FileStore.at(tmp_path, "default", "fedper", name, sync=True)


@pytest.mark.parametrize("name", ["identity", "seed", "Identity"])
def test_no_federation_has_the_name_of_a_nodes_own_file(tmp_path: Path, name: str) -> None:
    line = f"federation = '{name}': must not be identity or seed"
    with pytest.raises(FloretError, match=line):
        FileStore.at(tmp_path, name, "fedper", "a", sync=True)
    with pytest.raises(ConfigError, match=line):
        read_keys(RunConfig, run_config(tmp_path, federation=name))
    # A client may be called so.
    FileStore.at(tmp_path, "default", "fedper", name, sync=True)


def test_a_folder_in_the_place_of_the_identity_is_named(tmp_path: Path) -> None:
    (tmp_path / "identity" / "fedper").mkdir(parents=True)
    with pytest.raises(FloretError, match=r"identity: is a folder, .* floret state remove --federation identity"):
        identity(tmp_path)


def test_the_identity_stays_with_the_directory(tmp_path: Path) -> None:
    first = identity(tmp_path / "one")
    assert first == identity(tmp_path / "one")
    assert len(first) == 32
    assert first != identity(tmp_path / "two")
    with pytest.raises(FloretError, match="cannot be written"):
        identity(tmp_path / "one" / "identity" / "below a file")


def test_nodes_that_make_the_identity_of_a_directory_at_once_have_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, both = threading.Event(), threading.Event()

    def slow(path: Path, content: bytes, **options: bool) -> None:
        writing.set()
        both.wait(0.5)  # a node that looks now finds none, and waits
        write_whole(path, content, **options)

    monkeypatch.setattr("client_app.state.write_whole", slow)
    with ThreadPoolExecutor(2) as nodes:
        first = nodes.submit(identity, tmp_path)
        assert writing.wait(60)
        second = nodes.submit(identity, tmp_path)
        assert first.result() == second.result() == (tmp_path / "identity").read_text()


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    tensors = {
        "conv": torch.randn(3, 2, 5, 5).to(memory_format=torch.channels_last),
        "count": torch.tensor(7),
        "half": torch.randn(3).to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "part": torch.randn(6, 6)[::2, 1:3],
    }
    state = ClientState(store(tmp_path), at(1))
    state.commit(1, tensors)
    back = ClientState(store(tmp_path)).load()
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_in_simulation_without_checkpoints_the_context_has_the_last_version() -> None:
    record = RecordDict()
    for r in (1, 4):
        ClientState(ContextStore(record), at(r)).commit(r, {"w": torch.full((1,), float(r))})
    state = ClientState(ContextStore(record), at(5))
    assert (state.round, float(state.load()["w"])) == (4, 4)
    with pytest.raises(FloretError, match="asks for round 3"):
        ClientState(ContextStore(record), at(3))


# A life: rounds the client takes part in, some delivered more than once, the server going back to a checkpoint now and
# then. What is kept must always be what an undisturbed life would have led to.
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["train", "skip", "again", "back", "checkpoint"]), max_size=25))
@example(["skip", "checkpoint", "train", "back", "train", "back", "train", "train"])
def test_any_life_ends_where_an_undisturbed_one_does(tmp_path_factory: pytest.TempPathFactory, life: Any) -> None:
    folder = tmp_path_factory.mktemp("life")
    server_round, checkpointed = 0, 0
    taken: list[int] = []  # the rounds of the undisturbed life up to now
    resumed: tuple[int, ...] = ()
    ended = 0  # ways back to before the client's first round
    for step in life:
        if step == "checkpoint":
            checkpointed = server_round
        elif step == "back":
            server_round = checkpointed
            resumed += (checkpointed,)
            taken = [r for r in taken if r <= server_round]
            ended += not taken
        elif step == "skip":
            server_round += 1
        elif step == "train" or not taken or taken[-1] != server_round or checkpointed == server_round:
            server_round += 1
            assert train(folder, server_round, checkpointed=checkpointed, resumed=resumed) == len(taken)
            taken.append(server_round)
        else:
            assert train(folder, server_round, checkpointed=checkpointed, resumed=resumed) == len(taken) - 1
        versions = store(folder).versions([])
        # Of the line that goes on, what its messages need; of each that a way back to the start has ended, its last.
        assert len([version for version in versions if version.line == versions[0].line]) <= 3
        assert len(versions) <= 3 + ended
        if taken:
            assert value(folder, at(server_round, over=True, resumed=resumed)) == len(taken)


def lineages(folder: Path) -> list[str]:
    return [version.lineage for version in store(folder).versions([])]


def test_runs_that_start_afresh_leave_the_personal_model_of_the_first(tmp_path: Path) -> None:
    for r in (1, 2, 3):
        train(tmp_path, r)
    for i in range(30):
        for r in (1, 2):
            train(tmp_path, r, lineage=f"evil{i}", fresh=True)
    versions = store(tmp_path).versions([])
    good = [version for version in versions if version.lineage == "one"]
    assert [float(store(tmp_path).read(version)["w"]) for version in good] == [3]
    assert len(versions) <= 2 + Quota().runs + 2


@pytest.mark.parametrize(
    "forged",
    [
        {"resumed": (0,)},
        {"resumed": (1,)},
        {"resumed": (0, 0, 0)},
        {"checkpointed": 2**31 - 1},
        {"checkpointed": 5, "resumed": (5,)},
        {},
    ],
)
def test_a_server_that_goes_back_behind_its_word_takes_nothing(tmp_path: Path, forged: dict[str, Any]) -> None:
    for r in range(1, 11):
        train(tmp_path, r, checkpointed=r - 2 if r > 4 else 0)
    for r in range(1, 9):
        ClientState(store(tmp_path), at(1)).commit(1, {"w": torch.full((1,), -1.0)})
        ClientState(store(tmp_path), at(1, **forged)).commit(r, {"w": torch.full((1,), -1.0)})
    assert 10 in [float(store(tmp_path).read(version)["w"]) for version in store(tmp_path).versions([])]


def test_more_rounds_of_the_same_run_leave_its_milestones(tmp_path: Path) -> None:
    quota = Quota(milestones=(2, 4, 8))
    for r in range(1, 41):
        state = ClientState(store(tmp_path), at(r, checkpointed=r - 1), quota)
        state.commit(r, {"w": torch.full((1,), float(r))})
    assert rounds(tmp_path) == [40, 39, 8, 4, 2]
    # They are for floret state restore: a message finds what it would without them.
    with pytest.raises(FloretError, match="asks for round 6, but this client's state is of round 39 and 40"):
        ClientState(store(tmp_path), at(6))
    for r in (1, 2, 3):
        ClientState(store(tmp_path), at(r, lineage="two", fresh=True), quota).commit(r, {"w": torch.zeros(1)})
    # And what its server could still go back to: it may yet be resumed.
    assert [version.round for version in store(tmp_path).versions([]) if version.lineage == "one"] == [40, 39, 8, 4, 2]


def test_a_short_run_that_goes_on_with_made_up_rounds_loses_half_of_its_rounds_at_most(tmp_path: Path) -> None:
    for r in range(1, 18):
        made_up = r > 15
        state = ClientState(store(tmp_path), at(r, checkpointed=r - 1), Quota())
        state.commit(r, {"w": torch.full((1,), -1.0 if made_up else float(r))})
    found = [float(store(tmp_path).read(version)["w"]) for version in store(tmp_path).versions([])]
    assert max(found) == 8.0


def test_the_quota_of_bytes_is_never_passed(tmp_path: Path) -> None:
    quota = Quota(bytes=40_000)
    for i in range(20):
        for r in (1, 2, 3):
            state = ClientState(store(tmp_path), at(r, lineage=f"run-{i}", fresh=True, checkpointed=r - 1), quota)
            state.commit(r, {"w": torch.full((900,), float(i))})
            assert sum(path.stat().st_size for path in store(tmp_path).directory.glob("*.safetensors")) <= 40_000
    left = {float(store(tmp_path).read(version)["w"][0]) for version in store(tmp_path).versions([])}
    assert {0.0, 1.0, 2.0, 18.0, 19.0} <= left
    state = ClientState(store(tmp_path), at(1, lineage="large", fresh=True), quota)
    before = files(tmp_path)
    with pytest.raises(FloretError, match="has 4004 bytes; with keep-gb = 4e-05 this node keeps at most 4000"):
        state.commit(1, {"w": torch.zeros(1001)})
    assert files(tmp_path) == before


def one_a_line(*rows: tuple[int, int, int]) -> list[Version]:
    """Return a version of each line, newest first; a row is a line, its rounds and its bytes."""
    return [
        Version(number=line, lineage=str(line), attempt=0, round=rounds, first=1, line=line, trained=rounds, size=size)
        for line, rounds, size in reversed(rows)
    ]


def test_a_quota_that_was_lowered_leaves_what_no_quota_takes() -> None:
    """The first line, the one with the most rounds and the last one, though they are larger than it together."""
    versions = one_a_line((1, 1, 50), (2, 9, 50), (3, 1, 50), (4, 1, 50), (5, 1, 1))
    quota = Quota(runs=8, bytes=100, milestones=())
    assert stays(versions, versions[0], [], quota, lambda version: True) == {1, 2, 4, 5}
    assert stays(versions, versions[0], [], replace(quota, bytes=1000), lambda version: True) == {1, 2, 3, 4, 5}
    # Of those that are kept for being early, the later ones go first.
    assert stays(versions, versions[0], [], Quota(1, 1000, ()), lambda version: True) == {1, 2, 4, 5}


def test_of_lines_with_as_many_rounds_the_first_stays() -> None:
    versions = one_a_line((1, 1, 1), (2, 9, 1), (3, 9, 1), (4, 1, 1), (5, 1, 1))
    assert stays(versions, versions[0], [], Quota(1, 1000, ()), lambda version: True) == {1, 2, 4, 5}


def test_what_the_run_needs_itself_counts_once_in_the_quota() -> None:
    versions = one_a_line((1, 1, 50), (2, 9, 50), (3, 1, 50), (4, 1, 1), (5, 1, 50), (6, 1, 1))
    needed = [version for version in versions if version.line == 3]
    for room, left in ((202, {1, 2, 3, 4, 5, 6}), (201, {1, 2, 3, 5, 6})):
        assert stays(versions, versions[0], needed, Quota(8, room, ()), lambda version: True) == left


def test_a_federation_of_an_earlier_version_of_floret_goes_on(tmp_path: Path) -> None:
    for r in range(1, 6):
        train(tmp_path, r, checkpointed=r - 1)
    for path in store(tmp_path).directory.glob("*.json"):
        content = read_manifest(path)
        old = ("lineage", "attempt", "round", "first", "about", "bytes", "sha256")
        write_manifest(path, {key: content[key] for key in old})
    assert [(v.line, v.trained) for v in store(tmp_path).versions([])] == [(4, 5), (4, 4)]
    assert train(tmp_path, 6, checkpointed=5) == 5
    assert train(tmp_path, 7, checkpointed=6) == 6
    assert [(v.line, v.trained, v.round) for v in store(tmp_path).versions([])] == [(4, 7, 7), (4, 6, 6)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("round", 2**62), ("round", -1), ("round", 0), ("round", 1.0), ("round", True), ("round", "1"), ("round", None),
        ("session.checkpointed", -1), ("session.checkpointed", 2**62), ("session.checkpointed", "x"),
        ("session.resumed", "12"), ("session.resumed", [1, -1]), ("session.resumed", [2**62]),
        ("session.resumed", ["a"]), ("session.resumed", 5), ("session.resumed", [0] * 10_001),
        ("session.lineage", ""), ("session.lineage", 7), ("session.lineage", "x" * 101), ("session.lineage", "a\nb"),
        ("session.lineage", b"abc"), ("session.lineage", None),
    ],
)  # fmt: skip
def test_a_message_that_no_server_of_floret_sends_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    config = read_keys(RunConfig, run_config(tmp_path))
    message = {"round": 3, "session.lineage": "a", "session.checkpointed": 2, "session.resumed": [1]}
    assert RoundContext.of(message, config, over=False).resumed == (1,)
    with pytest.raises(FloretError) as caught:
        RoundContext.of(message | {key: value}, config, over=False)
    text = str(caught.value)
    assert text.startswith(f"{key} = ")
    assert "\n" not in text
    assert len(text) < 200
    with pytest.raises(FloretError):
        RoundContext.of({k: v for k, v in message.items() if k != key}, config, over=False)


# Honest runs first, then whatever a server may say. Each version's tensor is a number of its own.
_HOSTILE = st.fixed_dictionaries(
    {
        "lineage": st.sampled_from(["run 0", "run 1", "run 2", "new", "evil", "worse", "one more", "and more"]),
        "round": st.one_of(st.integers(1, 12), st.sampled_from([2**31 - 1, 100])),
        "over": st.booleans(),
        "fresh": st.booleans(),
        "checkpointed": st.one_of(st.integers(0, 12), st.just(2**31 - 1)),
        "resumed": st.lists(st.one_of(st.integers(0, 12), st.just(2**31 - 1)), max_size=4).map(tuple),
    }
)


@pytest.mark.thorough
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(1, 4)), min_size=1, max_size=3),
    st.lists(_HOSTILE, max_size=40),
)
def test_no_sequence_of_messages_takes_an_honest_runs_model(
    tmp_path_factory: pytest.TempPathFactory, honest: list[tuple[int, bool, int]], messages: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    quota = Quota(runs=3, milestones=(1, 2, 4, 8))
    content: dict[float, tuple[str, int]] = {}

    def commit(context: RoundContext) -> None:
        state = ClientState(store(folder), context, quota)
        state.commit(context.round, {"w": torch.full((1,), float(len(content)))})
        content[float(len(content))] = (context.lineage, context.round)

    def there() -> dict[float, Version]:
        found = store(folder).versions([])
        return {float(store(folder).read(version)["w"]): version for version in found}

    for run, (last, fresh, every) in enumerate(honest):
        for r in range(1, last + 1):
            done = (r - 1) // every * every
            commit(RoundContext(f"run {run}", r, fresh=fresh, checkpointed=done))
    before = there()
    model = {run: max(w for w, (name, _) in content.items() if name == f"run {run}") for run in range(len(honest))}
    assert set(model.values()) <= set(before)
    continued = set()
    for message in messages:
        context = RoundContext(**message)
        if message["over"]:
            with suppress(FloretError):
                ClientState(store(folder), context, quota)
            assert there().keys() >= {w for run, w in model.items() if run not in continued}
            continue
        try:
            commit(context)
        except FloretError:
            continue
        now = there()
        latest = now[float(len(content) - 1)]
        for run, w in model.items():
            if run not in continued and before[w].line == latest.line:
                continued.add(run)  # a round more of the same run, for all that the client can tell
        for run, w in model.items():
            trained = honest[run][0]
            if run not in continued:
                assert w in now
            else:  # at least the last milestone, never less than half of the rounds
                of_run = [v for x, v in now.items() if x in before and content[x][0] == f"run {run}"]
                assert any(2 * version.trained >= trained for version in of_run)
        lines = {version.line for version in now.values()}
        assert len(lines) <= 1 + quota.runs + 2 + 2
        assert len(now) <= 3 + len(lines) * (1 + len(quota.milestones))


MANIFESTS: dict[str, Any] = {
    "no round": lambda c: c.pop("round"),
    "no about": lambda c: c.pop("about"),
    "no bytes": lambda c: c.pop("bytes"),
    "no sum": lambda c: c.pop("sha256"),
    "text for a round": lambda c: c.update(round="3"),
    "a round below 0": lambda c: c.update(round=-3),
    "a huge round": lambda c: c.update(round=2**70),
    "a list for a text": lambda c: c.update(lineage=["one"]),
    "null": lambda c: c.update(about=None),
    "a text for bytes": lambda c: c.update(bytes="5"),
    "beside": lambda c: c.update(beside=7),
    "beside texts": lambda c: c.update(beside=["a"]),
    "line": lambda c: c.update(line=True),
}


@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_manifest_with_a_right_checksum_that_is_none_is_passed_over(tmp_path: Path, damage: str) -> None:
    for r in (1, 2, 3):
        train(tmp_path, r)
    path = store(tmp_path).directory / "00000003.json"
    content = read_manifest(path)
    MANIFESTS[damage](content)
    write_manifest(path, content)
    assert_the_one_before_is_used(tmp_path, path)


def assert_the_one_before_is_used(folder: Path, path: Path) -> None:
    for context in (None, at(4), at(1, lineage="two")):
        state = ClientState(store(folder), context)
        assert float(state.load()["w"]) == 2
        assert str(path) in state.notes[0]
        assert "is damaged" in state.notes[0]
        assert "\n" not in state.notes[0]
    assert train(folder, 4) == 2


BYTES: dict[str, bytes] = {
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep tables": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep, with a checksum": b'{"checksum": "x", "about": ' + b"[" * 2_000 + b"]" * 2_000 + b"}",
    "not UTF-8": b'{"round": "\xff\xfe"}',
    "a list": b'["checksum"]',
    "a number": b"7",
    "empty": b"",
    "a number without end": b"1" * 10_000,
}


@pytest.mark.parametrize("damage", BYTES)
def test_bytes_that_are_no_manifest_are_passed_over(tmp_path: Path, damage: str) -> None:
    for r in (1, 2, 3):
        train(tmp_path, r)
    path = store(tmp_path).directory / "00000003.json"
    path.write_bytes(BYTES[damage])
    assert_the_one_before_is_used(tmp_path, path)


def tensors_of(**tensors: torch.Tensor) -> bytes:
    from safetensors.torch import save

    return save(tensors)


TENSORS: dict[str, bytes] = {
    "garbage": b"garbage" * 100,
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
    "empty": b"",
    "header": (2**62).to_bytes(8, "little") + b"{}",
    "deep": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "nan": tensors_of(w=torch.tensor([float("nan")])),
    "infinite": tensors_of(w=torch.tensor([float("inf")], dtype=torch.bfloat16)),
    "type": tensors_of(w=torch.zeros(2, dtype=torch.complex64)),
    "name": tensors_of(**{"w": torch.zeros(1), "a\nb": torch.zeros(1)}),
}


@pytest.mark.parametrize("damage", TENSORS)
def test_tensors_with_a_right_checksum_that_are_none_are_passed_over(tmp_path: Path, damage: str) -> None:
    for r in (1, 2, 3):
        train(tmp_path, r)
    path = store(tmp_path).directory / "00000003.safetensors"
    path.write_bytes(TENSORS[damage])
    content = read_manifest(path.with_suffix(".json"))
    content |= {"bytes": len(TENSORS[damage]), "sha256": digest(TENSORS[damage])}
    write_manifest(path.with_suffix(".json"), content)
    assert_the_one_before_is_used(tmp_path, path)


def test_a_run_that_is_over_leaves_its_last_intact_version(tmp_path: Path) -> None:
    for r in (1, 2, 3):
        train(tmp_path, r)
    path = store(tmp_path).directory / "00000003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    train(tmp_path, 1, lineage="two", fresh=True)
    (left,) = (version for version in store(tmp_path).versions([]) if version.lineage == "one")
    assert float(store(tmp_path).read(left)["w"]) == 2


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    train(tmp_path, 1)
    folder = store(tmp_path).directory
    for name in ("notes.json", "copy.safetensors", ".hidden.new", "00000001 (copy).json"):
        (folder / name).write_text("mine")
    for r in (2, 3, 4):
        train(tmp_path, r)
    assert {"notes.json", "copy.safetensors", ".hidden.new", "00000001 (copy).json"} < set(files(tmp_path))


def modes(folder: Path) -> set[tuple[str, str]]:
    paths = [folder, *folder.rglob("*")]
    return {("folder" if path.is_dir() else "file", oct(path.stat().st_mode & 0o777)) for path in paths}


def test_nobody_else_can_read_a_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = os.umask(0o000)
    try:
        identity(tmp_path / "states")
        for r in (1, 2):
            with store(tmp_path / "states").claim():
                train(tmp_path / "states", r)
        assert modes(tmp_path / "states") == {("folder", "0o700"), ("file", "0o600")}
        assert not caplog.text
        # as an earlier version of Floret left them
        folder = store(tmp_path / "states").directory
        for path in (folder, *folder.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.touch(mode=0o644)
        (folder / "link").symlink_to(elsewhere)
        with store(tmp_path / "states").claim():
            pass
        assert elsewhere.stat().st_mode & 0o777 == 0o644
        (folder / "link").unlink()
        assert modes(folder) == {("folder", "0o700"), ("file", "0o600")}
        assert caplog.text.count("others could read it; from now on only its owner can") == 1
        # a folder that was there and is not ours alone is not touched
        (tmp_path / "shared").mkdir(mode=0o777)
        with store(tmp_path / "shared").claim():
            pass
        assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o777
    finally:
        os.umask(old)


@pytest.mark.parametrize("content", [b"\xff\xfe" * 20, b"", b"two\nlines", b"x" * 10_000, "caf\u00e9".encode()])
def test_an_identity_that_is_damaged_is_made_anew(tmp_path: Path, content: bytes) -> None:
    identity(tmp_path)
    (tmp_path / "identity").write_bytes(content)
    new = identity(tmp_path)
    assert len(new) == 32
    assert identity(tmp_path) == new


@pytest.mark.parametrize("method", ["", "..", "../../x", "/absolute", "a/b", ".hidden"])
def test_a_method_that_leads_elsewhere_is_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(FloretError, match=r"method = .*: must be 1 to 100 letters"):
        FileStore.at(tmp_path, "default", method, "a", sync=True)


def test_a_damaged_version_says_so(tmp_path: Path) -> None:
    train(tmp_path, 1)
    (version,) = store(tmp_path).versions([])
    (store(tmp_path).directory / "00000001.json").unlink()
    with pytest.raises(DamagedError, match=r"00000001.json cannot be read \(No such file"):
        store(tmp_path).read(version)


@pytest.mark.parametrize("node", [{"keep-runs": 0}, {"keep-runs": "3"}, {"keep-gb": 1.5}, {"keep-gb": True}])
def test_a_quota_that_is_none_is_refused(node: dict[str, Any]) -> None:
    with pytest.raises(FloretError, match="must be a whole number of at least 1"):
        Quota.of(node)
    assert Quota.of({}) == Quota()
    assert Quota.of({"keep-runs": 3, "keep-gb": 1}) == Quota(runs=3, bytes=10**9)


@pytest.mark.parametrize("scalar", [b"bytes", "x" * 5_000_000])
def test_scalars_that_cannot_be_kept_are_refused(tmp_path: Path, scalar: Any) -> None:
    train(tmp_path, 1)
    before = files(tmp_path)
    state = ClientState(store(tmp_path), at(2))
    with pytest.raises(FloretError, match="the server's message has"):
        state.commit(2, {"w": torch.zeros(1)}, {"message": {"more": scalar}})
    assert files(tmp_path) == before
