"""``floret certificates``: a CA, the SuperLink's certificate, and a key pair for each node."""

import ipaddress
import os
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cli.paths import NamedPath
from cli.ranges import WholeRange
from common.durable import write_whole
from common.errors import FloretError, one_line

CA_DAYS = 3650
# So that a machine whose clock is slow accepts a certificate that was just issued.
_CLOCK_SKEW = timedelta(hours=1)
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DNS_NAME = re.compile(r"(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")


@click.command()
@click.argument("directory", metavar="DIR", type=NamedPath(file_okay=False))
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME_OR_IP", help="What nodes call the SuperLink by; repeatable."
)
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="Make a key pair for this node; repeatable.")
@click.option("--days", default=825, show_default=True, type=WholeRange(1, 36500), help="Validity of the SuperLink's.")
@click.option("--renew", is_flag=True, help="Issue the SuperLink's certificate anew, for the same hosts.")
def certificates(directory: Path, hosts: tuple[str, ...], nodes: tuple[str, ...], days: int, renew: bool) -> None:
    """Make what a federation with TLS and node authentication needs, in DIR.

    A CA, a certificate for the SuperLink that is valid for every --host, localhost and 127.0.0.1, and a key pair for
    each --node. No key is ever overwritten: run it again to add a node or a host.
    """
    for name in nodes:
        if not _NODE_NAME.fullmatch(name) or name.endswith(".pub"):
            raise FloretError(f"--node {name!r}: must be letters, digits, '.', '_' and '-', and not end in .pub")
    names = [general_name(host) for host in hosts]
    try:
        done = [*_issue(directory, names, days, renew), *(_node(directory / "nodes", name) for name in nodes)]
    except OSError as error:
        raise FloretError(f"{error.filename or directory}: {error.strerror}") from error
    click.echo("\n".join(done) + "\n\n" + _next_steps(directory, nodes))


def general_name(host: str) -> x509.GeneralName:
    """Return a host as it stands in a certificate: an IP address, or a DNS name.

    Raises:
        FloretError: it is neither.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if len(host) > 253 or not _DNS_NAME.fullmatch(host) or re.fullmatch(r"[0-9.]+", host):
        raise FloretError(f"--host {host!r}: is neither an IP address nor a host name (without port or https://)")
    return x509.DNSName(host)


def _issue(directory: Path, names: Sequence[x509.GeneralName], days: int, renew: bool) -> list[str]:
    """Make the CA if it is missing, and the SuperLink's certificate if it is or lacks a host; return what was done."""
    done = []
    ca, server = directory / "ca", directory / "superlink"
    if not _crt(ca).exists() and not _crt(server).exists() and not names:
        raise FloretError(f"{directory} has no certificates yet: name the SuperLink's host with --host NAME_OR_IP")
    _make_folder(directory)
    if not _crt(ca).exists() and not _key(ca).exists():
        if _crt(server).exists():
            raise FloretError(
                f"{_crt(ca)}: is not there, and {_crt(server)} was issued by it; put it back, or remove {_crt(server)} "
                f"and {_key(server)} to begin anew with another CA"
            )
        key = _new_key(_key(ca))
        write_whole(_crt(ca), _pem(_ca_certificate(key, max(days, CA_DAYS))))
        done.append(f"made {_crt(ca)} and {_key(ca)}: a new CA")
    ca_certificate = _load_certificate(_crt(ca))
    wanted = [*names, general_name("localhost"), general_name("127.0.0.1")]
    if _crt(server).exists():
        old = _load_certificate(_crt(server))
        listed = _hosts(old)
        missing = [name for name in names if name not in listed]
        if not missing and not renew:
            return [*done, f"kept {_crt(server)}: {_summary(old)}"]
        wanted = [*listed, *missing]
        reason = f"now also for {', '.join(str(name.value) for name in missing)}" if missing else "renewed"
    else:
        reason = ""
    ca_key = _load_key(_key(ca), f"is needed to issue {_crt(server)}")
    if ca_key.public_key() != ca_certificate.public_key():
        raise FloretError(f"{_key(ca)} is not the key of {_crt(ca)}; put back the one that belongs to it")
    if ca_certificate.not_valid_after_utc <= datetime.now(UTC):
        raise FloretError(
            f"{_crt(ca)}: has expired, so nothing can be issued by it; remove {_crt(ca)}, {_key(ca)}, {_crt(server)} "
            f"and {_key(server)} to begin anew, and copy the new ca.crt to the SuperLink and all nodes"
        )
    new_key = not _key(server).exists()
    key = _new_key(_key(server)) if new_key else _load_key(_key(server), "")
    unique = list(dict.fromkeys(wanted))
    certificate = _server_certificate(key, ca_key, ca_certificate, unique, days)
    write_whole(_crt(server), _pem(certificate))
    what = f"issued {_crt(server)} anew with the same key, {reason}" if reason else f"made {_crt(server)}"
    done.append(f"{what}{f' and {_key(server)}' if new_key else ''}: {_summary(certificate)}")
    if reason:
        done.append("copy it to the SuperLink and start that again; CA and node keys are as they were")
    return done


def _node(folder: Path, name: str) -> str:
    """Make the key pair of a node unless it has one; return what was done."""
    from common.proof import load_key

    _make_folder(folder)
    private, public = folder / name, folder / f"{name}.pub"
    if public.exists():
        return f"kept {public}: the key of {name} was made before"
    existed = private.exists()
    if existed:
        key = load_key(private, option="")
    else:
        key = ec.generate_private_key(ec.SECP384R1())
        _write_private(
            private,
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
            ),
        )
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_whole(public, line + f" {name}\n".encode())
    return f"made {public} from {private}" if existed else f"made {private} and {public}"


def _next_steps(directory: Path, nodes: Sequence[str]) -> str:
    name = nodes[0] if nodes else "NAME"
    registered = shlex.quote(str(directory / "nodes" / f"{name}.pub"))
    return (
        f"On the SuperLink's machine: ca.crt, superlink.crt, superlink.key\n"
        f"    flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile superlink.crt --ssl-keyfile superlink.key "
        f"--enable-supernode-auth --database superlink.db --control-api-address 127.0.0.1:9093 "
        f"--serverappio-api-address 127.0.0.1:9091\n"
        f"    Whoever reaches 9093 or 9091 starts runs on all nodes and runs code here: both stay on 127.0.0.1\n"
        f"On each node: ca.crt and its own key, nobody else's\n"
        f"    floret node --superlink HOST:9092 --root-certificates ca.crt --key {name} --client-name {name} ...\n"
        f"Where you use flwr, on the SuperLink's machine or with 'ssh -N -L 9093:127.0.0.1:9093 HOST': ca.crt, and in "
        f"config.toml of FLWR_HOME (~/.flwr)\n"
        f'    [superlink.my-federation]\n    address = "127.0.0.1:9093"\n'
        f'    root-certificates = "/absolute/path/ca.crt"\n'
        f"Register each node once, when the SuperLink runs:\n"
        f"    flwr supernode register {registered} my-federation\n"
        f"{directory / 'ca.key'} signs for the whole federation: keep it here or offline, copy it nowhere."
    )


def _ca_certificate(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Floret federation CA")])
    return (
        _builder(name, name, key.public_key(), datetime.now(UTC) + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True), critical=True)
        .sign(key, hashes.SHA384())
    )


def _server_certificate(
    key: ec.EllipticCurvePrivateKey,
    ca_key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    names: Sequence[x509.GeneralName],
    days: int,
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Floret SuperLink")])
    until = min(datetime.now(UTC) + timedelta(days=days), ca.not_valid_after_utc)
    return (
        _builder(name, ca.subject, key.public_key(), until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(key_cert_sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _CLOCK_SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _key_usage(*, key_cert_sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not key_cert_sign,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _hosts(certificate: x509.Certificate) -> list[x509.GeneralName]:
    try:
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def _summary(certificate: x509.Certificate) -> str:
    hosts = ", ".join(str(name.value) for name in _hosts(certificate))
    until = certificate.not_valid_after_utc
    return f"for {hosts}, {'EXPIRED' if until < datetime.now(UTC) else 'valid until'} {until:%Y-%m-%d}"


def _key(stem: Path) -> Path:
    return stem.with_name(stem.name + ".key")


def _crt(stem: Path) -> Path:
    return stem.with_name(stem.name + ".crt")


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _new_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP384R1())
    plain = serialization.NoEncryption()
    _write_private(path, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return key


def _load_key(path: Path, why: str) -> ec.EllipticCurvePrivateKey:
    if not path.exists():
        raise FloretError(f"{path}: is not there, and {why}")
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise FloretError(f"{path}: is not a private key without a password ({one_line(error)})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FloretError(f"{path}: is not the kind of key that this command makes (elliptic curve)")
    return key


def _load_certificate(path: Path) -> x509.Certificate:
    if not path.exists():
        raise FloretError(f"{path}: is not there but its key is; put it back, or remove both to begin anew")
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise FloretError(f"{path}: is not a certificate ({one_line(error)})") from error


def _make_folder(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def _write_private(path: Path, content: bytes) -> None:
    """Create a file that only its owner can read, whole or not at all; it must not exist."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
