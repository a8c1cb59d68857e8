"""One site's config file: what must be the same everywhere, and what is this region's own.

`[run]` (inline, or `run = "run.toml"`) is compared between regions by its hash; `[site]` never
leaves the machine. `load_config` reports every problem at once.
"""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    ValidationError,
)

from geotrain.configuration.cross import run_findings, site_findings
from geotrain.configuration.file import CONFIG_VERSION, read_toml, take_version
from geotrain.configuration.problems import Files, as_problem, problems_of
from geotrain.configuration.rules import (
    SOCKET_PATH_LIMIT_BYTES,
    default_socket_path,
)
from geotrain.configuration.run_table import RunConfig
from geotrain.configuration.site_table import PeerConfig, SiteConfig
from geotrain.configuration.table import Table
from geotrain.errors import ConfigError, Problem


class Config(Table):
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
