"""Memory that is left: of the machine, and of the control groups that a process is in."""

from pathlib import Path

import pytest

from common.memory import available_memory


def group(folder: Path, limit: str, used: int, kept: int, *, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, str(used)), strict=True):
        (folder / name).write_text(f"{value}\n")
    prefix = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {kept}\n")


def place(root: Path, path: str, version: int) -> tuple[Path, Path, Path]:
    """Return a folder of groups, the file that says which is this process's, and the folder where that one is."""
    own = root / "own"
    own.write_text(f"0::{path}\n" if version == 2 else f"9:name=systemd:/\n4:cpu,memory:{path}\n")
    groups = root / "groups"
    return groups, own, groups if version == 2 else groups / "memory"


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts(tmp_path: Path, version: int) -> None:
    groups, own, top = place(tmp_path, "/", version)
    group(top, "100000", 70_000, 20_000, version=version)
    assert available_memory(groups, own) == 50_000
    group(top, "100000", 170_000, 20_000, version=version)
    assert available_memory(groups, own) == 0


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_of_the_groups_above_counts(tmp_path: Path, version: int) -> None:
    groups, own, top = place(tmp_path, "/a/b", version)
    group(top / "a", "5000", 1000, 0, version=version)
    group(top / "a" / "b", "9000", 1000, 0, version=version)
    assert available_memory(groups, own) == 4000


@pytest.mark.parametrize("version", [1, 2])
def test_where_no_group_has_a_limit_the_machine_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    groups, own, top = place(tmp_path, "/docker/not-seen-in-here", version)
    assert available_memory(tmp_path / "none", tmp_path / "none") > 10**7
    monkeypatch.setattr("common.memory._available_on_machine", lambda: 12345)
    for limit in ("max", str(2**63 - 4096)):
        group(top, limit, 1000, 0, version=version)
        assert available_memory(groups, own) == 12345
    (top / "memory.stat").write_text("nothing")
    assert available_memory(groups, own) == 12345
