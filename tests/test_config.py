"""Every mistake in a config is one line that names the key, the value, and what would be right."""

import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import click
import pytest
from flwr.common.config import parse_config_args

from cli.main import floret, main
from cli.run import split_arguments, values_of
from common import stream
from common.config import Privacy, RunConfig, key_of
from common.errors import ConfigError, FloretError
from common.flower import check_connection
from common.home import floret_home
from common.local_superlink import simulated_clients
from common.run_config import (
    as_pairs,
    default_config,
    merged,
    own_config,
    parse_run_config,
    parse_run_configs,
    run_config_text,
)
from common.yamlfile import read_yaml
from results.page import write_sweep_page
from results.sweep import combinations, markdown, rows, table_row
from server_app.settings import read_config
from strategies import METHODS
from tests.conftest import free_port
from tests.harness import ROOT, run_config
from tests.test_data_paths import forbidden


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"method": "fedprr"}, "method = 'fedprr': must be one of "),
        ({"method": "fedprr"}, "(did you mean 'fedper'?)"),
        (
            {"model": "cnn"},
            "model = 'cnn': must be one of mlp, cnn2, cnn2-small, cnn3, cnn5, cnn5-bn, cnn5-wide, cnn5-wide-bn, ",
        ),
        ({"alpha": 0.0}, "alpha = 0.0: must be above 0"),
        ({"device": "tpu"}, "device = 'tpu': must be auto, cpu, or an accelerator like cuda or cuda:1"),
        ({"alpha": -1}, "alpha = -1: must be above 0"),
        ({"alpha": inf}, "alpha = inf: must be above 0 and finite"),
        ({"lr": inf}, "lr = inf: must be above 0 and finite"),
        (parse_run_config("lr=1e400"), "lr = inf: must be above 0 and finite"),
        ({"lr": -inf}, "lr = -inf: must be above 0 and finite"),
        ({"weight_decay": inf}, "weight-decay = inf: must be at least 0 and finite"),
        ({"round_timeout": inf}, "round-timeout = inf: must be above 0 and finite"),
        ({"momentum": inf}, "momentum = inf: must be at least 0 and at most 0.9999"),
        ({"method": "fedprox", "fedprox__mu": inf}, "fedprox.mu = inf: must be at least 0 and finite"),
        ({"participation": 1.5}, "participation = 1.5: must be above 0 and at most 1"),
        ({"rounds": 0}, "rounds = 0: must be at least 1"),
        ({"batch_size": 2**70}, f"batch-size = {2**70}: must be at least 1 and at most 1e+09"),
        ({"rounds": 2.5}, "rounds = 2.5: must be a whole number"),
        ({"rounds": True}, "rounds = True: must be a whole number"),
        ({"lr": "fast"}, "lr = 'fast': must be a number"),
        ({"lr": float("nan")}, "lr = nan: must be a number"),
        ({"download": "yes"}, "download = 'yes': must be true or false"),
        ({"batch_norm": "frozen"}, "batch-norm = 'frozen': must be one of shared, local"),
        ({"precision": "float16"}, "precision = 'float16': must be one of float32, bfloat16, auto"),
        ({"output_dir": "runs"}, "output-dir = 'runs': must be an absolute path"),
        ({"tracker": "mlfow"}, "tracker = 'mlfow': must be one of mlflow (did you mean 'mlflow'?), or empty"),
        ({"tensorboard": "yes"}, "tensorboard = 'yes': must be true or false"),
        (
            {"resume": "lates"},
            "resume = 'lates': must be an absolute path (the working directory of a Flower process is not yours), or "
            '"latest"',
        ),
        ({"data_dir": "data"}, "data-dir = 'data': must be an absolute path"),
        ({"validation_fraction": 0.5, "test_fraction": 0.5}, "together they must leave at least 0.05 for training"),
        ({"pfakd__distill_reduction": "max"}, "pfakd.distill-reduction = 'max': must be one of mean, sum"),
        ({"pfakd__beta": -1.0}, "pfakd.beta = -1.0: must be at least 0"),
    ],
)
def test_a_value_that_cannot_be_used(tmp_path: Path, keys: dict[str, Any], line: str) -> None:
    values = run_config(tmp_path, **keys)
    if "output_dir" in keys:
        values["output-dir"] = keys["output_dir"]
    with pytest.raises(ConfigError) as error:
        read_config(values)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_every_key_has_a_default_and_every_default_is_read() -> None:
    known = {key_of(item.name) for item in fields(RunConfig)} - {"privacy"}
    known |= {f"privacy.{key_of(item.name)}" for item in fields(Privacy)}
    assert {key for key in default_config(ROOT) if "." not in key or key.startswith("privacy.")} == known


def test_the_defaults_of_every_method_are_valid_and_belong_to_a_method() -> None:
    values = default_config(ROOT)
    read: set[str] = set()
    for method in METHODS:
        _, _, parameters = read_config(values | {"method": method})
        read |= {f"{method}.{key_of(item.name)}" for item in fields(parameters)} if parameters else set()
    assert {key for key in values if "." in key and not key.startswith("privacy.")} == read


@pytest.mark.parametrize(
    ("method", "before", "now", "line"),
    [
        (
            "fedprox",
            "fedprox.mu",
            "",
            "fedprox.mu is missing from the run config: it has no default; add one to [tool.flwr.app.config.fedprox] "
            "in pyproject.toml",
        ),
        (
            "fedprox",
            "fedprox.mu",
            "fedprox.muu",
            "fedprox.muu is not a key of the Parameters of fedprox (did you mean 'fedprox.mu'?)",
        ),
        ("fedavg", "", "fedavg.mu", "fedavg.mu is not a key of the Parameters of fedavg; see docs/methods.md"),
        (
            "fedavg",
            "rounds",
            "",
            "rounds is missing from the run config: it has no default; add one to [tool.flwr.app.config] in "
            "pyproject.toml",
        ),
    ],
)
def test_a_table_of_defaults_that_is_not_that_of_the_method(method: str, before: str, now: str, line: str) -> None:
    values = default_config(ROOT) | {"method": method}
    values.pop(before, None)
    with pytest.raises(ConfigError) as error:
        read_config(values | ({now: 1.0} if now else {}))
    assert str(error.value) == line


def test_what_may_be_infinite(tmp_path: Path) -> None:
    for method, key in (("criticalfl", "delta"), ("ua-pdfl", "th")):
        values = run_config(tmp_path, method=method) | {f"{method}.{key}": inf}
        assert getattr(read_config(values)[2], key) == inf


def test_a_whole_number_stands_for_a_float(tmp_path: Path) -> None:
    config, _, _ = read_config(run_config(tmp_path, alpha=1))
    assert config.alpha == 1.0
    assert type(config.alpha) is float


def test_run_config_is_read_as_flower_reads_it(tmp_path: Path) -> None:
    assert parse_run_config("""method="fedper" alpha=0.5 download=true pfakd.beta=2 data-dir='/a b'""") == {
        "method": "fedper",
        "alpha": 0.5,
        "download": True,
        "pfakd.beta": 2,
        "data-dir": "/a b",
    }
    file = tmp_path / "run.toml"
    file.write_text('method = "fedper"\n[pfakd]\nbeta = 3.0\n')
    assert parse_run_config(str(file)) == {"method": "fedper", "pfakd.beta": 3.0}
    with pytest.raises(ConfigError, match=f"run config {file}: a TOML file must be the only --run-config"):
        parse_run_configs([str(file), "seed=1"])
    assert run_config_text([str(file)]) == str(file)
    texts = ['seed=1 method="fedper"', "pfakd.beta=2 seed=3", "data-dir='/a b'"]
    assert run_config_text(texts) == """seed=3 method="fedper" pfakd.beta=2 data-dir='/a b'"""
    assert parse_run_config(run_config_text(texts)) == parse_run_configs(texts)
    file.write_text("method = fedper\n")
    with pytest.raises(ConfigError, match=r"run\.toml' cannot be read \(Invalid .*\); it must be a TOML file, "):
        parse_run_config(str(file))
    file.write_bytes('name = "M\xfcller"'.encode("latin-1"))
    for place in (str(file), "~nobody-has-this-name/run.toml"):
        with pytest.raises(ConfigError, match=r"run\.toml: .*; it must be a TOML file in UTF-8"):
            parse_run_config(place)
    arguments = ["app", "--stream", "-c", "seed=1", "gpu", "--federation-config", "x=1", "--run-config=rounds=3"]
    assert split_arguments(arguments) == (
        ["app", "gpu"],
        ["seed=1", "rounds=3"],
        ["app", "--stream", "gpu", "--federation-config", "x=1"],
    )


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("alhpa=1.0", "floret: alhpa is not a key of the run config (did you mean 'alpha'?)"),
        ("pfakd.betta=1.0", "floret: pfakd.betta is not a key of the run config (did you mean 'pfakd.beta'?)"),
        ("method=fedper", "floret: run config 'method=fedper' cannot be read"),
        ("alpha = 0.5", "floret: run config 'alpha = 0.5': 'alpha' is not key=value, without blanks around the '='"),
        ('dataset="mnist" data-dir="/nowhere"', "floret: dataset mnist is not in data-dir = /nowhere: /nowhere/MNIST"),
        ('method="fedcpd"', "floret: fedcpd.distill = true: the extractor of model 'mlp' has no convolutional stage"),
        ("classes-per-client=11", "floret: classes-per-client = 11: must be at most 10, the number of classes of dig"),
        ("seed=1 rounds=2 seed=1", "floret: run config 'seed=1 rounds=2 seed=1': seed is there twice; give it once"),
        ("min-clients=6", "floret: min-clients = 6: must be at most 5, the number of clients"),
    ],
)
def test_floret_run_tells_a_mistake_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], argument: str, line: str
) -> None:
    # Where Flower's folder cannot be: had the check passed, it could not start anything.
    (tmp_path / "flwr").touch()
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    arguments = ["run", str(ROOT), "--run-config", argument, "--federation-config", "num-supernodes=5"]
    monkeypatch.setattr(sys, "argv", ["floret", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert said.startswith(line)
    assert said.count("\n") == 1


def every_command(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        yield from every_command(command) if isinstance(command, click.Group) else (command,)


@pytest.mark.parametrize("command", every_command(floret), ids=lambda command: str(command.name))
def test_no_path_may_be_empty(command: click.Command) -> None:
    paths = [param for param in command.params if isinstance(param.type, click.Path)]
    named = {"app", "data_dir", "directory", "file", "files", "folder", "output", "output_dir", "runs", "state_dir"}
    assert named & {str(param.name) for param in command.params} <= {str(param.name) for param in paths}
    for param in paths:
        with pytest.raises(click.BadParameter) as error:
            param.type_cast_value(click.Context(command), [""] if param.multiple or param.nargs < 0 else "")
        assert "is empty; name a path" in error.value.format_message()
        assert error.value.param is param


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["sweep", str(ROOT), "--grid", "seed=[0]", "-o", ""], "Invalid value for '--output' / '-o': is empty; name"),
        (["watch", ""], "Invalid value for '[RUN]...': is empty; name a path, such as . for the working directory"),
        (["run", "", "-c", "rounds=1"], "an argument is empty; name the app's folder, such as . for the working direc"),
        (["run", "--engine", "local", ""], "an argument is empty; name the app's folder, such as . for the working"),
        (
            ["reproduce", str(ROOT / "experiments/pfakd-table1.yaml"), "--app", str(ROOT), "--no-run", "--data", ""],
            "--data '': names no path; it must be like ~/data or mnist=~/data",
        ),
        (
            ["verify", "FILE", "--app", str(ROOT), "--data", "mnist="],
            "--data 'mnist=': names no path; it must be like ~/data or mnist=~/data",
        ),
    ],
)
def test_an_empty_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["floret", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert said.startswith(f"floret: {line}")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["fit", "experiments/pfakd-table1.yaml", "--no-run", "--grid", "lr=[0.1]"],
            "FILE/y is not a folder; name one",
        ),
        (["reproduce", "experiments/pfakd-table1.yaml", "--no-run"], "FILE/y is not a folder; name one"),
        (["sweep", "--grid", "seed=[0]"], "Not a directory; name a place that is there and that you may write to"),
        (
            ["reproduce", "experiments/pfakd-table1.yaml", "--scale", "nan"],
            "'--scale': nan is not in the range 0<x<=1.",
        ),
        (["run", "-c", "FILE.toml", "-c", "seed=1"], "a TOML file must be the only --run-config"),
        (["run", "-c", "alhpa=1", "--run-config"], "--run-config: its value is missing, such as 'rounds=10'"),
        (["run", "-c", "alhpa=1", "-c"], "-c: its value is missing, such as 'rounds=10'"),
        (["run", "--engine", "local", "-c", "alhpa=1", "-c"], "-c: its value is missing, such as 'rounds=10'"),
        (
            ["run", "-c", "alhpa=1", "--federation-config"],
            "--federation-config: its value is missing, such as 'num-supernodes=10'",
        ),
    ],
)
def test_an_output_or_an_option_that_is_wrong_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    file = tmp_path / "FILE"
    file.write_text("kept")
    (tmp_path / "FILE.toml").write_text("rounds = 1")
    monkeypatch.chdir(ROOT)
    arguments = [text.replace("FILE", str(file)) for text in arguments]
    place = [] if arguments[0] == "run" else ["--output", str(file / "y")]
    monkeypatch.setattr(sys, "argv", ["floret", *arguments, *place])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert said.startswith("floret: ")
    assert line.replace("FILE", str(file)) in said
    assert said.count("\n") == 1
    assert file.read_text() == "kept"


def test_the_folder_that_keeps_files_is_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, home in (
        (None, Path.home() / ".floret"),
        ("", Path.home() / ".floret"),
        ("~/kept", Path.home() / "kept"),
    ):
        if said is None:
            monkeypatch.delenv("FLORET_HOME", raising=False)
        else:
            monkeypatch.setenv("FLORET_HOME", said)
        assert floret_home() == home
    monkeypatch.setenv("FLORET_HOME", "kept")
    with pytest.raises(FloretError, match=r"^FLORET_HOME = 'kept': must be an absolute path$"):
        floret_home()


def test_a_place_of_another_users_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["floret", "state", "list", "--state-dir", str(tmp_path)])
    with forbidden(tmp_path), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    line = f"floret: {tmp_path}: Permission denied; do this as the user who owns it, or name another place\n"
    assert capfd.readouterr().err == line


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], True),
        (["--format", "default"], True),
        (["--format=json", "--format", "default"], True),
        (["--format=json"], False),
        (["--format", "json"], False),
    ],
)
def test_with_its_log_a_run_says_whether_it_failed_unless_it_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], told: bool
) -> None:
    from click.testing import CliRunner

    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text('[superlink.far]\naddress = "superlink.example.org:9093"\n')
    started: list[list[str]] = []
    for name in ("execv", "execvp"):
        monkeypatch.setattr(f"os.{name}", lambda _, command: started.append(command))
    CliRunner().invoke(floret, ["run", str(ROOT), "far", "--stream", *options], catch_exceptions=False)
    command = ["flwr", "run", str(ROOT), "far", "--stream", *options]
    assert started[0] == ([sys.executable, "-P", stream.__file__, "far", *command] if told else command)


def test_the_clients_of_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Flower has them: the last option that says it, or the connection; none here for a SuperLink elsewhere."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    rest = ["app", "--federation-config", "num-supernodes=3 client-resources-num-cpus=1", "--stream"]
    assert simulated_clients(values_of("--federation-config", rest)) == 3
    other = "--federation-config=num_supernodes=4"
    assert simulated_clients(values_of("--federation-config", [*rest, other])) == 4
    assert simulated_clients(values_of("--federation-config", [other, *rest])) == 3
    for text in ("num-supernodes=0", "num-supernodes=many", "num-supernodes=2.5"):
        with pytest.raises(ConfigError, match=rf"--federation-config {text}: must be a whole number, at least 1"):
            simulated_clients([text])
    for text in ("num-supernodes = 3", "num-supernodes: 3", "nonsense"):
        with pytest.raises(ConfigError, match=rf"--federation-config '{text}': '[a-z-]*:?' is not key=value, without"):
            simulated_clients(["client-resources-num-cpus=1", text])
    for text, wrong in (
        ("num-supernode=3", r"num-supernode: Flower's simulation knows .* \(did you mean 'num-supernodes'\?\)"),
        ("client-resources-num-cpus=0", "client-resources-num-cpus=0: must be a whole number, at least 1"),
        ("client-resources-num-gpus=some", "client-resources-num-gpus=some: must be a number, at least 0"),
    ):
        with pytest.raises(ConfigError, match=f"--federation-config {wrong}"):
            simulated_clients([text])
    with pytest.raises(ConfigError, match=r"client-resources-num-cpus=99999: there are \d+$"):
        simulated_clients(["num-supernodes=3 client-resources-num-cpus=99999"])
    with pytest.raises(ConfigError, match=r"client-resources-num-cpus=4: there are 3$"):
        simulated_clients(["client-resources-num-cpus=4 init-args-num-cpus=3"])
    assert simulated_clients(["num-supernodes=3 client-resources-num-cpus=4 init-args-num-cpus=4"]) == 3
    with monkeypatch.context() as cluster:
        cluster.setenv("RAY_ADDRESS", "127.0.0.1:1")
        assert simulated_clients(["num-supernodes=3 client-resources-num-cpus=99999"]) == 3
    assert simulated_clients(['num-supernodes=3 client-resources-num-gpus=0.5 verbose=true backend="ray"']) == 3
    (tmp_path / "clients.toml").write_text("num-supernodes = 6")
    assert simulated_clients([str(tmp_path / "clients.toml")]) == 6
    with pytest.raises(
        ConfigError, match=f"^SuperLink connection 'clinic': there is no {tmp_path / 'config.toml'} that"
    ):
        check_connection("clinic")
    (tmp_path / "config.toml").write_text(
        '[superlink]\ndefault = "own"\n[superlink.own]\naddress = ":local:"\noptions.num-supernodes = 7\n'
        '[superlink.far]\naddress = "superlink.example.org:9093"\n'
        f'[superlink.closed]\naddress = "127.0.0.1:{free_port()}"\ninsecure = true\n'
    )
    assert simulated_clients([]) == simulated_clients([], "own") == 7
    for name in ("far", "closed", "unknown"):
        # How many CPUs there are elsewhere is not known.
        assert simulated_clients(["num-supernodes=3 client-resources-num-cpus=99999"], name) is None
    for name in ("", "own", "far"):
        check_connection(name)
    with pytest.raises(ConfigError) as wrong_name:
        check_connection("fra")
    file = tmp_path / "config.toml"
    line = f"SuperLink connection 'fra': must be one of own, far, closed (did you mean 'far'?), those in {file}"
    assert str(wrong_name.value) == line


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"a: !!python/object/apply:os.mkdir [sprung]", "is not YAML (could not determine a constructor for the tag"),
        (b"a: \xff\xfe", "is not YAML ('utf-8' codec can't decode"),
        (b"a: [1, 2", "is not YAML (while parsing a flow sequence"),
        (b"[" * 10_000, "is nested too deeply"),
        (b"a: 1\nb: [!!int x]", "line 2: 'x' is no int; write another value, or a text in quotes"),
        (b"a: !!int ''", "line 1: '' is no int; write another value, or a text in quotes"),
        (b"a: !!bool x", "line 1: 'x' is no bool; write another value, or a text in quotes"),
        (b"a: !!timestamp x", "line 1: 'x' is no timestamp; write another value, or a text in quotes"),
        (
            b"a: !!timestamp 2024-02-30",
            "line 1: '2024-02-30' is no timestamp; write another value, or a text in quotes",
        ),
        (b"a: " + b"9" * 5000, "line 1: '" + "9" * 39 + "…' is no int; write another value"),
    ],
)
def test_a_yaml_file_makes_no_objects_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_yaml(tmp_path / "a.yaml", "policy a")
    assert str(error.value).startswith(f"policy a: {wrong}")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("text", ["a: &x [1]\nb: *x\n", "a: &x {b: 1}\nc:\n  <<: *x\n"])
def test_an_alias_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    line = 2 if "<<" not in text else 3
    with pytest.raises(ConfigError, match=rf"^policy a: line {line}: \*x is an alias; write the value itself$"):
        read_yaml(path, "policy a")


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    for content, line in (
        ("max-epsilon: 2\nmin-samples: 100\nmax-epsilon: 0\n", "line 3: max-epsilon is there twice, first in line 1"),
        ("a: {b: 1,\n  'b': 1}\n", "line 2: b is there twice, first in line 1"),
        ("rows:\n- {a: 1}\n- {a: 1, c: 2, a: 3}\n", "line 3: a is there twice, first in line 3"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError) as error:
            read_yaml(path, "policy a")
        assert str(error.value) == f"policy a: {line}; write it once"
    # What a table takes from another one, it may say otherwise.
    path.write_text("x:\n  y: {<<: {b: 0}, b: 1, c: 1}\n")
    assert read_yaml(path, "a") == {"x": {"y": {"b": 1, "c": 1}}}


def test_numbers_of_a_yaml_file_are_the_decimal_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    numbers = {"0": 0, "-7": -7, "+12": 12, "2.5": 2.5, "1.": 1.0, "-.5": -0.5, "05.5": 5.5, "1e-5": 1e-5, "2E3": 2e3}
    numbers |= {"1.5e+2": 150.0, ".5e1": 5.0, ".inf": inf, "-.inf": -inf}
    for text, number in numbers.items():
        path.write_text(f"[{text}]")
        (read,) = read_yaml(path, "a")
        assert (read, type(read)) == (number, type(number))
    path.write_text("[.nan, true, null]")
    assert str(read_yaml(path, "a")) == "[nan, True, None]"
    for text in (
        "010",
        "-010",
        "1:30",
        "1:30.5",
        "1_000",
        "1_0.5",
        "0x10",
        "0b1",
        "1e",
        ".",
        "2024-02-30",
        "2024-02-28",
    ):
        path.write_text(f"[{text}]")
        assert read_yaml(path, "a") == [text]


def test_a_number_of_many_digits_is_one_line(tmp_path: Path) -> None:
    line = "alpha: has a number of more than 308 digits; write one that is below 1e308"
    for number in (10**400, -(10**400), 10**5000):
        with pytest.raises(ConfigError, match=f"^{line}$"):
            read_config(run_config(tmp_path, alpha=number))
    with pytest.raises(ConfigError, match=r"^run config 'alpha=9+' cannot be read \([^\n]*\); it must be like [^\n]*$"):
        parse_run_config("alpha=" + "9" * 5000)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("lr=0.1 method=fedper", 'method: a text has double quotes, method="fedper"'),
        ("data-dir=~/my-data/a.npz", 'data-dir: a text has double quotes, data-dir="~/my-data/a.npz"'),
        ("download=True", "download: True has small letters here, true"),
        ("lr=0,1", "lr: 0,1 is no number that can be read, nor true, false or a text in quotes"),
        ("lr=0.1 x'y=1", '"x\'y" is not the name of a key'),
        ("a.b=1 a=2", "Cannot overwrite a value"),
    ],
)
def test_the_pair_that_cannot_be_read_is_named(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_run_config(text)
    assert str(refused.value).startswith(f"run config {text!r} cannot be read ({wrong}")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("delta=0.1", "(did you mean 'privacy.delta' or 'criticalfl.delta' or 'per-fedavg.delta'?)"),
        ('method="criticalfl" delta=0.1', "(did you mean 'criticalfl.delta'?)"),
        ('method="fedper" roundz=3', "(did you mean 'rounds'?)"),
    ],
)
def test_a_key_without_its_methods_name_is_found(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        merged(own_config(), parse_run_config(text))
    assert str(refused.value).endswith(f" is not a key of the run config {hint}")


def test_a_grid_is_every_combination_of_its_values() -> None:
    cells = combinations(["alpha=[0.1, 1]", 'method=["fedper", "pfakd"]'])
    assert cells == [
        {"alpha": 0.1, "method": "fedper"},
        {"alpha": 0.1, "method": "pfakd"},
        {"alpha": 1, "method": "fedper"},
        {"alpha": 1, "method": "pfakd"},
    ]
    for text in ("alpha", "alpha=0.1", "alpha=[]", "method=[fedper]"):
        with pytest.raises(ConfigError, match="must be like"):
            combinations([text])
    for texts, wrong in (
        (["seed=[0, 0]"], r"--grid 'seed=\[0, 0\]': seed has the value 0 twice; write each value once"),
        (["alpha=[0.5, 1, 1.0]"], r"alpha has the value 1\.0 twice"),
        (["alpha=[0.5]", "alpha = [1.0]"], r"--grid 'alpha = \[1\.0\]': alpha is in another --grid, too; write all"),
        (["alpha=[0.5]", "rounds=[2]"], r"--grid 'rounds=\[2\]': rounds is among the keys of every run \(-c\), too; "),
    ):
        with pytest.raises(ConfigError, match=wrong):
            combinations(texts, {"lr": 0.1, "rounds": 3})


def test_rows_of_a_sweep_are_ordered_by_validation() -> None:
    summary = {"test": 0.6, "std": 0.1, "worst_decile": 0.4, "before": None, "up": 2e6, "down": 3e6}
    runs: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
        ({"alpha": alpha, "seed": seed}, summary | {"validation": validation})
        for (alpha, seed), validation in zip(product((0.1, 1.0), (0, 1)), (0.5, 0.7, 0.8, 0.9), strict=True)
    ]
    found = rows([*runs, ({"alpha": 5.0, "seed": 0}, None)], ["alpha", "seed"])
    assert markdown(["alpha"], [table_row(shown, summaries) for shown, summaries in found]).splitlines()[2:] == [
        "| 1.0 | 2 | 85.0 ± 5.0 | 60.0 ± 0.0 | - | 10.0 ± 0.0 | 40.0 ± 0.0 | 2.0 | 3.0 |",
        "| 0.1 | 2 | 60.0 ± 10.0 | 60.0 ± 0.0 | - | 10.0 ± 0.0 | 40.0 ± 0.0 | 2.0 | 3.0 |",
        "| 5.0 | 0 | - | - | - | - | - | - | - |",
    ]


@pytest.mark.parametrize(
    "text", ["/data/a b", "/d/\N{GRINNING FACE}", "/d/ü", "/d/a'b", "/d/a\\b", "/d/#x=[a], b", "/d/\x7f"]
)
def test_texts_come_to_flower_as_they_are(text: str) -> None:
    """As ``flwr run`` and Flower's SuperNode read them."""
    keys = {"data-dir": text, "rounds": 3, "lr": 1e-3, "download": True}
    assert parse_config_args([as_pairs(keys)]) == keys
    assert parse_run_config(as_pairs(keys)) == keys


@pytest.mark.parametrize("validation", [[0.5, 0.7], []])
def test_the_page_of_a_sweep_with_and_without_a_validation_split(tmp_path: Path, validation: list[float]) -> None:
    points = [("lr=0.1", validation, [0.6, 0.8]), ("lr=0.01", validation, [0.5])]
    table = [["0.1", "70.0"], ["0.01", "50.0"]]
    write_sweep_page(["lr"], "rounds=1", ["lr", "test after"], table, ["lr=1 <b>"], points, tmp_path / "p")
    page = (tmp_path / "p").read_text()
    assert "lr=1 &lt;b&gt;" in page
    assert "<td>70.0</td>" in page
    assert "Accuracy of each combination" in page
    assert ("The validation split decides" in page) == bool(validation)
    assert ("the order is that of the grid" in page) == (not validation)
