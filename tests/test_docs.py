"""Every code block of README and CONTRIBUTING works: code is that of the file it names or runs, commands are accepted.

What a command does is tested elsewhere; here that it accepts the documented arguments. The README's first two
commands are what ``.ci/run`` does.
"""

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import yaml

from cli.certificates import _next_steps
from cli.main import floret
from cli.run import split_arguments
from client_app.client import FloretClient
from common.registry import load_class
from common.run_config import default_config, merged, parse_run_config
from server_app.settings import read_config
from strategies import METHODS
from tests.conftest import BIN, PATIENCE
from tests.harness import ROOT

PAGES = ("README.md", "CONTRIBUTING.md")


class Block(NamedTuple):
    """A fenced block: its language, its content, and the last file that the text before it names."""

    page: str
    language: str
    content: str
    file: str


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            files = re.findall(r"`([\w/]+\.py)`", text[: match.start()])
            if match[1] in languages:
                found.append(Block(page, match[1], match[2], files[-1] if files else ""))
    return found


def test_no_block_is_of_a_language_that_is_not_checked() -> None:
    known = len(blocks("python", "toml", "sh", "bash"))
    fences = sum((ROOT / page).read_text(encoding="utf-8").count("\n```") for page in PAGES)
    assert fences == 2 * known


def test_python_is_that_of_the_file_it_names_or_runs(tmp_path: Path) -> None:
    shown = 0
    for block in blocks("python"):
        if "def test_" in block.content:
            names: dict[str, Any] = {}
            exec(compile(block.content, block.page, "exec"), names)
            for name, value in names.items():
                if name.startswith("test_"):
                    value(tmp_path)
        else:
            assert (ROOT / block.file).read_text(encoding="utf-8") == block.content, block.file
            shown += 1
    assert shown == 4


def test_toml_is_a_table_of_defaults() -> None:
    for block in blocks("toml"):
        (table,) = tomllib.loads(block.content)["tool"]["flwr"]["app"]["config"].values()
        assert table


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the words of each command, without comments and without what sets it up."""
    for block in blocks("sh", "bash"):
        for line in block.content.splitlines():
            for part in re.split(r" && ", line):
                words = shlex.split(part, comments=True)
                if words:
                    yield block.page, words


def accepted_by_floret(words: list[str]) -> None:
    """Parse the command as ``floret`` does; what it checks beyond is checked, too, where it needs no run."""
    command = floret.commands[words[1]]
    context = command.make_context(words[1], words[2:], resilient_parsing=False)
    assert isinstance(context, click.Context)
    if words[1] == "run":
        accepted_by_flwr(["flwr", *words[1:]])


def accepted_by_flwr(words: list[str]) -> None:
    """Read the run config as the ServerApp does."""
    assert words[1] == "run"
    _, texts, rest = split_arguments(words[2:])
    read_config(merged(default_config(ROOT), parse_run_config(" ".join(texts)) if texts else {}))
    assert {word for word in rest if word.startswith("--")} <= {"--stream", "--federation-config"}


def known_to(words: list[str]) -> None:
    """Look for each option in the help of a command that starts something."""
    told = subprocess.run(
        [BIN / words[0], "--help"], capture_output=True, text=True, timeout=PATIENCE, check=True
    ).stdout
    for word in words[1:]:
        assert not word.startswith("--") or word in told, word


def names_tests_that_are_there(words: list[str]) -> None:
    """Look for the files of a ``python -m pytest``."""
    assert words[1:3] in (["-m", "pytest"], ["-m", "venv"])
    for word in words[3:]:
        assert not word.endswith(".py") or (ROOT / word).is_file(), word


def done_by_ci(words: list[str]) -> None:
    """Find the command among those of ``.ci/run``."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert words[0] in script or words[0] == ".", words


def superlinks() -> Iterator[tuple[str, str]]:
    """Yield each ``flower-superlink`` with options in README, docs, Compose files and what Floret prints, and where."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docker").iterdir())]
    texts = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages}
    texts["floret certificates"] = _next_steps(Path("made"), ["north"])
    for place, text in texts.items():
        # A command goes on after a backslash at the end of a line; a list of YAML on the lines that begin with "- ".
        flat = re.sub(r"\s*\\\n\s*", " ", text)
        flat = re.sub(r"(?:\s*#[^\n]*)?\n\s*- (?=flower-superlink|--)", " ", flat)
        for match in re.finditer(r"flower-superlink((?: +(?!#)[^\s`]+)+)", flat):
            if match[1].strip().startswith("--"):
                yield place, match[1]


def test_every_superlink_keeps_its_inner_ports_to_itself() -> None:
    """Flower's default for both is every address of the machine, and it asks nobody for a password."""
    found = list(superlinks())
    assert [place for place, _ in found] == [
        "README.md",
        *["docs/deployment.md"] * 3,
        *("docker/compose.yaml", "floret certificates"),
    ]
    for place, options in found:
        # In Compose a name stands for the address on one internal network; docker/smoke.sh tries to reach it.
        control, appio = ("control", "serverappio") if place == "docker/compose.yaml" else ("127.0.0.1", "127.0.0.1")
        assert re.search(rf"--control-api-address[ =]{control}:9093(\s|$)", options), (place, options)
        assert re.search(rf"--serverappio-api-address[ =]{appio}:9091(\s|$)", options), (place, options)


def test_every_superlink_remembers_registered_nodes() -> None:
    for place, options in superlinks():
        assert re.search(r"--database[ =]\S+", options), (place, options)


def test_in_compose_nodes_share_no_network_with_what_starts_runs_or_runs_the_server_app() -> None:
    text = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
    services = yaml.safe_load(text)["services"]
    networks = yaml.safe_load(text)["networks"]
    where = {name: set(service.get("networks", ())) for name, service in services.items() if name != "prepare"}
    assert where.pop("superlink") == {"fleet", "inner", "control"}
    assert where == {
        **{name: {"fleet"} for name in ("node-0", "node-1", "node-2")},
        **{name: {"control"} for name in ("cli", "run")},
        "executor": {"inner"},
    }
    assert networks["control"] == networks["inner"] == {"internal": True}
    assert [port.rpartition(":")[2] for service in services.values() for port in service.get("ports", ())] == ["9092"]


def test_every_container_may_do_little() -> None:
    folder = ROOT / "docker"
    shared = {"image", "user", "read_only", "cap_drop", "security_opt", "deploy"}
    for file in ("compose.yaml", "compose.tls.yaml", "compose.node.yaml"):
        for name, service in yaml.safe_load((folder / file).read_text(encoding="utf-8"))["services"].items():
            if "image" not in service:  # a layer on top of compose.yaml
                continue
            assert shared <= service.keys(), (file, name)
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]
            assert service["deploy"]["resources"]["limits"].keys() >= {"cpus", "memory", "pids"}
            root = service["user"] == "0:0"
            owners = ["CHOWN", "DAC_OVERRIDE"] if name == "prepare" else ["CHOWN"]
            assert service.get("cap_add", []) == (owners if root else [])
            assert service.get("network_mode") == "none" or not root


def test_the_names_of_volumes_stay() -> None:
    """They begin with the project's name: under another one a device would start without its personal models."""
    for file, project, volume in (("compose.yaml", "floret", "node-0"), ("compose.node.yaml", "floret-node", "state")):
        content = yaml.safe_load((ROOT / "docker" / file).read_text(encoding="utf-8"))
        assert content["name"] == project
        assert content["volumes"][volume] == {}


def test_images_of_other_extras_have_other_names() -> None:
    images: dict[str, set[str]] = {}
    for path in (ROOT / "docker").glob("compose*.yaml"):
        services = yaml.safe_load(path.read_text(encoding="utf-8"))["services"].values()
        named = {service["image"] for service in services if "image" in service}
        if named:
            images[path.name] = named
    server = {"${FLORET_IMAGE:-floret}"}
    assert images == {
        "compose.yaml": server,
        "compose.tls.yaml": server,
        "compose.node.yaml": {"${FLORET_IMAGE:-floret-node}"},
    }


@pytest.mark.parametrize("file", ["compose.yaml", "compose.node.yaml"])
def test_all_in_a_volume_is_handed_over_to_another_user_and_nothing_that_is_right(file: str, tmp_path: Path) -> None:
    service = yaml.safe_load((ROOT / "docker" / file).read_text(encoding="utf-8"))["services"]["prepare"]
    assert service["environment"] == {"OWNER": "${FLORET_USER:-1000:1000}"}
    volumes = [volume.rpartition(":") for volume in service["volumes"] if "$" not in volume]
    assert service["command"] == [path for _, _, path in volumes]
    for folder in ("runs", "state/.audit", "state/default/fedper/north"):
        (tmp_path / "floret" / folder).mkdir(mode=0o700, parents=True)
    (tmp_path / "floret" / "state" / "seed").write_text("")
    (tmp_path / "floret" / "state" / "link").symlink_to(tmp_path)
    (tmp_path / "chown").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "chown").chmod(0o755)
    command = [part.replace("$$", "$").replace("/floret/", f"{tmp_path}/floret/") for part in service["entrypoint"]]

    def handed(owner: str) -> list[str]:
        """Return what is given to ``chown``: this one only says it."""
        done = subprocess.run(
            [*command, tmp_path / "floret" / "state"],
            env={"OWNER": owner, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    me, group = os.getuid(), (tmp_path / "floret").stat().st_gid
    runs = [f"{tmp_path}/floret/runs"] if file == "compose.yaml" else []
    for owner in (f"{me + 1}:{group}", f"{me}:{group + 1}"):
        said = handed(owner)
        everything = {str(path) for path in (tmp_path / "floret").rglob("*")} - {f"{tmp_path}/floret/runs"}
        assert set(said) == {"-h", owner, *everything, *runs}
    assert handed(f"{me}:{group}") == ([f"{me}:{group}", *runs] if runs else [])


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "floret": accepted_by_floret,
    "flwr": accepted_by_flwr,
    "flower-superlink": known_to,
    "python": names_tests_that_are_there,
    "python3": names_tests_that_are_there,
    "pip": done_by_ci,
    "ruff": done_by_ci,
    "mypy": done_by_ci,
    ".": done_by_ci,
}


@pytest.mark.parametrize(("page", "words"), [pytest.param(*item, id=" ".join(item[1])[:60]) for item in commands()])
def test_commands_are_accepted(page: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("FLORET_HOME", str(tmp_path))
    CHECKS[words[0]](words)


def test_the_table_of_what_leaves_a_device_has_every_method() -> None:
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    _, rest = text.split("| Method | What leaves a device in a round |")
    table = rest.split("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(METHODS)


def test_contributing_names_the_methods_whose_rounds_go_on_from_their_own() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("**`goes_on`**")[2].partition("\n\n")[0]
    named = {name for name in re.findall(r"`([a-z-]+)`", text) if name in METHODS}
    assert named == {name for name in METHODS if load_class("client_app.methods", name, FloretClient).goes_on}


@pytest.mark.parametrize("command", ["reproduce", "verify"])
def test_what_commands_write_by_default_is_neither_committed_nor_in_the_image(command: str) -> None:
    (folder,) = (str(p.default) for p in floret.commands[command].params if p.name == "output")
    assert f"/{folder}/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert not in_image(f"{folder}/results.json")


def in_image(path: str) -> bool:
    """Return whether a build gets a file: of ``.dockerignore`` the last pattern counts that fits it or its folder."""
    found = True
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for line in (line for line in lines if line and not line.startswith("#")):
        pattern = line.removeprefix("!")
        expression = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{expression}(/.*)?", path):
            found = line.startswith("!")
    return found


def test_the_image_has_the_sources_and_what_containers_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    sources = [path.relative_to(ROOT).as_posix() for name in packages for path in (ROOT / name).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docker").glob("compose*.yaml")]
    run = {file for text in texts for file in re.findall(r"/app/([\w./]+)", text)}
    assert run == {"docker/health.py"}
    copied = re.findall(
        r"^COPY (?!\. )(.+) \./$", (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    project_files = [project["project"]["readme"], *project["project"]["license-files"], *" ".join(copied).split()]
    needed = [*sources, *run, *project_files]
    assert len(needed) > 100
    assert [path for path in needed if not in_image(path)] == []


@pytest.mark.parametrize(
    "path",
    [
        # What a machine has in its clone besides: personal models, answers, a database, keys under any name, data.
        *("state.tar", "answers.csv", "superlink.db", "superlink.db.old", "north", "north.pub", "policy.yaml"),
        *("certificates/ca.key", "certificates/nodes/north", "docker/.env", "docker/node.key", "own/train.npz"),
        *("runs/x/checkpoints/a.safetensors", "data/own.npz", "data/node.key", "data/ca.pem", "client_app/ca.crt"),
        # What is made there, and what no container needs.
        *("cli/__pycache__/main.cpython-311.pyc", "client_app/node/__pycache__/x.pyc", "floret.egg-info/PKG-INFO"),
        *(".venv/bin/python", ".git/config", "build/lib/cli/main.py", "tests/conftest.py", "docs/results/claims.md"),
    ],
)
def test_the_image_has_nothing_else(path: str) -> None:
    assert not in_image(path)


def options(command: click.Command) -> Iterator[str]:
    """Yield the long options of a command and of those below it."""
    for part in getattr(command, "commands", {}).values():
        yield from options(part)
    yield from (name for p in command.params for name in p.opts if name.startswith("--"))


@pytest.mark.parametrize("command", sorted(floret.commands))
def test_every_option_is_on_some_page(command: str) -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert set(options(floret.commands[command])) - named == set()


def test_every_test_that_security_names_is_there() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    named = re.findall(r"`(test_\w+?)(\.py)?`", text)
    assert len(named) > 20
    for name, suffix in named:
        assert f"{name}.py" in files if suffix else any(f"def {name}(" in content for content in files.values()), name
    for path in re.findall(r"`([\w/]+/[\w.]+\.(?:py|sh|md))`", text):
        assert (ROOT / path).is_file(), path
