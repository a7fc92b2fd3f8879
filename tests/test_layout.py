"""The layout of the repository: the map in CONTRIBUTING.md is whole, and imports go the way that it says."""

import ast
import re
import tomllib

import pytest

from tests.harness import ROOT

# What each package may import of the others; all but `common` may import `common`, and `cli` may import all.
IMPORTS = {
    "common": set[str](),
    "models": set[str](),
    "data": set[str](),
    "results": {"data"},
    "strategies": {"models"},
    "client_app": {"models", "data"},
    "server_app": {"data", "models", "results", "strategies"},
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
    include = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.removesuffix("*") for name in include} == {*IMPORTS, "cli"}


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
