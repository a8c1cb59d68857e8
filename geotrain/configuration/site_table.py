"""`[site]`: what is this region's own, and never leaves the machine."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
)

from geotrain.configuration.problems import Finding, refuse
from geotrain.configuration.rules import (
    check_address,
    check_lanes,
    check_url,
    is_local,
    split_address,
)
from geotrain.configuration.table import Name, Table

Address = Annotated[str, BeforeValidator(check_address)]


class PeerConfig(Table):
    url: Annotated[str | None, BeforeValidator(check_url)] = None
    """Where to dial the peer, "https://host:port" (with [site.tls]) or "http://host:port"; without
    it the peer dials."""
    egress_usd_per_gb: float = Field(default=0.0, ge=0)
    """What this site pays for each GB (10^9 bytes) sent to the peer."""


class LinkConfig(Table):
    security: Literal["plaintext"] | None = None
    """ "plaintext" says in words that unencrypted links beyond private networks are meant."""
    ping_interval_s: float = Field(default=1.0, gt=0, le=60)
    """Seconds between pings; 1.0 costs nothing and keeps NAT entries alive."""
    lanes: Annotated[Literal["auto"] | int, BeforeValidator(check_lanes)] = "auto"
    """Connections that carry tensors, beside the one for control; "auto" has as many as it pays to
    have. A number holds where this site dials, and is a wish where the peer does."""
    congestion: Literal["auto", "bbr", "cubic"] = "auto"
    """TCP's congestion control: "auto" (BBR where the kernel allows it), "bbr" or "cubic". One that
    the kernel refuses is told by log, status and check, and links run with what it gives."""


class TlsConfig(Table):
    """With it all links of this site are encrypted, and both ends show a certificate."""

    certificate: Annotated[Path, Field(strict=False)]
    """This site's, a PEM file; it names the region as a DNS name (subjectAltName)."""
    key: Annotated[Path, Field(strict=False)]
    """The certificate's private key, a PEM file without a passphrase."""
    authority: Annotated[Path, Field(strict=False)]
    """Who signs the certificates of this run's sites, a PEM file; no other signer is trusted."""


class LivenessConfig(Table):
    silent_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds of silence or lack of progress after which it is named in every region."""
    wait_s: float = Field(default=1800.0, gt=0, le=7 * 86400)
    """Seconds that a step waits for a link before one named error ends the run."""

    @field_validator("wait_s")
    @classmethod
    def _check_wait(cls, wait_s: float, info: ValidationInfo) -> float:
        silent_s = info.data.get("silent_s")
        if silent_s is not None and wait_s < silent_s:
            allowed = f"must be >= liveness.silent_s = {silent_s:g}"
            refuse([Finding(key="", value=wait_s, allowed=allowed)])
        return wait_s


class LimitsConfig(Table):
    egress_usd_per_day: float | None = Field(default=None, gt=0)
    """Dollars of egress in one UTC day after which the run stops in order; none by default."""
    in_flight: int | None = Field(default=None, ge=1)
    """At most so many microbatches in flight in this region, whatever the plan says."""
    in_flight_samples: int | None = Field(default=None, ge=1)
    """The same in samples: what memory has room for, however the batch is cut. One microbatch
    is always admitted."""


class SiteConfig(Table):
    """What is this region's own."""

    name: Name
    """Which of run.regions this site is."""
    listen: Address = "127.0.0.1:7070"
    """The daemon's one address for peers, as "host:port"; port 0 takes a free one."""
    status: Address = "127.0.0.1:7071"
    """Where /status, /metrics and /healthz are served; loopback only."""
    peers: dict[str, PeerConfig] = Field(default={})
    """What this site knows of other regions, each a [site.peers.NAME]."""
    arena_mib: int = Field(default=256, ge=1, le=1 << 20)
    """Shared memory between each rank and the daemon, in MiB; counts against the cgroup."""
    plan_log: Annotated[Path | None, Field(strict=False)] = None
    """A file to which the first region adds a line whenever the plan changes; none by default."""
    mesh: dict[str, Annotated[int, Field(ge=1)]] = Field(default={})
    """This region's own device mesh: dimension names and sizes."""
    socket: Annotated[Path | None, Field(strict=False)] = None
    """Where ranks attach; by default in the user's runtime directory."""
    liveness: LivenessConfig = LivenessConfig()
    """When silence is named, and how long a step waits."""
    limits: LimitsConfig = LimitsConfig()
    """What ends the run in order."""
    tls: TlsConfig | None = None
    """How links are encrypted; without it they are not."""
    link: LinkConfig = Field(default=LinkConfig(), validate_default=True)
    """How this site talks to its peers."""

    @field_validator("status")
    @classmethod
    def _check_status(cls, status: str, info: ValidationInfo) -> str:
        allowed = ""
        if not is_local(status, loopback_only=True):
            allowed = "must be a loopback address: the page has no password; use ssh -L to see it"
        elif split_address(status)[1] != 0 and status == info.data.get("listen"):
            allowed = "must differ from site.listen"
        if allowed:
            refuse([Finding(key="", value=status, allowed=allowed)])
        return status

    @field_validator("link")
    @classmethod
    def _check_link(cls, link: LinkConfig, info: ValidationInfo) -> LinkConfig:
        findings = []
        listen, liveness = info.data.get("listen"), info.data.get("liveness")
        is_plain = "tls" in info.data and info.data["tls"] is None
        if listen and is_plain and link.security is None and not is_local(listen):
            allowed = (
                f"listening on {listen}, outside loopback and private ranges, needs [site.tls], or "
                'security = "plaintext" here where links may go unencrypted; better than that '
                "listen on a WireGuard address, or on loopback behind ssh"
            )
            findings.append(Finding(key="security", value=None, allowed=allowed))
        if info.data.get("tls") is not None and link.security is not None:
            allowed = "contradicts [site.tls], which encrypts links; remove one of the two"
            findings.append(Finding(key="security", value=link.security, allowed=allowed))
        if liveness and link.ping_interval_s > liveness.silent_s / 2:
            allowed = f"must be at most half of liveness.silent_s = {liveness.silent_s:g}"
            findings.append(
                Finding(key="ping_interval_s", value=link.ping_interval_s, allowed=allowed)
            )
        if findings:
            refuse(findings)
        return link
