"""What each method shares, read from its source: to import it would take PyTorch, which takes seconds."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import strategies

_ROOT = Path(strategies.__file__).parents[1]
# The class that a server half derives from, and the module that has it.
_BASE = ("strategies.core", "FloretStrategy")
_PARTS = {
    "model": "the model",
    "model-without-batch-norm": "the model without batch normalisation",
    "extractor": "the extractor",
    "head": "the head",
    "nothing": "",
}


@dataclass(frozen=True)
class _Module:
    """A module's classes by name, and where it has other names from."""

    tree: ast.Module
    classes: dict[str, ast.ClassDef]
    imported: dict[str, str]


@dataclass(frozen=True)
class _Shared:
    """What a method declares: the part of the model that travels, and what else does."""

    part: str
    prototypes: bool
    networks: bool
    sparse: bool
    factors: bool
    relays: bool

    @property
    def title(self) -> str:
        """What all methods that share the same stand below."""
        beside = [("prototypes", self.prototypes), ("networks beside the model", self.networks)]
        things = [name for name in (_PARTS[self.part], *(name for name, there in beside if there)) if name]
        how = [("sparse", self.sparse), ("as factors", self.factors), ("passed on to others", self.relays)]
        said = " and ".join([", ".join(things[:-1]), things[-1]] if len(things) > 1 else things) or "nothing"
        return ", ".join([said, *(word for word, true in how if true)])


def groups() -> dict[str, list[str]]:
    """Return the methods by what they share, in order of the parts of a model; at the end those that do not say it."""
    shared, silent = {}, []
    for method in strategies.METHODS:
        try:
            shared[method] = _shared(method)
        except (SyntaxError, ValueError, AttributeError):
            silent.append(method)
    order = list(_PARTS)
    found: dict[str, list[str]] = {}
    for method, what in sorted(shared.items(), key=lambda item: (order.index(item[1].part), item[1].title)):
        found.setdefault(what.title, []).append(method)
    return found | ({"what cannot be read from their files": silent} if silent else {})


def _shared(method: str) -> _Shared:
    module = f"strategies.{method.replace('-', '_')}"
    lineages = [list(_lineage(module, name)) for name in _module(module).classes]
    # A server half is the class that ends at the base; helpers beside it do not.
    (lineage,) = [line for line in lineages if any(node.name == _BASE[1] for _, node in line)]
    own = {name for name, _ in lineage if not name.startswith(_BASE[0])}
    calls = [node for name in own for node in ast.walk(_module(name).tree) if isinstance(node, ast.Call)]
    called = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    # Switched on, or by something that is known when a run begins.
    switched = {word.arg for call in calls for word in call.keywords if getattr(word.value, "value", None) is not False}
    return _Shared(
        part=_attribute(lineage, "shares"),
        prototypes="prototypes" in called,
        networks="shared" in switched,
        sparse="sparse" in switched,
        factors="Free" in called,
        relays=_attribute(lineage, "relays"),
    )


def _attribute(lineage: list[tuple[str, ast.ClassDef]], name: str) -> Any:
    """Return the value that the first class has for an attribute."""
    for _, node in lineage:
        for line in node.body:
            if isinstance(line, ast.Assign):
                targets = line.targets
            elif isinstance(line, ast.AnnAssign):
                targets = [line.target]
            else:
                continue
            if line.value and any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return ast.literal_eval(line.value)
    raise AttributeError(name)


def _lineage(module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield a class and those that it derives from in this package, nearest first, each with its module."""
    here = _module(module)
    if name in here.classes:
        node = here.classes[name]
        yield module, node
        for base in node.bases:
            if isinstance(base, ast.Name):
                yield from _lineage(module, base.id)
    elif here.imported.get(name, "").partition(".")[0] == "strategies":
        yield from _lineage(here.imported[name], name)


@cache
def _module(name: str) -> _Module:
    path = _ROOT.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    lines = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    return _Module(tree, classes, {alias.name: str(line.module) for line in lines for alias in line.names})
