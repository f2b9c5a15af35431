"""Make certificates for a server of a test, and the certificate of the authority that signed them."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path


def make_certificates(directory: Path, *, host: str = "127.0.0.1", expired: bool = False) -> Path:
    """Make "authority.pem", which a client has to trust, and beside it "server.pem", the key and the certificate of an
    IP address; return the path of the first. They are valid for a day, or were until yesterday.

    Raises RuntimeError if the package `cryptography` is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise RuntimeError("A server with TLS needs a certificate: pip install cryptography") from error

    now, day = datetime.now(UTC), timedelta(days=1)
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def made(name: str, own: ec.EllipticCurvePrivateKey, *, ends: datetime) -> x509.Certificate:
        subject, issuer = (
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, "ckptstore tests")
        )
        return (
            x509.CertificateBuilder(issuer, subject, own.public_key(), x509.random_serial_number())
            .not_valid_before(now - 3 * day)
            .not_valid_after(ends)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))]), critical=False)
            .add_extension(x509.BasicConstraints(ca=own is authority_key, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .sign(authority_key, hashes.SHA256())
        )

    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = directory / "authority.pem"
    path.write_bytes(made("ckptstore tests", authority_key, ends=now + day).public_bytes(pem))
    ends = now - day if expired else now + day
    server = path.with_name("server.pem")
    server.touch(0o600)
    server.write_bytes(made(host, key, ends=ends).public_bytes(pem) + private)
    return path


def serving(authority: Path) -> ssl.SSLContext:
    """Return the context of a server that presents the certificate beside the one of its authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(authority.with_name("server.pem"))
    return context
