"""``floret list``: the names that a run config may use."""

from importlib import import_module

import click

KINDS = {
    "methods": ("strategies", "METHODS"),
    "datasets": ("data", "DATASETS"),
    "models": ("models", "MODELS"),
    "partitions": ("data", "PARTITIONS"),
}


@click.command("list")
@click.argument("kind", required=False, type=click.Choice(list(KINDS)))
def list_names(kind: str | None) -> None:
    """List methods, datasets, models and partitions, with a line on each."""
    for wanted in [kind] if kind else KINDS:
        module, attribute = KINDS[wanted]
        names: dict[str, str] = getattr(import_module(module), attribute)
        width = max(map(len, names), default=0)
        if not kind:
            click.echo(f"{wanted}:")
        for name, description in names.items():
            click.echo(f"{'' if kind else '  '}{name.ljust(width)}  {description}")
