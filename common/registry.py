"""Classes of a method by its files' name: ``pfps-lwc`` is ``pfps_lwc.py`` in strategies and client_app.methods."""

import importlib
from typing import TypeVar

T = TypeVar("T")


def load_class(package: str, method: str, base: type[T]) -> type[T]:
    """Return the class derived from ``base`` that the module of ``method`` in ``package`` defines.

    Raises:
        TypeError: the module defines no such class or several.
    """
    module = importlib.import_module(f"{package}.{method.replace('-', '_')}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise TypeError(
            f"{module.__name__} must define one class derived from {base.__name__}, it defines {len(found)}"
        )
    return found[0]
