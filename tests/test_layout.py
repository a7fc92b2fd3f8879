"""The layout of the repository: the table in CONTRIBUTING.md is complete, and imports follow its rules."""

import ast
import importlib
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from flwr.serverapp.strategy import Strategy

from tests.defects import DEFECTS
from tests.harness import ROOT

# What each package may import of the others; all but `common` may import `common`, and `cli` may import all.
IMPORTS = {
    "common": set[str](),
    "models": set[str](),
    "data": set[str](),
    "results": {"data"},
    "strategies": {"models"},
    "client_app": {"models", "data", "strategies"},
    "server_app": {"data", "models", "results", "strategies"},
    "engine": {"client_app", "data", "server_app"},
}


def test_every_folder_is_in_the_map() -> None:
    kinds = ("*.py", "*.yaml", "*.md")
    folders = [path for path in ROOT.iterdir() if path.is_dir() and any(next(path.glob(kind), None) for kind in kinds)]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = text.split("## Where things are")[1].split("\n## ")[0]
    named = re.findall(r"`([a-z_]+)/`", "\n".join(row.split("|")[1] for row in rows.splitlines() if "|" in row))
    assert {path.name for path in folders if not path.name.startswith(".")} <= set(named)


def test_every_package_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {*project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]} == {*IMPORTS, "cli"}


def test_every_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    declared = {re.split(r"[\[<>= ]", one)[0].lower() for one in needed}
    ours = {*IMPORTS, "cli", *sys.stdlib_module_names}
    distributions = packages_distributions()
    for package in (*IMPORTS, "cli"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                for name in {one.partition(".")[0] for one in names} - ours:
                    # Packages of Google share a name of their own.
                    offered = {"protobuf"} if name == "google" else {one.lower() for one in distributions[name]}
                    assert offered & declared, f"{file.relative_to(ROOT)}: {name}"


@pytest.mark.parametrize("package", IMPORTS)
def test_imports_go_one_way(package: str) -> None:
    ours = {*IMPORTS, "cli", "tests", "benchmarks"}
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            imported = {name.partition(".")[0] for name in names} & ours
            assert imported <= {package, "common", *IMPORTS[package]}, file


def imported_names(file: Path) -> dict[str, set[str]]:
    """Return what a module imports from others, by module."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return found


@pytest.mark.parametrize("file", sorted((ROOT / "client_app").rglob("*.py")), ids=lambda file: file.stem)
def test_a_client_takes_only_declarations_from_the_strategies(file: Path) -> None:
    """What runs a server stays out of a device: of ``strategies.core`` it uses what both halves share, of a method its
    own strategy file, and there no strategy."""
    for module, names in imported_names(file).items():
        if module == "strategies.core":
            # FloretStrategy only to find the method's class, which the client uses as a Method.
            assert names <= {"Method", "Setup", "FloretStrategy"}, file
        elif module == "strategies":
            assert names == {"METHODS"}, file  # the names alone
        elif module.startswith("strategies"):
            assert module == f"strategies.{file.stem}", file
            kinds = vars(importlib.import_module(module))
            assert not any(isinstance(kinds[name], type) and issubclass(kinds[name], Strategy) for name in names), file


def test_every_planted_defect_has_its_place() -> None:
    for defect in DEFECTS:
        text = (ROOT / defect.file).read_text(encoding="utf-8")
        assert text.count(defect.text) == 1, defect.name
        assert defect.by != defect.text
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 30
