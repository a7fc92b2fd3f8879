"""``floret rank``: methods of sweeps in order, with what is within noise."""

from pathlib import Path

import click

from cli.paths import NamedPath
from common.errors import FloretError


@click.command()
@click.argument("sweeps", metavar="NAME=FOLDER...", nargs=-1, required=True)
@click.option("--output", "-o", type=NamedPath(dir_okay=False), metavar="FILE", help="A Markdown file.")
def rank(sweeps: tuple[str, ...], output: Path | None) -> None:
    """Rank the methods of sweeps over method and seed.

    NAME is the section's heading, FOLDER what `floret sweep` wrote. Methods are ranked by accuracy after and before
    local training, by the worst decile of clients, and by bytes. Places that noise between seeds cannot tell apart are
    given as a range. Below are differences of pairs of methods, with more than five methods of those with the best one,
    and which pairs differ beyond noise: a paired t test at 95 %, without a correction for the number of pairs.
    """
    from common.durable import write_whole
    from results.ranking import Ranking, page

    rankings = {}
    for text in sweeps:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise FloretError(f"{text}: must be like Fashion-MNIST=sweeps/fashion, a heading and a sweep's folder")
        if name in rankings:
            raise FloretError(f"{text}: {name} is given twice; each sweep needs a heading of its own")
        rankings[name] = Ranking.read(Path(folder) / "sweep.json")
    found = page(rankings)
    if output:
        write_whole(output, found.encode())
    click.echo(found, nl=False)
