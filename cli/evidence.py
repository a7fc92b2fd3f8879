"""``floret evidence``: what the results of published tables say of the papers' claims, as a page and a picture."""

from pathlib import Path

import click

from cli.paths import NamedPath


@click.command()
@click.argument("folder", metavar="[FOLDER]", default="docs/results", type=NamedPath(exists=True, file_okay=False))
@click.option(
    "--experiments",
    default="experiments",
    show_default=True,
    type=NamedPath(exists=True, file_okay=False),
    help="The folder of the tables' files.",
)
@click.option("--app", default=".", type=NamedPath(exists=True, file_okay=False), help="Floret's folder.")
def evidence(folder: Path, experiments: Path, app: Path) -> None:
    """Write what results say of the papers' claims: a section of FOLDER/README.md, evidence.svg and claims.md.

    FOLDER, docs/results by default, has the JSON files that `floret reproduce` wrote. The section stands between two
    comments in README.md; the rest of the page is left as it is. Nothing is run.
    """
    from common.extras import require

    require("matplotlib", "server", "floret evidence")
    from results.evidence import Evidence

    found = Evidence.read(folder, experiments, app)
    for path in found.write():
        click.echo(f"written: {path}")
    click.echo(found.summary())
