"""The server half of each method; ``client_app/methods/`` holds the client half under the same file name."""

import ast
from pathlib import Path


def _described() -> dict[str, str]:
    """Return name and first line of every method: every module of this folder is one.

    One that Python cannot read is among them, with what is wrong in the place of its line.
    """
    methods = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if file.stem != "__init__":
            try:
                doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"), file.name)) or ""
            except (SyntaxError, ValueError) as error:  # ValueError: not UTF-8
                doc = f"cannot be read: {error}"
            methods[file.stem.replace("_", "-")] = doc.split("\n")[0]
    return methods


METHODS: dict[str, str] = _described()
