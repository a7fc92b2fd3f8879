"""Classes of a method by its files' name: ``pfps-lwc`` is ``pfps_lwc.py`` in strategies and client_app.methods."""

import importlib
import pkgutil
from contextlib import suppress
from typing import TypeVar

from common.errors import FloretError, one_line

T = TypeVar("T")


def load_class(package: str, method: str, base: type[T]) -> type[T]:
    """Return the class derived from ``base`` that the module of ``method`` in ``package`` defines.

    Raises:
        FloretError: the module is not there or cannot be imported, or it defines no such class or several.
    """
    name = f"{package}.{method.replace('-', '_')}"
    file, needed = f"{name.replace('.', '/')}.py", f"must define one class derived from {base.__name__}"
    try:
        module = importlib.import_module(name)
    except FloretError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise FloretError(f"{file}: is not there; it {needed}") from error
        raise FloretError(f"{file}: cannot be imported ({type(error).__name__}: {one_line(error)})") from error
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise FloretError(f"{file}: {needed}, it defines {', '.join(kind.__name__ for kind in found) or 'none'}")
    return found[0]


def load_modules(package: str) -> None:
    """Import every module of a package, so that each is as it is now; one that cannot be is left to ``load_class``."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        with suppress(Exception):
            importlib.import_module(f"{package}.{module.name}")
