"""The ``floret`` command: collects the subcommands, one file each, and turns errors into one line."""

import errno
import os
import sys

import click

from cli.certificates import certificates
from cli.curve import curve
from cli.evidence import evidence
from cli.fit import fit
from cli.listing import list_names
from cli.node import node
from cli.policy import policy
from cli.privacy import privacy
from cli.rank import rank
from cli.report import report
from cli.reproduce import reproduce
from cli.run import run
from cli.serve import export, predict
from cli.state import state
from cli.sweep import sweep
from cli.verify import verify
from cli.watch import watch
from common.errors import FloretError, printable


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from importlib.metadata import PackageNotFoundError, version

        try:
            click.echo(f"floret {version('floret')}")
        except PackageNotFoundError:
            click.echo("floret, run from a source tree that is not installed")
        context.exit()


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
@click.pass_context
def floret(context: click.Context) -> None:
    """Personalized federated learning on Flower: one federation, one model per client.

    A run is started with `flwr run`, or with `floret run`, which checks its config first; see the README.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


floret.add_command(certificates)
floret.add_command(curve)
floret.add_command(evidence)
floret.add_command(export)
floret.add_command(fit)
floret.add_command(list_names)
floret.add_command(node)
floret.add_command(policy)
floret.add_command(predict)
floret.add_command(privacy)
floret.add_command(rank)
floret.add_command(report)
floret.add_command(reproduce)
floret.add_command(run)
floret.add_command(state)
floret.add_command(sweep)
floret.add_command(verify)
floret.add_command(watch)


# What is wrong with a disk that the standard output goes to.
_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def main() -> None:
    """Run the command line; an error that the user can correct is one line on stderr and exit code 2."""
    _open_standard_streams()
    try:
        sys.exit(floret.main(prog_name="floret", standalone_mode=False))
    except FloretError as error:
        _fail(str(error), 2)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except OSError as error:
        if error.filename is not None:
            denied = error.errno in (errno.EACCES, errno.EPERM)
            if denied:
                way_out = "do this as the user who owns it, or name another place"
            else:
                way_out = "name a place that is there and that you may write to"
            _fail(f"{error.filename}: {error.strerror}; {way_out}", 2)
        if error.errno in _OUTPUT:
            _fail(f"the output cannot be written ({error.strerror})", 2)
        raise
    except click.Abort:
        _fail("interrupted", 130)


def _open_standard_streams() -> None:
    """Open a null device in the place of closed streams (``>&-``): their numbers would go to files and pipes."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _fail(message: str, code: int) -> None:
    # What a file of somebody else is called, and what it has, is in it.
    click.echo(f"floret: {printable(message, 100_000)}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
