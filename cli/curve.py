"""``floret curve``: accuracy over the values of a key, or over rounds, as a picture and tables."""

from pathlib import Path

import click

from cli.paths import NamedPath
from common.errors import FloretError


@click.command()
@click.argument("key")
@click.argument("places", metavar="NAME=FOLDER...", nargs=-1, required=True)
@click.option(
    "--without",
    default="none",
    show_default=True,
    metavar="TEXT",
    help="What sweeps that do not vary KEY are called on its axis.",
)
@click.option(
    "--when",
    type=click.Choice(["before", "after"]),
    default="after",
    show_default=True,
    help="The accuracy in the picture: before or after local training.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Only this row or column of tables, `*` for any text; repeatable.",
)
@click.option(
    "--output",
    "-o",
    required=True,
    type=NamedPath(),
    metavar="FILE",
    help="Writes FILE.svg, FILE.md and FILE.json.",
)
def curve(key: str, places: tuple[str, ...], without: str, when: str, only: tuple[str, ...], output: Path) -> None:
    """Draw accuracy over the values of KEY, such as privacy.epsilon, or over rounds: KEY round.

    Each NAME is a panel, FOLDER what `floret sweep` wrote; several may have the same NAME. A line is a combination of
    the other keys of the grid, mean and standard deviation over seeds. A sweep that does not vary KEY, such as one
    without privacy, gives points beside the lines. Over rounds FOLDER may also be a run directory, or the name of one
    in the folder of runs; and a place FILE.json or NAME=FILE.json, which `floret reproduce` wrote: a panel for each
    column, a line for each row.
    """
    from common.extras import require

    require("matplotlib", "server", "floret curve")
    from results.curve import Study
    from results.rundir import folder_of_runs, named_run

    if not output.name or output.is_dir():
        raise FloretError(f"--output {output}: must be the name of files without their endings, such as found/curve")
    if output.suffix.lower() in (".svg", ".md", ".json", ".pdf", ".png"):
        raise FloretError(
            f"--output {output}: ends in {output.suffix}; three files are written, {output.stem}.svg, .md and .json; "
            f"leave {output.suffix} out"
        )
    named = []
    for text in places:
        name, equals, place = text.partition("=")
        if text.endswith(".json") and Path(text).is_file():
            name, place = "", text
        elif not (name and equals and place and name.isprintable()):
            raise FloretError(f"{text}: must be like '10 clients=sweeps/ten', a heading and a sweep's folder")
        named.append((name, named_run(Path(place), folder_of_runs(""))))
    study = Study.read(key, without, named, when=when, only=only)
    output.parent.mkdir(parents=True, exist_ok=True)
    for path in study.write(output):
        click.echo(f"written: {path}")
    click.echo("\n" + study.page(), nl=False)
