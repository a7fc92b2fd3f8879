"""What makes the imports of a process that lives for one run shorter."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

# The SuperLink's database: with SQLAlchemy and Alembic a third of what Flower imports. A client's module imports it,
# and uses it in no app.
_DATABASE = "flwr.supercore.object_store.sql_object_store"


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import, within this context, without garbage collection and Flower without the SuperLink's database.

    Of a Flower that has no such module, all is imported.
    """
    gc.disable()
    name = "SqlObjectStore"
    placeholder = ModuleType(_DATABASE)
    setattr(placeholder, name, type(name, (), {}))
    if _DATABASE not in sys.modules:
        sys.modules[_DATABASE] = placeholder
    try:
        yield
    finally:
        if sys.modules[_DATABASE] is placeholder:
            del sys.modules[_DATABASE]
        gc.enable()
