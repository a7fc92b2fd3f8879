"""A client's state: its versions, and which of them a message starts from after any interruption."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client_app.state import ClientState, ContextStore, FileStore, RoundContext, identity
from common.errors import FloretError


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


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b", "x" * 101, "a\n"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(FloretError, match=r"client-name = .*: must be 1 to 100 letters"):
        FileStore.at(tmp_path, "default", "fedper", name, sync=True)


def test_the_identity_stays_with_the_directory(tmp_path: Path) -> None:
    first = identity(tmp_path / "one")
    assert first == identity(tmp_path / "one")
    assert len(first) == 32
    assert first != identity(tmp_path / "two")
    with pytest.raises(FloretError, match="cannot be written"):
        identity(tmp_path / "one" / "identity" / "below a file")


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
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["train", "skip", "again", "back", "checkpoint"]), max_size=25))
def test_any_life_ends_where_an_undisturbed_one_does(tmp_path_factory: pytest.TempPathFactory, life: Any) -> None:
    folder = tmp_path_factory.mktemp("life")
    server_round, checkpointed = 0, 0
    taken: list[int] = []  # the rounds of the undisturbed life up to now
    resumed: tuple[int, ...] = ()
    for step in life:
        if step == "checkpoint":
            checkpointed = server_round
        elif step == "back":
            server_round = checkpointed
            resumed += (checkpointed,)
            taken = [r for r in taken if r <= server_round]
        elif step == "skip":
            server_round += 1
        elif step == "train" or not taken or taken[-1] != server_round or checkpointed == server_round:
            server_round += 1
            assert train(folder, server_round, checkpointed=checkpointed, resumed=resumed) == len(taken)
            taken.append(server_round)
        else:
            assert train(folder, server_round, checkpointed=checkpointed, resumed=resumed) == len(taken) - 1
        assert len(rounds(folder)) <= 3
        if taken:
            assert value(folder, at(server_round, over=True, resumed=resumed)) == len(taken)
