"""The files of a site's [site.tls], made ready for links; what is wrong with them names its key."""

import time
from pathlib import Path
from typing import NamedTuple

from geotrain.config import Config
from geotrain.errors import ConfigError, Problem
from geotrain.transport.tls import Tls, TlsFiles, TlsFilesError, load_tls

SOON_DAYS = 14.0
_DAY_S = 86_400.0


def site_tls(config: Config) -> Tls | None:
    """None where the site has no [site.tls].

    Raises:
        ConfigError: A file cannot be used.
    """
    paths = config.tls_files
    if paths is None:
        return None
    try:
        return load_tls(TlsFiles(**paths), region=config.site.name)
    except TlsFilesError as error:
        problem = Problem(
            file=str(config.path),
            key=f"site.tls.{error.key}",
            value=str(paths[error.key]),
            allowed=error.allowed,
        )
        raise ConfigError([problem]) from error


class Warnings(NamedTuple):
    """What still works and should be changed; "" where all is well."""

    ends_soon: str
    key_is_open: str

    @property
    def texts(self) -> list[str]:
        return [text for text in self if text]


def warnings(tls: Tls, *, now_s: float | None = None) -> Warnings:
    """Told by check, and by a daemon as it starts.

    Args:
        now_s: Seconds of the Unix epoch; by default the clock's.
    """
    left_days = (tls.not_after_s - (time.time() if now_s is None else now_s)) / _DAY_S
    soon = f"the certificate ends in {max(left_days, 0.0):.1f} days; renew it"
    return Warnings(
        ends_soon=soon if left_days < SOON_DAYS else "",
        key_is_open=_open_key(tls.files.key),
    )


def _open_key(key: Path) -> str:
    if key.stat().st_mode & 0o077 == 0:
        return ""
    return f"others than its owner can read or change {key}: chmod 600"
