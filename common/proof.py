"""Proof that a client's name is said by the node that has a key: a signature under its answer to ``describe``.

The ServerApp cannot see which key a node has. Flower binds a node's id to its key, but gives a ServerApp nothing but
the ids of those that are connected; an id is drawn when a key is registered, so without registered keys each start of a
node has another one, and with them a SuperLink that lost its database gives the same key another one. So a node with a
key signs the question's id, which is that of one message to one node, and the name. A signature for Flower is of a time
alone, so neither can be taken for the other.
"""

import base64
import hashlib
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord

from common.errors import FloretError

# The record of an answer that has the proof.
PROOF = "proof"
# Bytes of a public key of the largest NIST curve, and of a signature with it, with room.
_LONGEST = 1024
_ALGORITHM = ec.ECDSA(hashes.SHA256())


def load_key(path: Path, *, option: str = "--key ") -> ec.EllipticCurvePrivateKey:
    """Return a node's private key.

    Args:
        path: of its file.
        option: what stands before it in a message.

    Raises:
        FloretError: it cannot be read, or is none.
    """
    wrong = FloretError(
        f"{option}{path}: is not a node's private key, as floret certificates makes it (OpenSSH, NIST curve)"
    )
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise FloretError(f"{option}{path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise wrong from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise wrong
    return key


def sign(key: ec.EllipticCurvePrivateKey, message_id: str, node: int, name: str) -> ConfigRecord:
    """Return the proof that the node with ``key`` answers the message ``message_id`` to ``node`` as client ``name``."""
    public = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return ConfigRecord({"key": public, "signature": key.sign(_text(message_id, node, name), _ALGORITHM)})


def check(proof: ConfigRecord, message_id: str, node: int, name: str) -> str:
    """Return the fingerprint of the key that signed, as ``ssh-keygen -l`` prints it for the ``.pub`` file.

    Raises:
        FloretError: it is not a signature of a key under this answer.
    """
    key, signature = proof.get("key"), proof.get("signature")
    wrong = FloretError("the proof of its node key is none, or is that of another answer")
    if not isinstance(key, bytes) or not isinstance(signature, bytes) or max(len(key), len(signature)) > _LONGEST:
        raise wrong
    try:
        public = serialization.load_der_public_key(key)
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise wrong
        public.verify(signature, _text(message_id, node, name), _ALGORITHM)
        line = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    except (InvalidSignature, UnsupportedAlgorithm, TypeError, ValueError) as error:
        raise wrong from error
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def _text(message_id: str, node: int, name: str) -> bytes:
    return f"floret describe\n{message_id}\n{node}\n{name}".encode()
