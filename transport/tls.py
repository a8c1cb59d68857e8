"""TLS of links: what a site's files come to, checked before anybody dials.

Both ends show a certificate. It names its region as a DNS name (subjectAltName); a region may act
only as the one that its certificate names. The standard ssl module suffices.
"""

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

FileKey = Literal["certificate", "key", "authority"]

_EXPIRED, _NOT_YET_VALID, _OTHER_NAME = 10, 9, 62
_OTHER_AUTHORITY = {2, 18, 19, 20, 21}
"""X509_V_ERR_* of OpenSSL's x509_vfy.h."""
_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME, which Python does not name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Three PEM files."""

    certificate: Path
    """This site's, with what lies between it and the authority, if anything does."""
    key: Path
    authority: Path
    """Who may sign the certificates of this run's sites."""


class TlsFilesError(Exception):
    """What is wrong with one of the files, for people; `key` is the one of [site.tls]."""

    def __init__(self, key: FileKey, allowed: str) -> None:
        super().__init__(allowed)
        self.key: FileKey = key
        self.allowed = allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """One site's; see `load_tls`."""

    files: TlsFiles
    server: ssl.SSLContext
    client: ssl.SSLContext
    not_after_s: float
    """When the certificate ends, in seconds of the Unix epoch."""

    @property
    def ends(self) -> str:
        """For people."""
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.not_after_s))


def load_tls(files: TlsFiles, *, region: str) -> Tls:
    """Read the files, and have the site shake hands with itself: what holds there, holds on links.

    Raises:
        TlsFilesError: One cannot be read, they do not fit together, the certificate's time is over
            or still to come, or it does not name `region`.
    """
    _read(files.certificate, "certificate", needs="CERTIFICATE")
    key = _read(files.key, "key", needs="PRIVATE KEY")
    _read(files.authority, "authority", needs="CERTIFICATE")
    if "ENCRYPTED" in key:
        allowed = "has a passphrase, which a daemon cannot be asked for; write the key without one"
        raise TlsFilesError("key", allowed)
    server = _context(ssl.PROTOCOL_TLS_SERVER, files)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    certificate = _shake_hands(server, files)
    names = names_of(certificate)
    if region not in names:
        found = ", ".join(names) or "nothing"
        allowed = f"must name region {region} as a DNS name (subjectAltName); it names {found}"
        raise TlsFilesError("certificate", allowed)
    ends_s = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    return Tls(files=files, server=server, client=client, not_after_s=ends_s)


def names_of(certificate: Mapping[str, Any] | None) -> list[str]:
    """The regions that a verified certificate, as `getpeercert()` has it, may act as."""
    alternatives = (certificate or {}).get("subjectAltName", ())
    return [value for kind, value in alternatives if kind == "DNS"]


def failure(error: ssl.SSLError, *, url: str, to: str, tls: Tls) -> str:
    """Why the daemon of region `to` could not be dialled, and what to do about it."""
    daemon = f"the daemon at {url}"
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        if code == _EXPIRED:
            return f"the certificate of {daemon} has expired; renew it there, or set this clock"
        if code == _NOT_YET_VALID:
            return f"the certificate of {daemon} is not valid yet; set the clock here or there"
        if code == _OTHER_NAME:
            return f"{daemon} has no certificate of region {to}; {_two_remedies(to)}"
        if code in _OTHER_AUTHORITY:
            return (
                f"the certificate of {daemon} is not signed by {tls.files.authority}; all sites of "
                "a run need certificates of one authority (site.tls.authority)"
            )
        return f"the certificate of {daemon} is not accepted: {error.verify_message}"
    if error.reason is not None and "ALERT" in error.reason:
        return f"{turned_away(url, to, tls)} ({error.reason.lower().replace('_', ' ')})"
    return f"{daemon} does not speak TLS 1.3 (or no TLS at all); give it a [site.tls], too"


def turned_away(url: str, to: str, tls: Tls) -> str:
    """TLS 1.3 checks a client last, and who is refused sees little more than the end."""
    return (
        f"the daemon at {url} ended the connection without an answer; if it refuses "
        f"{tls.files.certificate}, the log of region {to}'s daemon says why (its "
        "site.tls.authority may be another one)"
    )


def other_name(url: str, to: str, names: list[str]) -> str:
    found = ", ".join(names) or "nothing"
    return f"the certificate of the daemon at {url} names {found}, not {to}; {_two_remedies(to)}"


def _two_remedies(to: str) -> str:
    return f"the url may be another region's, or the certificate lacks the DNS name {to}"


def reason_of(error: ssl.SSLError) -> str:
    """Why a client was turned away, in words for the log of the daemon that did so."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was refused: {error.verify_message}"
    reasons = {
        "HTTP_REQUEST": "it speaks no TLS; it needs [site.tls] and an https:// url",
        "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no certificate",
    }
    reason = error.reason or "UNKNOWN"
    return reasons.get(reason, f"its TLS failed ({reason.lower().replace('_', ' ')})")


def _read(path: Path, key: FileKey, *, needs: str) -> str:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise TlsFilesError(key, "must be a file; a pipe or a device cannot be read twice")
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise TlsFilesError(key, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise TlsFilesError(key, "must not hold a zero byte") from error
    if f"{needs}-----" not in text:
        raise TlsFilesError(key, f"must be a PEM file with a {needs} in it")
    return text


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.hostname_checks_common_name = False
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # lanes live for hours: nobody resumes
    try:
        context.load_verify_locations(cafile=files.authority)
    except ssl.SSLError as error:
        raise TlsFilesError("authority", "holds no certificate that can be read") from error
    try:
        context.load_cert_chain(files.certificate, files.key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            allowed = f"does not belong to {files.certificate}; give the key that was made with it"
            raise TlsFilesError("key", allowed) from error
        allowed = f"cannot be used with the key {files.key}: {error.reason or error}"
        raise TlsFilesError("certificate", allowed) from error
    return context


def _shake_hands(server: ssl.SSLContext, files: TlsFiles) -> Mapping[str, Any]:
    """Both ends with the same files, in memory. Returns the certificate, as a peer sees it."""
    client = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    client.check_hostname = False  # the caller looks at all of the names
    try:
        return _meet(server, client)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (_EXPIRED, _NOT_YET_VALID):
            _refuse_time(files, is_over=error.verify_code == _EXPIRED)
        if error.verify_code in _OTHER_AUTHORITY:
            allowed = f"is not signed by {files.authority}; give the authority that signed it"
        else:
            allowed = f"is not fit for links: {error.verify_message}"
        raise TlsFilesError("certificate", allowed) from error
    except ssl.SSLError as error:
        raise TlsFilesError("certificate", f"is not fit for TLS 1.3: {error.reason}") from error


def _refuse_time(files: TlsFiles, *, is_over: bool) -> NoReturn:
    server, client = (
        _context(ssl.PROTOCOL_TLS_SERVER, files),
        _context(ssl.PROTOCOL_TLS_CLIENT, files),
    )
    client.check_hostname = False
    for context in (server, client):
        context.verify_flags = ssl.VerifyFlags(context.verify_flags | _NO_CHECK_TIME)
    certificate = _meet(server, client)
    if not is_over:
        begins = certificate["notBefore"]
        raise TlsFilesError("certificate", f"is valid from {begins} only; set the clock")
    ends = str(certificate["notAfter"])
    if ssl.cert_time_to_seconds(ends) > time.time():
        raise TlsFilesError("authority", "has expired; make a new one, and certificates of it")
    raise TlsFilesError("certificate", f"expired on {ends}; renew it")


def _meet(server: ssl.SSLContext, client: ssl.SSLContext) -> Mapping[str, Any]:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    # TLS 1.3: hello, all of the server's, all of the client's; then both are done.
    for end in (near, far, near, far):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    certificate = near.getpeercert()
    assert certificate is not None, "was required"
    return certificate
