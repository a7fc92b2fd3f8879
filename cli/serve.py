"""``floret predict`` and ``floret export``: a device uses its personal model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cli.paths import NamedPath
from common.durable import write_whole
from common.errors import FloretError
from common.home import states_folder


def _of_personal(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select a personal model and its device."""
    for option in (
        click.option("--device", default="cpu", show_default=True, help="Where to compute: cpu, cuda, ..."),
        click.option("--client-name", help="Whose model; needed only if there are several."),
        click.option("--method", help="Of which method; needed only if there are several."),
        click.option("--federation", help="Of which federation; needed only if there are several."),
        click.option("--state-dir", type=NamedPath(), help="As of floret node. [default: state in FLORET_HOME]"),
    ):
        command = option(command)
    return command


@click.command()
@_of_personal
@click.option(
    "--input",
    "source",
    required=True,
    type=NamedPath(),
    help="npz with x; image; folder of images; txt, a text a line.",
)
@click.option("--output", type=NamedPath(), help="Write the CSV here instead of showing it.")
def predict(source: Path, output: Path | None, **which: Any) -> None:
    """Classify inputs with a client's personal model, also while a federation is going on.

    Prints a CSV with the class of each input and all scores. If an npz has labels y as well, the accuracy follows.
    """
    import torch

    from data import read_inputs

    if output and source.expanduser().resolve() == output.expanduser().resolve():
        raise FloretError(f"--output {output}: is the --input, which would be overwritten")
    personal = _personal(**which)
    dtype = str(personal.dtype).removeprefix("torch.")
    names, x, y = read_inputs(source.expanduser(), personal.config, personal.input_shape, dtype)
    try:
        scores = personal.scores(torch.from_numpy(x))
    except FloretError as error:
        raise FloretError(f"--input {source}: {error}") from error
    if y is not None and len(y) and y.max() >= personal.classes:
        raise FloretError(
            f"--input {source}: array y has label {y.max()}; the model has {personal.classes} classes, 0 to "
            f"{personal.classes - 1}"
        )
    classes = scores.argmax(1)
    labels = (*personal.class_names, *(str(c) for c in range(len(personal.class_names), personal.classes)))
    lines = [",".join(["input", "class", *(_quoted(f"score {label}") for label in labels)])]
    for name, c, row in zip(names, classes.tolist(), scores.tolist(), strict=True):
        lines.append(",".join([_quoted(name), _quoted(labels[c]), *(f"{score:.6g}" for score in row)]))
    # A file's name may be of bytes that are no text.
    content = ("\n".join(lines) + "\n").encode(errors="surrogateescape")
    if output:
        try:
            path = output.expanduser()
            if path.exists() and not path.is_file():
                path.write_bytes(content)  # a device or a pipe
            else:
                write_whole(path.resolve(), content)
        except OSError as error:
            raise FloretError(f"--output {output}: cannot be written ({error.strerror})") from error
    else:
        click.echo(content, nl=False)
    if y is not None:
        right = int((classes == torch.from_numpy(y)).sum())
        click.echo(f"accuracy {right / len(y):.6f}: {right} of {len(y)}", err=True)


@click.command()
@_of_personal
@click.option("--output", required=True, type=NamedPath(), help="model.pt2, or model.onnx.")
def export(output: Path, **which: Any) -> None:
    """Write a client's personal model as one file that needs no Floret.

    A name in .pt2 gives a torch.export program, one in .onnx an ONNX model (in Floret's folder: pip
    install '.[onnx]').
    """
    kinds = {".pt2": "export", ".onnx": "export_onnx"}
    if output.suffix not in kinds:
        raise FloretError(f"--output {output}: must end in .pt2 (torch.export) or .onnx")
    personal = _personal(**which)
    getattr(personal, kinds[output.suffix])(output.expanduser())
    click.echo(
        f"{output}: client {personal.client}, {personal.method}, round {personal.round}; input "
        f"{str(personal.dtype).removeprefix('torch.')} {('batch', *personal.input_shape)}, {personal.classes} classes"
    )


def _personal(
    state_dir: Path | None, federation: str | None, method: str | None, client_name: str | None, device: str
) -> Any:
    from client_app.serving import find_personal, load_personal

    personal = load_personal(find_personal(states_folder(state_dir), federation, method, client_name), device)
    for note in personal.notes:
        click.echo(f"floret: {note}", err=True)
    return personal


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\n\r') else text
