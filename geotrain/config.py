"""One site's config file: what must be the same everywhere, and what is this region's own.

`[run]` (inline, or `run = "run.toml"`) is compared between regions by its hash; `[site]` never
leaves the machine. `load_config` reports every problem at once.
"""

import hashlib
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from geotrain.configuration.cross import run_findings, site_findings
from geotrain.configuration.file import CONFIG_VERSION, read_toml, take_version
from geotrain.configuration.problems import Files, Finding, as_problem, problems_of, refuse
from geotrain.configuration.rules import (
    SOCKET_PATH_LIMIT_BYTES,
    check_address,
    check_lanes,
    check_microbatches,
    check_url,
    check_window,
    default_socket_path,
    is_local,
    region_findings,
    split_address,
    split_layers,
)
from geotrain.errors import ConfigError, Problem

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]
Codec = Literal["none", "planes"]
Address = Annotated[str, BeforeValidator(check_address)]


class _Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class RegionSpec(_Table):
    name: Name
    """Letters, digits, "-" and "_", at most 63, starting with a letter or digit."""
    layers: str = Field(pattern=r"^[0-9]{1,6}:[0-9]{1,6}$")
    """The layers this region owns, half-open, such as "0:6"."""

    @property
    def first(self) -> int:
        return split_layers(self.layers)[0]

    @property
    def last(self) -> int:
        """One past the region's final layer."""
        return split_layers(self.layers)[1]


class PlanConfig(_Table):
    microbatches: Annotated[Literal["auto"] | int, BeforeValidator(check_microbatches)] = 8
    """Into how many parts a global batch is cut; 8 keeps two to four regions busy. "auto" (with
    window = "auto") follows what a microbatch costs; another number gives other rounding."""
    window: Annotated[
        Literal["auto", "classic"] | int | list[int], BeforeValidator(check_window)
    ] = "classic"
    """Microbatches in flight: "auto" (follows stages and links as they show themselves),
    "classic" (regions - index), one number, or one a region."""

    replay: str | None = Field(default=None, min_length=1)
    """Repeat the plans of an earlier run, from the file that its site.plan_log named; relative to
    the first region's site file, and read there alone."""


class CompressionConfig(_Table):
    activations: Codec = "none"
    """How forward tensors travel: "none", or "planes" (lossless; smaller, costs a core)."""
    gradients: Codec = "none"
    """How backward tensors travel: "none" or "planes"."""


class RunConfig(_Table):
    """What must be the same in every region."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """The run's name: letters, digits, ".", "-" and "_", at most 63."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds weights and dropout."""
    steps: int | None = Field(default=None, ge=1, lt=2**63)
    """Optimizer steps after which the run ends; without it the script says."""
    regions: list[RegionSpec] = Field(min_length=1, max_length=64)
    """The regions in order along the model, each [[run.regions]] with name and layers."""
    global_batch: int = Field(ge=1, lt=2**31)
    """Samples in one optimizer step, over all microbatches."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """What the segments compute in: "fp32" or "bf16"."""
    threads: int = Field(default=1, ge=1, le=1024)
    """torch's CPU threads; another number gives other rounding, so it is part of the run."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Clip the global gradient norm to this; without it nothing is clipped."""
    plan: PlanConfig = PlanConfig()
    """How a step is cut and how far stages run ahead."""
    compression: CompressionConfig = CompressionConfig()
    """How tensors are coded on the links."""

    @field_validator("regions")
    @classmethod
    def _check_regions(cls, regions: list[RegionSpec]) -> list[RegionSpec]:
        findings = list(region_findings([(region.name, region.layers) for region in regions]))
        if findings:
            refuse(findings)
        return regions

    @field_validator("plan")
    @classmethod
    def _check_plan(cls, plan: PlanConfig, info: ValidationInfo) -> PlanConfig:
        findings = []
        regions, batch = info.data.get("regions"), info.data.get("global_batch")
        if isinstance(plan.window, list) and regions and len(plan.window) != len(regions):
            allowed = f"must have one entry for each region: {len(regions)}, not {len(plan.window)}"
            findings.append(Finding(key="window", value=plan.window, allowed=allowed))
        if plan.microbatches == "auto":
            if plan.window != "auto":
                allowed = 'can be "auto" only with window = "auto"; give a number'
                findings.append(Finding(key="microbatches", value="auto", allowed=allowed))
        elif batch is not None and plan.microbatches > batch:
            allowed = f"must not exceed global_batch = {batch}; a microbatch needs a sample"
            findings.append(Finding(key="microbatches", value=plan.microbatches, allowed=allowed))
        if findings:
            refuse(findings)
        return plan

    @property
    def num_regions(self) -> int:
        return len(self.regions)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) of the canonical form; equal in two regions exactly when `[run]` is."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def canonical(self) -> dict[str, Any]:
        """Plain JSON-able values with every default resolved; what regions compare."""
        return self.model_dump(mode="json")

    def index_of(self, name: str) -> int:
        """The region's place in the line; ValueError for a region that is not in the run."""
        return [region.name for region in self.regions].index(name)


class PeerConfig(_Table):
    url: Annotated[str | None, BeforeValidator(check_url)] = None
    """Where to dial the peer, "https://host:port" (with [site.tls]) or "http://host:port"; without
    it the peer dials."""
    egress_usd_per_gb: float = Field(default=0.0, ge=0)
    """What this site pays for each GB (10^9 bytes) sent to the peer."""


class LinkConfig(_Table):
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


class TlsConfig(_Table):
    """With it all links of this site are encrypted, and both ends show a certificate."""

    certificate: Annotated[Path, Field(strict=False)]
    """This site's, a PEM file; it names the region as a DNS name (subjectAltName)."""
    key: Annotated[Path, Field(strict=False)]
    """The certificate's private key, a PEM file without a passphrase."""
    authority: Annotated[Path, Field(strict=False)]
    """Who signs the certificates of this run's sites, a PEM file; no other signer is trusted."""


class LivenessConfig(_Table):
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


class LimitsConfig(_Table):
    egress_usd_per_day: float | None = Field(default=None, gt=0)
    """Dollars of egress in one UTC day after which the run stops in order; none by default."""
    in_flight: int | None = Field(default=None, ge=1)
    """At most so many microbatches in flight in this region, whatever the plan says."""
    in_flight_samples: int | None = Field(default=None, ge=1)
    """The same in samples: what memory has room for, however the batch is cut. One microbatch
    is always admitted."""


class SiteConfig(_Table):
    """What is this region's own."""

    name: Name
    """Which of run.regions this site is."""
    listen: Address = "127.0.0.1:7070"
    """The daemon's one address for peers, as "host:port"; port 0 takes a free one."""
    status: Address = "127.0.0.1:7071"
    """Where /status, /metrics and /healthz are served; loopback only."""
    peers: dict[str, PeerConfig] = {}
    """What this site knows of other regions, each a [site.peers.NAME]."""
    arena_mib: int = Field(default=256, ge=1, le=1 << 20)
    """Shared memory between each rank and the daemon, in MiB; counts against the cgroup."""
    plan_log: Annotated[Path | None, Field(strict=False)] = None
    """A file to which the first region adds a line whenever the plan changes; none by default."""
    mesh: dict[str, Annotated[int, Field(ge=1)]] = {}
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


class Config(_Table):
    """A whole config file, checked; see `load_config`."""

    version: Literal[1]
    """The config format: write version = 1."""
    run: RunConfig
    """Write [run], or run = "run.toml"."""
    site: SiteConfig
    """Write [site] with at least a name."""
    _path: Path = Path()

    @property
    def path(self) -> Path:
        """The file, absolute."""
        return self._path

    @property
    def index(self) -> int:
        """This region's place in the line."""
        return self.run.index_of(self.site.name)

    @property
    def replay_path(self) -> Path | None:
        """Where the plans to repeat are, absolute."""
        return self._beside(self.run.plan.replay)

    @property
    def plan_log_path(self) -> Path | None:
        """Where the plans are noted down, absolute."""
        return self._beside(self.site.plan_log)

    @property
    def tls_files(self) -> dict[str, Path] | None:
        """The files of [site.tls] by their keys, absolute."""
        tls = self.site.tls
        if tls is None:
            return None
        files = {"certificate": tls.certificate, "key": tls.key, "authority": tls.authority}
        return {key: self._path.parent / path.expanduser() for key, path in files.items()}

    def _beside(self, path: str | Path | None) -> Path | None:
        return None if path is None else self._path.parent / Path(path).expanduser()

    @property
    def neighbours(self) -> dict[str, PeerConfig]:
        """The regions before and after this one, with what the site says of them."""
        names = [region.name for region in self.run.regions]
        near = names[max(self.index - 1, 0) : self.index] + names[self.index + 1 : self.index + 2]
        return {name: self.site.peers.get(name, PeerConfig()) for name in near}

    @property
    def socket_path(self) -> Path:
        """The Unix socket where ranks attach; the daemon makes its directory, 0700."""
        if self.site.socket is not None:
            return self._path.parent / self.site.socket.expanduser()
        return default_socket_path(self.run.id, self.site.name)


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read and check one site's file.

    Raises:
        ConfigError: With every problem of the file, and of the run file that it names.
    """
    site_file = Path(path).absolute()
    data = read_toml(site_file)
    problems = take_version(site_file, data, required=True)
    data["version"] = CONFIG_VERSION
    files: dict[str, tuple[Path, str]] = {
        "": (site_file, ""),
        "run": (site_file, "run"),
        "site": (site_file, "site"),
    }
    if isinstance(data.get("run"), str):
        run_file = site_file.parent / data["run"]
        try:
            table = read_toml(run_file, named_by=(site_file, data["run"]))
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from error
        problems += take_version(run_file, table, required=False)
        whole = isinstance(table.get("run"), dict)  # its keys may stand under [run], or bare
        files["run"] = (run_file, "run" if whole else "")
        data["run"] = table["run"] if whole else table
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        problems += problems_of(error, Config, files)
    told = {(problem.file, problem.key) for problem in problems}
    problems += [
        problem
        for problem in _cross_problems(data, files)
        if (problem.file, problem.key) not in told
    ]
    if problems:
        raise ConfigError(problems)
    config._path = site_file
    _check_socket(config)
    _check_homes(config)
    return config


def _cross_problems(data: dict[str, Any], files: Files) -> list[Problem]:
    run, site = data.get("run"), data.get("site")
    problems = []
    if isinstance(run, dict):
        problems += [as_problem(finding, *files["run"]) for finding in run_findings(run)]
        if isinstance(site, dict):
            findings = site_findings(run, site)
            problems += [as_problem(finding, *files["site"]) for finding in findings]
    return problems


def _check_socket(config: Config) -> None:
    value = "" if config.site.socket is None else str(config.site.socket)
    allowed = ""
    try:
        path = config.socket_path
        if "\0" in str(path):
            allowed = "must not hold a zero byte"
        elif path.is_dir():
            allowed = "is a folder; name a file in it, such as geotrain.sock"
        elif len(os.fsencode(path)) > SOCKET_PATH_LIMIT_BYTES:
            value = str(path)
            allowed = (
                f"must be at most {SOCKET_PATH_LIMIT_BYTES} bytes long as a path; set a shorter one"
            )
    except RuntimeError:  # pathlib's word for a "~name" of nobody
        allowed = "names the home of a user that this machine does not have"
    if allowed:
        raise ConfigError(
            [Problem(file=str(config.path), key="site.socket", value=value, allowed=allowed)]
        )


def _check_homes(config: Config) -> None:
    """Of every path that is looked for later; `_check_socket` has its own."""
    run, site = config.run, config.site
    paths = {"run.plan.replay": run.plan.replay, "site.plan_log": site.plan_log}
    if site.tls is not None:
        paths |= {f"site.tls.{key}": path for key, path in site.tls}
    problems = []
    for key, path in paths.items():
        try:
            Path(path or "").expanduser()
        except RuntimeError:  # pathlib's word for a "~name" of nobody
            allowed = "names the home of a user that this machine does not have"
            problems.append(
                Problem(file=str(config.path), key=key, value=str(path), allowed=allowed)
            )
    if problems:
        raise ConfigError(problems)
