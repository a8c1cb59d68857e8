"""The rules of a config file that no type expresses: layer ranges, addresses, URLs, windows."""

import hashlib
import ipaddress
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from geotrain.configuration.problems import Finding, refuse

MAX_WINDOW = 1024
MAX_LANES = 64
MAX_MICROBATCHES = 4096
SOCKET_PATH_LIMIT_BYTES = 107
"""sockaddr_un holds 108 bytes with the closing zero."""

_PRIVATE = tuple(
    ipaddress.ip_network(text)
    for text in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "169.254.0.0/16",
        "fc00::/7",
        "fe80::/10",
    )
)


def split_layers(layers: str) -> tuple[int, int]:
    """ "0:6" as (0, 6): the first layer and one past the last."""
    first, _, last = layers.partition(":")
    return int(first), int(last)


def region_findings(regions: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """What is wrong with a line of regions, each (name, layers); layers must tile from 0."""
    end, before = 0, ""
    seen = set[str]()
    for index, (name, layers) in enumerate(regions):
        first, last = split_layers(layers)
        allowed = ""
        if last <= first:
            allowed = f"region {name} owns no layer; the second number must be larger"
        elif not before and first > 0:
            allowed = f"the first region must start at layer 0; nobody owns 0:{first}"
        elif first > end:
            allowed = f"nobody owns layers {end}:{first}; start at {end}, where {before} ends"
        elif first < end:
            allowed = f"layers {first}:{min(end, last)} are already {before}'s; start at {end}"
        if allowed:
            yield Finding(key=f"[{index}].layers", value=layers, allowed=allowed)
        if last > first and last > end:
            end, before = last, name
        if name in seen:
            yield Finding(key=f"[{index}].name", value=name, allowed="two regions share this name")
        seen.add(name)


def check_microbatches(value: Any) -> Any:
    """Validate `plan.microbatches` before pydantic's union would report each branch by itself."""
    if value != "auto" and not (type(value) is int and 1 <= value <= MAX_MICROBATCHES):
        allowed = (
            f'must be "auto" or a whole number from 1 to {MAX_MICROBATCHES}; '
            "remove the key to use 8"
        )
        refuse([Finding(key="", value=value, allowed=allowed)])
    return value


def check_window(value: Any) -> Any:
    """Validate `plan.window` before pydantic's union would report each branch by itself."""
    windows = value if isinstance(value, list) else [value]
    whole = all(type(entry) is int and 1 <= entry <= MAX_WINDOW for entry in windows)
    if value not in ("auto", "classic") and not (windows and whole):
        allowed = (
            f'must be "auto", "classic", a whole number from 1 to {MAX_WINDOW}, '
            'or a list with one for each region; remove the key to use "classic"'
        )
        refuse([Finding(key="", value=value, allowed=allowed)])
    return value


def check_lanes(value: Any) -> Any:
    """Validate `site.link.lanes` before pydantic's union would report each branch by itself."""
    if value != "auto" and not (type(value) is int and 1 <= value <= MAX_LANES):
        allowed = (
            f'must be "auto" or a whole number from 1 to {MAX_LANES}; remove the key to use "auto"'
        )
        refuse([Finding(key="", value=value, allowed=allowed)])
    return value


def split_address(address: str) -> tuple[str, int]:
    """ "host:port" or "[v6]:port" as (host, port); ValueError where it is neither."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"not an address: {address}")
    if (":" in host) != bracketed:
        raise ValueError(f"an IPv6 address wants brackets: {address}")
    return host, int(port)


def check_address(value: Any) -> Any:
    """Validate a listen address, given as text."""
    try:
        host, _ = split_address(value if isinstance(value, str) else "")
        valid = all(32 < ord(character) < 127 for character in host)
    except ValueError:
        valid = False
    if not valid:
        allowed = 'must be "host:port" or "[ipv6]:port", port 0 to 65535'
        refuse([Finding(key="", value=value, allowed=allowed)])
    return value


def is_local(address: str, *, loopback_only: bool = False) -> bool:
    """Whether only this machine, or with it a private network, can reach an address.

    A name other than "localhost" counts as public: what it resolves to may change.
    """
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    # Not `ip.is_private`: that is true for 0.0.0.0, which every network can reach.
    return ip.is_loopback or (not loopback_only and any(ip in network for network in _PRIVATE))


def check_url(value: Any) -> Any:
    """Validate a peer's URL, given as text."""
    if value is None or (isinstance(value, str) and _url_is_valid(value)):
        return value
    allowed = 'must be "https://host:port", or "http://host:port" without TLS'
    refuse([Finding(key="", value=value, allowed=allowed)])


def _url_is_valid(url: str) -> bool:
    if not all(32 < ord(character) < 127 for character in url):
        return False
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        labels = [host] if ":" in host else host.rstrip(".").split(".")
        named = len(host) <= 253 and all(0 < len(label) <= 63 for label in labels)
        named = named and parts.port not in (None, 0)
    except ValueError:
        return False
    plain = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username)
    return url.startswith(("http://", "https://")) and named and plain


def default_socket_path(run_id: str, region: str) -> Path:
    """Where ranks attach when the site names no socket; short enough for a Unix socket."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    fallback = Path(tempfile.gettempdir()) / f"geotrain-{os.getuid()}"
    folder = Path(runtime) / "geotrain" if runtime else fallback
    for place in (folder, Path("/tmp") / fallback.name):
        for name in (f"{run_id}.{region}", _digest(f"{run_id}.{region}")):
            path = place / f"{name}.sock"
            if len(os.fsencode(path)) <= SOCKET_PATH_LIMIT_BYTES:
                return path
    raise AssertionError("a digest in /tmp is always short enough")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
