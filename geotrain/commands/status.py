"""`geotrain status`: what this region's daemon sees, for people."""

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from geotrain.commands.stacks import shortened
from geotrain.config import Config
from geotrain.control.attribution import in_words
from geotrain.errors import GeotrainError

TIMEOUT_S = 5.0
ANSWER_LIMIT_BYTES = 16 << 20
_SECURITY = {"plaintext": "not encrypted", "tls": "with TLS 1.3"}
SHOWN_LANES = 8
"""Of each link; `--json` has all."""
_UNBOUNDED = 10_000
_BLANK_END = re.compile(r"(?: |\x1b\[[0-9;]*m)+$", re.MULTILINE)
"""With the codes of colours between the blanks."""


def status(config: Config, *, stacks: str | None, as_json: bool) -> int:
    """Ask the daemon and print. GeotrainError where none is running or answers.

    Args:
        stacks: "full", "short" (see stacks.py), or None for none. JSON always has them in full.
    """
    document = fetch(config, stacks=stacks is not None)
    if stacks == "short" and not as_json:
        short = {rank: shortened(text) for rank, text in document.get("stacks", {}).items()}
        document["stacks"] = short
    if as_json:
        print(json.dumps(document))
    else:
        show(document, console())
    return 0


def fetch(config: Config, *, stacks: bool = False) -> dict[str, Any]:
    """The status document of this site's daemon, found through the note beside its socket."""
    note = Path(f"{config.socket_path}.json")
    try:
        place = json.loads(note.read_text(encoding="utf-8"))
        address, pid = str(place["status"]), int(place["pid"])
    except FileNotFoundError as exc:
        raise GeotrainError(
            f"no daemon of region {config.site.name} runs here (no {note}); "
            f"start it with: geotrain daemon --config {config.path}"
        ) from exc
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise GeotrainError(f"cannot read {note}: {exc}") from exc
    # No proxies: the page is on loopback, whatever http_proxy says.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = f"http://{address}/status" + ("?stacks=1" if stacks else "")
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            document = json.loads(answer.read(ANSWER_LIMIT_BYTES))
    except (OSError, ValueError) as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        raise GeotrainError(
            f"the daemon of region {config.site.name} (pid {pid}, {_life_of(pid)}) does not "
            f"answer at {address}: {reason}"
        ) from exc
    if not isinstance(document, dict):
        raise GeotrainError(f"{url} answered with something that is no status")
    return document


def _life_of(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    return "alive"


def console() -> Console:
    """Standard output, as wide as it is; without any escape codes under NO_COLOR or in a pipe."""
    return Console(color_system=None if os.environ.get("NO_COLOR") else "auto")


def show(document: Mapping[str, Any], console: Console) -> None:
    """Print the whole document as tables and lines that fit the console's width."""
    with console.capture() as captured:
        _print(document, console)
    # Rich fills the rows of tables up with blanks, and leaves one where it wraps a line.
    console.file.write(_BLANK_END.sub(lambda end: end[0].replace(" ", ""), captured.get()))


def _print(document: Mapping[str, Any], console: Console) -> None:
    view = "all regions ready" if document["view"] is not None else "not all regions are ready"
    console.print(
        f"run [bold]{escape(document['run_id'])}[/], region [bold]{escape(document['region'])}[/]: "
        f"{view}\ndaemon pid {document['pid']}, up {duration(document['uptime_s'])}, "
        f"links {_SECURITY.get(document['security'], document['security'])}\n",
        highlight=False,
    )
    console.print(_regions(document["board"]), "")
    console.print(_ranks(document["ranks"]), "")
    if document["steps"]["regions_s"]:
        console.print(_steps(document["steps"]["regions_s"]), "")
    for verdict in document["steps"]["verdicts"]:
        console.print(f"off: {verdict['text']}\n", markup=False, highlight=False)
    if document["links"]:
        _show_links(document["links"], console)
    console.print(_egress(document["egress"], console.width), highlight=False)
    for rank, text in document.get("stacks", {}).items():
        console.print(f"\n[bold]rank {escape(rank)}[/]")
        console.print(text.rstrip(), markup=False, highlight=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    """The last column takes what width there is and wraps; the others stay whole."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    return table


def _regions(board: list[Mapping[str, Any]]) -> Table:
    table = _table("region", "state", "note")
    for entry in board:
        error = entry.get("error") or {}
        note = error.get("detail") or entry.get("note") or ""
        if error.get("region") not in (None, entry["region"]):
            note = f"stopped: region {error['region']}: {note}"
        table.add_row(escape(entry["region"]), entry["state"], escape(str(note)))
    return table


def _ranks(ranks: list[Mapping[str, Any]]) -> Table:
    table = _table("rank", "pid", "step", "loss", "since", "now")
    for rank in ranks:
        step, loss = rank["step"], (rank.get("report") or {}).get("loss")
        table.add_row(
            str(rank["rank"]),
            str(rank["pid"]),
            "-" if step is None else str(step),
            f"{loss:.4f}" if isinstance(loss, int | float) else "-",
            duration(rank["action_age_s"]),
            escape(rank["action"]) if rank["state"] != "left" else "left",
        )
    if not ranks:
        table.add_row("none attached", "", "", "", "", "")
    return table


def _steps(regions_s: Mapping[str, Mapping[str, float]]) -> Table:
    """Where the step before the last one went, in each region."""
    table = _table("region", "step", "where it went")
    for region, spent_s in regions_s.items():
        table.add_row(escape(region), f"{sum(spent_s.values()):.2f} s", in_words(spent_s))
    return table


def _show_links(links: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Tables where they fit, else a few lines for each link and each of its lanes."""
    tables = [_links(links)]
    if any(link.get("lanes") for link in links.values()):
        tables.append(_lanes(links))
    # As if there were room: within its own width a table always "fits", with words cut off.
    room = console.options.update_width(_UNBOUNDED)
    fits = max(Measurement.get(console, room, table).maximum for table in tables) <= console.width
    if fits:
        console.print(*tables)
    for peer, link in links.items():
        if not fits:
            lines = [_link(peer, link), *_lane_lines(link)]
            console.print("\n".join(lines), markup=False, highlight=False)
        for text in (link.get("reason"), _congestion(link)):
            if text:
                console.print(f"link to {peer}: {text}", markup=False, highlight=False)
    console.print()


def _links(links: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("link to", "state", "since", "RTT min/p50/p99", "out", "in", "sent", "received")
    for peer, link in links.items():
        rate = link.get("rate_bytes_per_s") or {}
        table.add_row(
            escape(peer),
            link["state"],
            duration(link.get("since_s")),
            round_trip(link.get("rtt_s") or {}),
            bit_rate(rate.get("send")),
            bit_rate(rate.get("receive")),
            size(link.get("bytes_sent")),
            size(link.get("bytes_received")),
        )
    return table


def _lanes(links: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("lane of", "number", "RTT", "out", "in", "sent", "sent again", "received")
    for peer, link in links.items():
        lanes = link.get("lanes") or []
        for lane in lanes[:SHOWN_LANES]:
            table.add_row(escape(peer), str(lane["lane"]), *_cells(lane))
        if len(lanes) > SHOWN_LANES:
            table.add_row(escape(peer), _more(lanes), "", "", "", "", "", "")
    return table


def _lane_lines(link: Mapping[str, Any]) -> Iterator[str]:
    lanes = link.get("lanes") or []
    for lane in lanes[:SHOWN_LANES]:
        rtt, out, incoming, sent, again, received = _cells(lane)
        yield f"  lane {lane['lane']}: RTT {rtt}, out {out}, in {incoming}"
        yield f"    {sent} sent, {again} of it again, {received} received"
    if len(lanes) > SHOWN_LANES:
        yield f"  {_more(lanes)}"


def _cells(lane: Mapping[str, Any]) -> tuple[str, ...]:
    rtt_s, rate = lane["rtt_s"], lane["rate_bytes_per_s"]
    return (
        "-" if rtt_s is None else f"{rtt_s * 1e3:.1f} ms",
        *("-" if rate[way] is None else bit_rate(rate[way]) for way in ("send", "receive")),
        size(lane["bytes_sent"]),
        size(lane["retransmitted_bytes"]),
        size(lane["bytes_received"]),
    )


def _more(lanes: Sequence[object]) -> str:
    return f"and {len(lanes) - SHOWN_LANES} more"


def _congestion(link: Mapping[str, Any]) -> str:
    refused = link.get("congestion_refused")
    return f"{refused}; it runs {link.get('congestion')}" if refused else ""


def _link(peer: str, link: Mapping[str, Any]) -> str:
    rate = link.get("rate_bytes_per_s") or {}
    return (
        f"link to {peer}: {link['state']} for {duration(link.get('since_s'))}\n"
        f"  RTT min/p50/p99  {round_trip(link.get('rtt_s') or {})}\n"
        f"  out              {_flow(rate.get('send'), link.get('bytes_sent'))} sent\n"
        f"  in               {_flow(rate.get('receive'), link.get('bytes_received'))} received"
    )


def _flow(bytes_per_s: float | None, num_bytes: float | None) -> str:
    rate = "" if bytes_per_s is None else f"{bit_rate(bytes_per_s)}, "
    return f"{rate}{size(num_bytes)}"


def _egress(egress: Mapping[str, Any], width: int) -> str:
    """One line, or two where it is too long for the width."""
    per_million = egress["usd_per_million_tokens"]
    limit = egress["limit_usd_per_day"]
    today = f"egress {size(egress['bytes_today'])} today, {egress['usd_today']:.2f} $"
    today += f" of {limit:g} $ a day;" if limit is not None else ";"
    speed = f"{egress['usd_per_hour']:.2f} $/h"
    speed += f", {per_million:.4f} $ per million tokens" if per_million is not None else ""
    return f"{today} {speed}" if len(today) + 1 + len(speed) <= width else f"{today}\n  {speed}"


def duration(seconds: float | None) -> str:
    """Such as "0.4 s", "12 s", "3 min 5 s", "2 h 10 min"."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def round_trip(rtt_s: Mapping[str, float | None]) -> str:
    """Such as "100.2/100.9/104.0 ms"."""
    values = [rtt_s.get(name) for name in ("min", "p50", "p99")]
    if all(value is None for value in values):
        return "not known yet"
    return "/".join("-" if value is None else f"{value * 1e3:.1f}" for value in values) + " ms"


def bit_rate(bytes_per_s: float | None) -> str:
    """In Mbit/s, as links are sold; "-" while nothing has flowed."""
    return "-" if bytes_per_s is None else f"{bytes_per_s * 8e-6:.1f} Mbit/s"


def size(num_bytes: float | None) -> str:
    """In powers of 1,000, as egress is billed."""
    if num_bytes is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"
