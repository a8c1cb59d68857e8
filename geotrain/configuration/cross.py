"""What must fit together across keys, looked for in the raw tables.

A model's own validators stay silent while one of their inputs is wrong; these look at whatever
is readable, so that a user sees every problem at once.
"""

import difflib
import re
from collections.abc import Iterator
from typing import Any

from geotrain.configuration.problems import Finding, dotted
from geotrain.configuration.rules import region_findings


def run_findings(run: dict[str, Any]) -> Iterator[Finding]:
    """Layer ranges, region names and the window's length; keys relative to [run]."""
    regions = _regions(run)
    lines = [(str(region.get("name")), region.get("layers")) for region in regions]
    readable = [
        (name, layers)
        for name, layers in lines
        if isinstance(layers, str) and re.fullmatch(r"[0-9]{1,6}:[0-9]{1,6}", layers)
    ]
    # One unreadable range would make its neighbours look wrong.
    if len(readable) == len(lines):
        for finding in region_findings(readable):
            yield Finding(key=f"regions{finding.key}", value=finding.value, allowed=finding.allowed)
    plan = run.get("plan")
    window = plan.get("window") if isinstance(plan, dict) else None
    if isinstance(window, list) and regions and len(window) != len(regions):
        allowed = f"must have one entry for each region: {len(regions)}, not {len(window)}"
        yield Finding(key="plan.window", value=window, allowed=allowed)


def site_findings(run: dict[str, Any], site: dict[str, Any]) -> Iterator[Finding]:
    """What [site] says of regions that [run] does not have, and its URLs; keys relative to it."""
    yield from _url_findings(site)
    known = [region["name"] for region in _regions(run) if isinstance(region.get("name"), str)]
    if not known:
        return
    name, peers = site.get("name"), site.get("peers")
    if isinstance(name, str) and name not in known:
        yield Finding(key="name", value=name, allowed=_one_of(known, name))
    for peer in peers if isinstance(peers, dict) else ():
        allowed = ""
        if peer == name:
            allowed = "is this site itself; name its neighbours here"
        elif peer not in known:
            allowed = _one_of(known, peer)
        if allowed:
            yield Finding(key=dotted(("peers", peer)), value=None, allowed=allowed)


def _url_findings(site: dict[str, Any]) -> Iterator[Finding]:
    has_tls = "tls" in site
    peers = site.get("peers")
    for name, peer in peers.items() if isinstance(peers, dict) else ():
        url = peer.get("url") if isinstance(peer, dict) else None
        allowed = ""
        if not isinstance(url, str):
            continue
        if url.startswith("https:") and not has_tls:
            allowed = "needs [site.tls] with certificate, key and authority; http:// is without TLS"
        elif url.startswith("http:") and has_tls:
            allowed = (
                "must begin with https://, because [site.tls] encrypts every link of this site"
            )
        if allowed:
            yield Finding(key=dotted(("peers", name, "url")), value=url, allowed=allowed)


def _regions(run: dict[str, Any]) -> list[dict[str, Any]]:
    regions = run.get("regions")
    if not isinstance(regions, list):
        return []
    return [region for region in regions if isinstance(region, dict)]


def _one_of(known: list[str], value: str) -> str:
    near = difflib.get_close_matches(value, known, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return f"must be one of run.regions: {', '.join(known)}{hint}"
