"""Throw-away certificates, for measurements and tests: an authority, and one for each region.

EC P-256: a handshake costs well below a millisecond, and a link may make 64 of them at once.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from geotrain.errors import GeotrainError
from geotrain.transport.tls import TlsFiles

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import CertificateBuilder

_SKEW = timedelta(hours=1)
"""Clocks differ."""
_LIFE = timedelta(days=1)


def make_certificates(folder: Path, names: Sequence[str]) -> dict[str, TlsFiles]:
    """Files for each region in an existing folder; they are good for a day.

    Raises:
        GeotrainError: The library that makes certificates is not installed.
    """
    authority = Authority(folder)
    return {name: authority.issue(name) for name in names}


class Authority:
    """Signs certificates; its own key is written nowhere."""

    def __init__(self, folder: Path, *, name: str = "authority", life: timedelta = _LIFE) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise GeotrainError(
                "throw-away certificates need the package cryptography: "
                'pip install "geotrain[tls]"; or measure without TLS (--no-tls)'
            ) from error
        from cryptography import x509

        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._file = folder / f"{name}.pem"
        now = datetime.now(UTC)
        builder = _builder(name, name, self._key, now - _SKEW, now + life).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self._file.write_bytes(_signed(builder, self._key))

    def issue(
        self,
        region: str,
        *,
        file_name: str | None = None,
        begins: datetime | None = None,
        ends: datetime | None = None,
    ) -> TlsFiles:
        """Write a certificate that names `region`, and its key.

        Args:
            file_name: Of the two files; without it they are called as the region.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        stem = file_name or region
        now = datetime.now(UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(region, self._name, key, begins or now - _SKEW, ends or now + _LIFE)
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.DNSName(region)]), critical=False
        )
        files = TlsFiles(
            certificate=self._folder / f"{stem}.pem",
            key=self._folder / f"{stem}.key",
            authority=self._file,
        )
        files.certificate.write_bytes(_signed(builder, self._key))
        files.key.touch(mode=0o600)
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files


def _builder(
    subject: str, issuer: str, key: "EllipticCurvePrivateKey", begins: datetime, ends: datetime
) -> "CertificateBuilder":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    return (
        x509.CertificateBuilder()
        .subject_name(named(subject))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )


def _signed(builder: "CertificateBuilder", key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    certificate = builder.sign(key, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM)
