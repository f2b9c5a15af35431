"""A server of plain HTTP as one of https, with a certificate that nobody trusts yet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def make_certificates(directory: Path) -> Path:
    """Make the certificate of an authority, and beside it "server.pem", a key and a certificate of 127.0.0.1."""
    path = directory / "authority.pem"
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _certificate("ckptstore tests", authority_key, "ckptstore tests", authority_key)
    made = _certificate("127.0.0.1", key, "ckptstore tests", authority_key)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(authority.public_bytes(pem))
    path.with_name("server.pem").write_bytes(made.public_bytes(pem) + private)
    return path


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, signer: str, signer_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    subject, issuer = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, signer))
    now, is_authority = datetime.now(UTC), key is signer_key
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key()), critical=False)
        .sign(signer_key, hashes.SHA256())
    )


FORWARD = """
import asyncio, contextlib, ssl, sys

async def copy(source, target):
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 18):
            target.write(data)
            await target.drain()
    target.close()

async def serve(reader, writer):
    below = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    await asyncio.gather(copy(reader, below[1]), copy(below[0], writer))

async def main():
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(sys.argv[1])
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@contextmanager
def behind_tls(certificate: Path, endpoint_url: str) -> Iterator[str]:
    """A server of plain HTTP, as https: trusted by whoever trusts the `certificate`."""
    command = [sys.executable, "-c", FORWARD, str(certificate.with_name("server.pem")), endpoint_url.rpartition(":")[2]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"https://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()
