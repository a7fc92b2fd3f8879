"""``floret certificates``: its files work with real TLS, a real SuperLink and real nodes."""

import errno
import ipaddress
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from cli.main import floret
from common.errors import FloretError
from tests.conftest import BIN, PATIENCE, free_port, wait_for_port
from tests.harness import ROOT


def make(folder: Path, *arguments: str) -> None:
    floret.main(["certificates", str(folder), *arguments], standalone_mode=False)


def told(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    """Run the command and return what it says."""
    capsys.readouterr()
    make(folder, *arguments)
    return capsys.readouterr().out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}


def shake_hands(server: Path, ca: Path, host: str) -> None:
    """Do a TLS handshake with the SuperLink's certificate; the client trusts ``ca`` alone and calls ``host``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / "superlink.crt", server / "superlink.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.create_default_context(cafile=str(ca))
    sides = [
        trusting.wrap_bio(to_client, to_server, server_hostname=host),
        context.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(10):
        for side in tuple(sides):
            try:
                side.do_handshake()
                sides.remove(side)
            except ssl.SSLWantReadError:
                pass
    assert not sides


def expire(folder: Path, name: str) -> None:
    """Let a certificate end the day before it began, signed by the same CA."""
    ca_key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    file = folder / f"{name}.crt"
    old = x509.load_pem_x509_certificate(file.read_bytes())
    begun, ended = old.not_valid_before_utc - timedelta(days=9), old.not_valid_before_utc - timedelta(days=1)
    builder = x509.CertificateBuilder(
        old.issuer, old.subject, old.public_key(), old.serial_number, begun, ended, list(old.extensions)
    )
    expired = builder.sign(ca_key, old.signature_hash_algorithm)  # type: ignore[arg-type]
    file.write_bytes(expired.public_bytes(serialization.Encoding.PEM))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    make(folder, "--host", "superlink.example.org", "--host", "192.0.2.7", "--node", "north", "--node", "south")
    return folder


@pytest.mark.parametrize("host", ["superlink.example.org", "192.0.2.7", "localhost", "127.0.0.1"])
def test_tls_works_for_every_host(made: Path, host: str) -> None:
    shake_hands(made, made / "ca.crt", host)


@pytest.mark.parametrize("host", ["other.example.org", "192.0.2.8", "example.org"])
def test_another_host_fails(made: Path, host: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
        shake_hands(made, made / "ca.crt", host)


def test_another_ca_fails(made: Path, tmp_path: Path) -> None:
    make(tmp_path / "other", "--host", "superlink.example.org")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"unable to get local issuer|self.signed"):
        shake_hands(made, tmp_path / "other" / "ca.crt", "superlink.example.org")


def test_the_superlinks_certificate_cannot_issue_another(made: Path) -> None:
    ca, server = (x509.load_pem_x509_certificate((made / name).read_bytes()) for name in ("ca.crt", "superlink.crt"))
    server.verify_directly_issued_by(ca)
    constraints = [c.extensions.get_extension_for_class(x509.BasicConstraints) for c in (ca, server)]
    assert [(c.critical, c.value.ca, c.value.path_length) for c in constraints] == [
        (True, True, 0),
        (True, False, None),
    ]
    usages = [c.extensions.get_extension_for_class(x509.KeyUsage).value for c in (ca, server)]
    assert [usage.key_cert_sign for usage in usages] == [True, False]


def test_days_are_the_certificates(tmp_path: Path) -> None:
    make(tmp_path, "--host", "h", "--days", "7")
    ca, server = (x509.load_pem_x509_certificate((tmp_path / n).read_bytes()) for n in ("ca.crt", "superlink.crt"))
    left = server.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=6, hours=23) < left <= timedelta(days=7)
    assert ca.not_valid_after_utc - datetime.now(UTC) > timedelta(days=3000)


def test_only_the_owner_reads_what_is_private(tmp_path: Path) -> None:
    folder, before = tmp_path / "new", os.umask(0)
    try:
        make(folder, "--host", "h", "--node", "n")
    finally:
        os.umask(before)
    found = modes(folder)
    assert {name: found[name] for name in (".", "nodes", "ca.key", "superlink.key", "nodes/n")} == {
        **dict.fromkeys((".", "nodes"), 0o700),
        **dict.fromkeys(("ca.key", "superlink.key", "nodes/n"), 0o600),
    }
    assert sorted(found) == [
        *(".", "ca.crt", "ca.key", "nodes", "nodes/n", "nodes/n.pub", "superlink.crt", "superlink.key")
    ]


def test_node_keys_are_pairs_on_the_curve_that_flower_wants(made: Path) -> None:
    for name in ("north", "south"):
        private = serialization.load_ssh_private_key((made / "nodes" / name).read_bytes(), None)
        public = serialization.load_ssh_public_key((made / "nodes" / f"{name}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == public
    assert (made / "nodes" / "north.pub").read_bytes() != (made / "nodes" / "south.pub").read_bytes()


def test_a_new_node_adds_its_key_alone(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(made)
    said = told(capsys, made, "--host", "192.0.2.7", "--node", "south", "--node", "east")
    after = contents(made)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"nodes/east", "nodes/east.pub"}
    assert "kept" in said
    assert "nodes/south.pub: the key of south was made before" in said


def test_a_key_that_was_moved_to_its_node_is_not_made_again(made: Path) -> None:
    (made / "nodes" / "north").unlink()
    (made / "nodes" / "south.pub").unlink()
    before = contents(made)
    make(made, "--node", "north", "--node", "south")
    after = contents(made)
    assert set(after) - set(before) == {"nodes/south.pub"}
    assert not (made / "nodes" / "north").exists()
    south = serialization.load_ssh_private_key(after["nodes/south"], None)
    assert serialization.load_ssh_public_key(after["nodes/south.pub"]) == south.public_key()


def test_a_new_host_issues_the_superlinks_certificate_anew(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(made)
    said = told(capsys, made, "--host", "new.example.org")
    after = contents(made)
    assert [name for name in before if after[name] != before[name]] == ["superlink.crt"]
    assert "anew with the same key, now also for new.example.org" in said
    for host in ("new.example.org", "superlink.example.org", "192.0.2.7", "127.0.0.1"):
        shake_hands(made, made / "ca.crt", host)


def test_renew_takes_the_same_hosts_and_a_new_date(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, made, "--renew", "--days", "9")
    until = x509.load_pem_x509_certificate((made / "superlink.crt").read_bytes()).not_valid_after_utc
    assert until - datetime.now(UTC) <= timedelta(days=9)
    assert f"valid until {until:%Y-%m-%d}" in said
    shake_hands(made, made / "ca.crt", "superlink.example.org")


def test_an_expired_certificate_is_refused_and_told(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expire(made, "superlink")
    assert "EXPIRED" in told(capsys, made, "--node", "east")
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(made, made / "ca.crt", "localhost")
    make(made, "--renew")
    shake_hands(made, made / "ca.crt", "localhost")


def test_nothing_is_issued_by_a_ca_that_has_expired(made: Path) -> None:
    expire(made, "ca")
    before = contents(made)
    for options in (["--renew"], ["--host", "new.example.org"]):
        with pytest.raises(FloretError, match=r"ca\.crt: has expired, so nothing can be issued by it; remove "):
            make(made, *options)
    assert contents(made) == before
    for name in ("ca.crt", "ca.key", "superlink.crt", "superlink.key"):
        (made / name).unlink()
    make(made, "--host", "localhost")
    shake_hands(made, made / "ca.crt", "localhost")


def test_a_key_of_another_kind_is_no_nodes(made: Path) -> None:
    private = made / "nodes" / "east"
    private.write_bytes(
        ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
    )
    with pytest.raises(FloretError, match=rf"^{private}: is not a node's private key, as floret certificates makes it"):
        make(made, "--node", "east")
    assert not private.with_suffix(".pub").exists()


def test_the_superlinks_certificate_is_valid_no_longer_than_its_ca(made: Path) -> None:
    make(made, "--renew", "--days", "36500")
    ca, issued = (x509.load_pem_x509_certificate((made / f"{name}.crt").read_bytes()) for name in ("ca", "superlink"))
    assert issued.not_valid_after_utc == ca.not_valid_after_utc


@pytest.mark.parametrize("place", ["ca.key", "nodes/east"])
def test_a_full_disk_leaves_no_part_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    if place != "ca.key":
        make(tmp_path, "--host", "h")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(FloretError, match=rf"^{tmp_path / place}: No space left on device$"):
            make(tmp_path, "--host", "h", "--node", "east")
    assert not (tmp_path / place).exists()
    make(tmp_path, "--host", "h", "--node", "east")
    shake_hands(tmp_path, tmp_path / "ca.crt", "h")


def test_nodes_can_be_added_where_the_ca_key_is_not(made: Path) -> None:
    (made / "ca.key").unlink()
    make(made, "--node", "east")
    assert (made / "nodes" / "east").exists()
    with pytest.raises(FloretError, match=r"ca\.key: is not there, and is needed to issue .*superlink\.crt"):
        make(made, "--host", "new.example.org")


@pytest.mark.parametrize("options", [["--node", "east"], ["--host", "new.example.org"], ["--renew"]])
def test_where_the_ca_is_gone_no_other_is_made_beside_what_it_issued(made: Path, options: list[str]) -> None:
    for name in ("ca.crt", "ca.key"):
        (made / name).unlink()
    before = contents(made)
    with pytest.raises(FloretError, match=r"ca\.crt: is not there, and .*superlink\.crt was issued by it; put it back"):
        make(made, *options)
    assert contents(made) == before
    for name in ("superlink.crt", "superlink.key"):
        (made / name).unlink()
    make(made, "--host", "new.example.org")
    shake_hands(made, made / "ca.crt", "new.example.org")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the SuperLink's host with --host NAME_OR_IP"),
        (["--host", "https://superlink"], "neither an IP address nor a host name"),
        (["--host", "superlink:9092"], "neither an IP address nor a host name"),
        (["--host", "192.0.2.300"], "neither an IP address nor a host name"),
        (["--host", "h", "--node", "../ca"], r"--node '\.\./ca': must be letters"),
        (["--host", "h", "--node", "a.pub"], r"not end in \.pub"),
        (["--host", "h", "--node", ""], "--node '': must be letters"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(tmp_path: Path, arguments: Sequence[str], message: str) -> None:
    folder = tmp_path / "none"
    with pytest.raises(FloretError, match=message) as caught:
        make(folder, *arguments)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_is_not_the_certificates_is_found(made: Path, tmp_path: Path) -> None:
    make(tmp_path / "other", "--host", "h")
    (made / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    with pytest.raises(FloretError, match=r"ca\.key is not the key of .*ca\.crt"):
        make(made, "--host", "new.example.org")
    (made / "ca.crt").unlink()
    with pytest.raises(FloretError, match=r"ca\.crt: is not there but its key is"):
        make(made, "--host", "new.example.org")
    (made / "ca.crt").write_text("nothing")
    with pytest.raises(FloretError, match=r"ca\.crt: is not a certificate"):
        make(made, "--host", "new.example.org")


@pytest.mark.parametrize("address", ["::1", "2001:db8::7"])
def test_ipv6(tmp_path: Path, address: str) -> None:
    make(tmp_path, "--host", address)
    shake_hands(tmp_path, tmp_path / "ca.crt", address)
    extensions = x509.load_pem_x509_certificate((tmp_path / "superlink.crt").read_bytes()).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ipaddress.ip_address(address) in names.get_values_for_type(x509.IPAddress)


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink with TLS and node authentication, and what reaches it."""

    folder: Path
    fleet: int
    env: dict[str, str]

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BIN / "flwr", *arguments], env=self.env, capture_output=True, text=True, timeout=PATIENCE, cwd=self.folder
        )

    def nodes(self) -> list[dict[str, Any]]:
        done = self.flwr("supernode", "list", "test", "--format", "json")
        assert done.returncode == 0, done.stdout + done.stderr
        listed: list[dict[str, Any]] = json.loads(done.stdout)["nodes"]
        return listed


@pytest.fixture
def superlink(made: Path, tmp_path: Path) -> Iterator[SuperLink]:
    """A real ``flower-superlink`` with the certificates of ``made``."""
    home = tmp_path / "flwr"
    home.mkdir()
    fleet, control = free_port(), free_port()
    (home / "config.toml").write_text(
        f'[superlink.test]\naddress = "127.0.0.1:{control}"\nroot-certificates = "{made / "ca.crt"}"\n\n'
        f'[superlink.plain]\naddress = "127.0.0.1:{control}"\ninsecure = true\n'
    )
    env = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "NO_COLOR": "1",
    }
    log = tmp_path / "superlink.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                *(BIN / "flower-superlink", "--isolation", "process", "--enable-supernode-auth"),
                *("--ssl-ca-certfile", made / "ca.crt", "--ssl-certfile", made / "superlink.crt"),
                *("--ssl-keyfile", made / "superlink.key", "--fleet-api-address", f"127.0.0.1:{fleet}"),
                *("--control-api-address", f"127.0.0.1:{control}", "--serverappio-api-address", "127.0.0.1:0"),
            ],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
        )
    try:
        wait_for_port(fleet, process, log)
        yield SuperLink(tmp_path, fleet, env)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def supernode(superlink: SuperLink, ca: Path, key: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a real ``flower-supernode``; return it and its log."""
    log = superlink.folder / f"{key.name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, BIN / "flower-supernode", "--superlink", f"localhost:{superlink.fleet}"),
                *("--root-certificates", ca, "--auth-supernode-private-key", key, "--isolation", "process"),
                *("--clientappio-api-address", f"127.0.0.1:{free_port()}", "--max-retries", "1"),
            ],
            env=superlink.env,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return process, log


def test_a_superlink_takes_registered_nodes_only(superlink: SuperLink, made: Path) -> None:
    assert superlink.nodes() == []
    done = superlink.flwr("supernode", "register", str(made / "nodes" / "north.pub"), "test")
    assert done.returncode == 0, done.stdout + done.stderr
    registered = [(node["node-id"], node["status"]) for node in superlink.nodes()]
    assert [status for _, status in registered] == ["registered"]

    north, north_log = supernode(superlink, made / "ca.crt", made / "nodes" / "north")
    south, south_log = supernode(superlink, made / "ca.crt", made / "nodes" / "south")
    try:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and superlink.nodes()[0]["status"] != "online":
            time.sleep(0.2)
        listed = [(node["node-id"], node["status"]) for node in superlink.nodes()]
        assert listed == [(registered[0][0], "online")], north_log.read_text()
        assert south.wait(PATIENCE) != 0
        assert "No SuperNode found with the given public key" in south_log.read_text()
        assert north.poll() is None
    finally:
        for process in (north, south):
            process.terminate()
            process.wait(PATIENCE)


def registered_with(docker: str, folder: Path, key: Path, env: Mapping[str, str]) -> tuple[int, str, str]:
    """Run ``docker/register.sh`` with a ``docker`` that does this; its last argument is what the container would do."""
    (folder / "docker").write_text(f"#!/bin/bash\n{docker}\n")
    (folder / "docker").chmod(0o755)
    done = subprocess.run(
        [ROOT / "docker" / "register.sh", key],
        env={**env, "PATH": f"{folder}{os.pathsep}{env['PATH']}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return done.returncode, done.stdout, done.stderr


def test_an_address_in_use_is_no_key_that_was_registered(made: Path, tmp_path: Path) -> None:
    key = made / "nodes" / "north.pub"
    line = "Error response from daemon: failed to bind host port: address already in use"
    done = registered_with(f"echo '{line}' >&2; exit 1", tmp_path, key, os.environ)
    assert done == (1, "", f"{line}\n{key}: not registered\n")


def test_a_key_that_was_registered_before_is_left_as_it_is(superlink: SuperLink, made: Path) -> None:
    key = made / "nodes" / "north.pub"
    here = f'said="${{!#//compose/test}}"; sh -c "${{said//\\/tmp/{superlink.folder}}}"'
    for said in ("registered", "was registered before"):
        assert registered_with(here, superlink.folder, key, superlink.env) == (0, f"{key}: {said}\n", "")


def test_flwr_without_tls_gets_nothing(superlink: SuperLink) -> None:
    done = superlink.flwr("supernode", "list", "plain")
    assert done.returncode != 0
