"""``floret curve``: accuracy over the values of a key, as a picture and tables."""

from pathlib import Path

import click

from cli.paths import NamedPath
from common.errors import FloretError


@click.command()
@click.argument("key")
@click.argument("sweeps", metavar="NAME=FOLDER...", nargs=-1, required=True)
@click.option(
    "--without",
    default="none",
    show_default=True,
    metavar="TEXT",
    help="What sweeps that do not vary KEY are called on its axis.",
)
@click.option(
    "--output",
    "-o",
    required=True,
    type=NamedPath(),
    metavar="FILE",
    help="Writes FILE.svg, FILE.md and FILE.json.",
)
def curve(key: str, sweeps: tuple[str, ...], without: str, output: Path) -> None:
    """Draw accuracy over the values of KEY, such as privacy.epsilon.

    Each NAME is a panel, FOLDER what `floret sweep` wrote; several may have the same NAME. A line is a combination of
    the other keys of the grid, mean and standard deviation over seeds. A sweep that does not vary KEY, such as one
    without privacy, gives points beside the lines.
    """
    from common.extras import require

    require("matplotlib", "server", "floret curve")
    from results.curve import Study

    if not output.name or output.is_dir():
        raise FloretError(f"--output {output}: must be the name of files without their endings, such as found/curve")
    if output.suffix.lower() in (".svg", ".md", ".json", ".pdf", ".png"):
        raise FloretError(
            f"--output {output}: ends in {output.suffix}; three files are written, {output.stem}.svg, .md and .json; "
            f"leave {output.suffix} out"
        )
    folders = []
    for text in sweeps:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder and name.isprintable()):
            raise FloretError(f"{text}: must be like '10 clients=sweeps/ten', a heading and a sweep's folder")
        folders.append((name, Path(folder)))
    study = Study.read(key, without, folders)
    output.parent.mkdir(parents=True, exist_ok=True)
    for path in study.write(output):
        click.echo(f"written: {path}")
    click.echo("\n" + study.page(), nl=False)
