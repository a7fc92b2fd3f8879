"""A node looks at the app of a run, which is whatever came over the network, and unpacks nothing that it has not."""

import io
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from client_app.node import tasks
from client_app.node.tasks import check_same_code
from client_app.node.transport import Bundle
from common.errors import FloretError
from tests.harness import ROOT

FOLDERS = ("client_app", "common", "data", "models", "strategies")
OWN = "client_app/client.py"
# A bomb is so large, and the memory that looking at it may take; the latter is what one file and the archive need.
BOMB, MOST = 400 * 2**20, 24 * 2**20
Change = Callable[[zipfile.ZipFile], None]


def app(change: Change = lambda _: None, without: str = "", only: str = "") -> bytes:
    """Return this app as ``flwr build`` makes it, without the files that begin with ``without``."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pyproject.toml", "[project]\n")
        for folder in FOLDERS:
            for file in sorted((ROOT / folder).rglob("*.py")):
                name = file.relative_to(ROOT).as_posix()
                if name.startswith(only) and not (without and name.startswith(without)):
                    archive.write(file, name)
        change(archive)
    return content.getvalue()


def zeros(archive: zipfile.ZipFile) -> None:
    """Add a file of ``BOMB`` zeros."""
    with archive.open(OWN, "w") as file:
        for _ in range(BOMB // 2**20):
            file.write(bytes(2**20))


def claiming(content: bytes, name: str, **fields: int) -> bytes:
    """Return the archive with other values in the directory's entry of ``name``: ``flags``, ``method``, ``size``."""
    changed = bytearray(content)
    at = changed.rindex(b"PK\x01\x02", 0, changed.rindex(name.encode()))
    for field, value in fields.items():
        place, kind = {"flags": (8, "<H"), "method": (10, "<H"), "size": (24, "<I")}[field]
        struct.pack_into(kind, changed, at + place, value)
    return bytes(changed)


def wrong_with(content: bytes) -> str:
    tasks._seen.clear()
    with pytest.raises(FloretError) as caught:
        check_same_code(Bundle("floret/floret 0.1.0", content, "key"))
    line = str(caught.value)
    head, tail = "this node runs its installed Floret, and the run's app floret/floret 0.1.0 has ", "; install the same"
    assert line.startswith(head)
    assert line.isprintable()
    return line.removeprefix(head).split(tail)[0]


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


def test_this_app_is_the_same() -> None:
    tasks._seen.clear()
    check_same_code(Bundle("floret/floret 0.1.0", app(), "key"))


@pytest.mark.thorough
def test_an_app_that_unpacks_to_gigabytes_is_not_unpacked() -> None:
    honest = app(zeros, without=OWN)
    assert len(honest) < 2 * 2**20
    # It says how large it is, or that it is as large as the file here: in the latter case so much of it is read.
    lying = claiming(honest, OWN, size=(ROOT / OWN).stat().st_size)
    for content, line in ((honest, f"another {OWN}"), (lying, "no archive that can be read (BadZipFile: Bad CRC-32")):
        with little_memory():
            assert wrong_with(content).startswith(line)


@pytest.mark.thorough
@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_method_that_python_does_not_unpack_in_pieces_is_refused(method: int) -> None:
    def bomb(archive: zipfile.ZipFile) -> None:
        archive.writestr(OWN, bytes(BOMB // 8), method)

    content = claiming(app(bomb, without=OWN), OWN, size=(ROOT / OWN).stat().st_size)
    with little_memory():
        assert wrong_with(content) == f"another {OWN}"


def test_an_archive_of_very_many_files_is_not_opened() -> None:
    def many(archive: zipfile.ZipFile) -> None:
        for i in range(12_000):
            archive.writestr(zipfile.ZipInfo(f"{i}"), b"")

    content = app(many)
    with little_memory():
        assert wrong_with(content) == "more than 10000 files"


def test_an_app_that_is_too_large_is_not_opened() -> None:
    assert wrong_with(bytes(11 * 2**20)) == "11534336 bytes, more than 10485760"


@pytest.mark.parametrize(
    "content",
    [b"", b"PK", b"no archive at all", app()[:-40], app()[: len(app()) // 2], b"PK\x05\x06" + b"\xff" * 18],
    ids=["empty", "two bytes", "text", "cut at its end", "half", "an end without an archive"],
)
def test_what_is_no_archive_is_one_line(content: bytes) -> None:
    assert wrong_with(content).startswith("no archive that can be read (BadZipFile: ")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (app(only="common/"), "no client_app/"),
        (app(only="nothing"), "no client_app/"),
        (app(without="strategies/"), "no strategies/"),
        (app(lambda a: a.writestr("strategies/more.py", "")), "another strategies/more.py"),
        (app(lambda a: a.writestr(OWN, "# other"), without=OWN), f"another {OWN}"),
        (app(lambda a: a.writestr("data/../../../etc/x.py", "")), "another data/../../../etc/x.py"),
        (app(lambda a: a.writestr("data/\x1b[2J\n.py", "")), "another data/?[2J .py"),
        (app(lambda a: a.writestr(f"data/{'x' * 5000}.py", "")), "no archive that can be read (OSError: "),
        (claiming(app(), OWN, flags=1), "no archive that can be read (RuntimeError: "),
        (claiming(app(), OWN, method=99), f"another {OWN}"),
    ],
    ids=["one folder", "none", "no strategies", "more", "other", "elsewhere", "signs", "long", "locked", "method"],
)
def test_an_app_that_is_another(content: bytes, line: str) -> None:
    assert wrong_with(content).startswith(line)


def test_of_two_files_of_one_name_both_are_compared() -> None:
    def twice(archive: zipfile.ZipFile) -> None:
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.write(ROOT / OWN, OWN)

    def other(archive: zipfile.ZipFile) -> None:
        archive.writestr(OWN, "# other")
        twice(archive)

    tasks._seen.clear()
    check_same_code(Bundle("floret/floret 0.1.0", app(twice), "key"))
    assert wrong_with(app(other, without=OWN)) == f"another {OWN}"


def test_the_name_that_an_app_goes_by_is_quoted_as_one_line() -> None:
    tasks._seen.clear()
    with pytest.raises(FloretError) as caught:
        check_same_code(Bundle("\x1b[2J\n" + "x" * 10**6, b"", "key"))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_apps_are_looked_at_once_and_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bytes] = []

    def look(content: bytes) -> str:
        looked.append(content)
        return ""

    monkeypatch.setattr(tasks, "_difference", look)
    monkeypatch.setattr(tasks, "_seen", {})
    for i in [*range(200), 199]:
        # The server chooses what an app's key says: it is not what tells apps apart.
        check_same_code(Bundle("floret/floret 0.1.0", bytes([i]), "key"))
        assert len(tasks._seen) <= tasks._REMEMBERED
    assert len(looked) == 200


def test_a_message_that_cannot_be_read_is_one_line_and_the_node_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Garbage:
        """Tasks none of which can be pulled."""

        def __init__(self, address: str) -> None:
            self.address = address

        def __enter__(self) -> "Garbage":
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def claim(self) -> str:
            return "token"

        @contextmanager
        def task(self, token: str, go: Any) -> Iterator[Any]:
            raise ValueError(f"\x1b[2J{token}")
            yield

    monkeypatch.setattr(tasks, "Tasks", Garbage)
    left = iter([True, True, False])
    warm: Any = None
    tasks.serve("127.0.0.1:1", warm, lambda: next(left))
    assert [record.message for record in caplog.records] == ["A message cannot be answered (ValueError: ?[2Jtoken)"] * 2
