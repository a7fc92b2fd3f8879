"""Only two modules use private names of Flower, each name with a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from client_app.app import Request, app
from client_app.state import FileStore
from common.flower import pack_message, unpack_message
from common.simulation import in_simulation
from tests.harness import ROOT, DirectGrid, run_config

PUBLIC = {"flwr.app", "flwr.client", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
ADAPTERS = {"common/flower.py", "client_app/node/transport.py"}
# What Flower calls things that are not imported: types, commands, attributes.
WORDS = {"InMemoryGrid", "flwr-simulation", "_message_id"}


def sources() -> dict[str, str]:
    """Return the text of every module but the tests, by its path in the repository."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name != "tests"]
    files = [file for folder in folders for file in folder.rglob("*.py") if "build" not in file.parts]
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the modules that are imported anywhere in ``tree``; ``from flwr import x`` as ``flwr.x``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "flwr":
            yield from ((f"flwr.{alias.name}", node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node


def foreign(text: str) -> list[str]:
    """Return what a module may not use unless it is one of the two."""
    tree = ast.parse(text)
    found = [name for name, _ in imports(tree) if name.split(".")[0] == "flwr" and name not in PUBLIC]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in WORDS:
            found.append(node.value)
        elif isinstance(node, ast.Attribute) and node.attr in {"__dict__", *WORDS}:
            found.append(node.attr)
    return found


def without_reason(text: str) -> list[str]:
    """Return the private names of Flower that have no comment of their own: above the line, or at its end."""
    lines = text.splitlines()
    found = []
    for name, node in imports(ast.parse(text)):
        if name.split(".")[0] == "flwr" and name not in PUBLIC:
            above = lines[node.lineno - 2].strip()
            within = lines[node.lineno - 1 : node.end_lineno]
            if not above.startswith("#") and not any("#" in line for line in within):
                found.append(name)
    return found


def test_only_two_modules_use_private_names_of_flower() -> None:
    texts = sources()
    assert texts.keys() >= ADAPTERS | {"server_app/app.py", "cli/main.py", "benchmarks/server.py"}
    assert {path: foreign(text) for path, text in texts.items() if path not in ADAPTERS and foreign(text)} == {}


def test_every_private_name_has_its_reason() -> None:
    texts = sources()
    assert {path: found for path in ADAPTERS if (found := without_reason(texts[path]))} == {}


def test_only_the_transport_of_a_node_knows_grpc() -> None:
    texts = {path: text for path, text in sources().items() if path.startswith("client_app/")}
    users = {path for path, text in texts.items() if any(name == "grpc" for name, _ in imports(ast.parse(text)))}
    assert users == {"client_app/node/transport.py"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from flwr.common.exit import ExitCode", ["flwr.common.exit"]),
        ("def f():\n    import flwr.common", ["flwr.common"]),
        ("from flwr import common", ["flwr.common"]),
        ("import flwr.app", []),
        ("from flwr.serverapp.strategy import FedAvg", []),
        ('message.metadata.__dict__["_message_id"] = "1"', ["__dict__", "_message_id"]),
        ('type(grid).__name__ == "InMemoryGrid"', ["InMemoryGrid"]),
    ],
)
def test_what_is_found(line: str, found: list[str]) -> None:
    assert sorted(foreign(line)) == sorted(found)
    private = [name for name in found if name.startswith("flwr.")]
    assert without_reason(line) == private
    assert without_reason(f"{line}  # why") == []


def ask(kind: str, config: dict[str, str], context: Context) -> RecordDict:
    message = Message(RecordDict({"config": ConfigRecord(dict(config))}), 1000, kind)
    # As it arrives at a ClientApp.
    reply = app(unpack_message(pack_message(message), "1"), context)
    assert reply.metadata.reply_to_message_id == "1"
    content: RecordDict = reply.content
    return content


def test_no_server_makes_a_node_believe_that_it_is_in_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a server can choose: messages, the run config, and what is in both under any name."""
    lure = tmp_path / "lure"
    lure.mkdir()
    values = run_config(tmp_path) | {"ray": "true", "simulation": True, "partition-id": 0}
    context = DirectGrid(values, 1, tmp_path / "states").contexts[1000]
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    said = {"session.directory": str(lure / "clients"), "directory": str(lure), "simulation": "true"}
    answer = ask("query.export", said, context)
    assert "exported in simulation only" in str(answer.config_records["error"]["reason"])
    message = Message(RecordDict({"config": ConfigRecord(dict(said))}), 1000, "train")
    store = Request(context, message).store
    assert isinstance(store, FileStore)
    assert ask("query.describe", said, context).config_records["client"]["identity"] != ""
    assert not in_simulation()
    assert list(lure.iterdir()) == []
