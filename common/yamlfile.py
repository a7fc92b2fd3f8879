"""YAML files that a user writes, read with errors of one line."""

import re
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError, one_line, printable


class _Loader(yaml.SafeLoader):
    """Has each key of a table once, and as numbers the decimal ones of YAML 1.2.

    ``1e-5`` is one, which to YAML 1.1 is a text; ``010``, ``1:30`` and ``1_000`` are texts, not 8, 90 and 1000 as in
    YAML 1.1, and so are dates.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node.

        Raises:
            ConfigError: it is an alias of another one; a few hundred bytes of them can stand for any number of values.
        """
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"line {event.start_mark.line + 1}: *{printable(event.anchor, 40)} is an alias; write the value itself"
            )
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the node of a table.

        Raises:
            ConfigError: a key is there twice, of which PyYAML would take the last.
        """
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            what, line = (key.tag, key.value), key.start_mark.line + 1
            if what in lines:
                said = printable(key.value, 40)
                raise ConfigError(f"line {line}: {said} is there twice, first in line {lines[what]}; write it once")
            lines[what] = line
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node.

        Raises:
            ConfigError: it is not of the kind that it looks like or says to be: ``!!int x``, a number of 5000 digits.
        """
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:  # PyYAML lets them all through
            line, kind, said = node.start_mark.line + 1, node.tag.rpartition(":")[2], printable(node.value, 40)
            wrong = f"line {line}: {said!r} is no {kind}; write another value, or a text in quotes"
            raise ConfigError(wrong) from error


_FORMS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9]*)$",
    "tag:yaml.org,2002:float": (
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag not in (*_FORMS, "tag:yaml.org,2002:timestamp")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _form in _FORMS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_form), list("-+0123456789."))


def read_yaml(path: Path, name: str) -> Any:
    """Return the content of a YAML file; ``name`` is what errors call it.

    Raises:
        ConfigError: it cannot be read, is nested too deeply, is not YAML, or has a key twice or a value that cannot
            be read.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror})") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: is nested too deeply") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: is not YAML ({one_line(error)})") from error
