"""``floret list``: the names that a run config may use."""

from importlib import import_module

import click

from cli.sharing import groups

KINDS = {
    "methods": ("strategies", "METHODS"),
    "datasets": ("data", "DATASETS"),
    "models": ("models", "MODELS"),
    "partitions": ("data", "PARTITIONS"),
}


@click.command("list")
@click.argument("kind", required=False, type=click.Choice(list(KINDS)))
def list_names(kind: str | None) -> None:
    """List methods, by what they share, datasets, models and partitions, with a line on each."""
    for wanted in [kind] if kind else KINDS:
        module, attribute = KINDS[wanted]
        names: dict[str, str] = getattr(import_module(module), attribute)
        width = max(map(len, names), default=0)
        indent = "" if kind else "  "
        if not kind:
            click.echo(f"{wanted}:")
        for title, members in groups().items() if wanted == "methods" else [("", list(names))]:
            if title:
                click.echo(f"{indent}share {title}:")
            for name in members:
                click.echo(f"{indent}{'  ' if title else ''}{name.ljust(width)}  {names[name]}")
