"""``floret watch``: a page on this machine that shows runs as they go."""

import click

from cli.paths import NamedPath
from cli.ranges import WholeRange


@click.command()
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=NamedPath(str))
@click.option("--port", default=0, show_default="any that is free", type=WholeRange(0, 65535), help="Of the page.")
@click.option(
    "--output-dir",
    type=NamedPath(str),
    metavar="DIR",
    help="Where runs are, as the key of the run config. [default: runs in FLORET_HOME]",
)
@click.option("--open", "show", is_flag=True, help="Open the page in the browser.")
def watch(runs: tuple[str, ...], port: int, output_dir: str | None, show: bool) -> None:
    """Show runs on a page that follows them, until Ctrl-C.

    RUN is a run directory, or the name of one in the folder of runs, or the output of a sweep or of floret reproduce;
    by default the newest run. Several are shown side by side. The page is on 127.0.0.1; its address has a token, and
    whoever has the address can look.
    """
    import signal
    import webbrowser

    from results.rundir import folder_of_runs
    from results.watch import Board, WatchServer, directories

    folder = folder_of_runs(output_dir or "")
    find = directories(runs, folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with WatchServer(Board(find), port) as server:
        try:
            nothing = "where no run is yet" if folder.is_dir() else "which does not exist yet; a run may make it"
            click.echo(f"Watching {', '.join(path.name for path in find()) or f'{folder}, {nothing}'}")
            click.echo(f"Page: {server.address}")
            if show:
                webbrowser.open(server.address)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            click.echo("Ended", err=True)
