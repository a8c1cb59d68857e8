"""The links in the live view: round trips, rates, bytes, and what they cost. Pure.

Everything in it comes from the same status documents, so that its figures agree.
"""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from geotrain.lab.demo import words
from geotrain.lab.demo.state import RegionState, RunState
from geotrain.lab.demo.tables import DIM, NAME_WIDTH, line_of, table_of


def links_table(state: RunState, shown: int, *, wide: bool) -> Table:
    """The links between the first `shown` regions."""
    has_codec, has_price = state.options.codec != "none", state.options.usd_per_gb > 0
    figures = ["RTT now/min/median/p99" if wide else "RTT now", "Mbit/s out/back", "WAN bytes"]
    figures += ["saved"] if has_codec else []
    figures += ["$"] if has_price else []
    table = table_of("link", figures=tuple(figures))
    for one, other in state.links[: shown - 1]:
        wire, payload = _sent(one, other, "bytes_sent"), _sent(one, other, "payload_bytes_sent")
        names = (words.shortened(region.name, NAME_WIDTH) for region in (one, other))
        cells: list[str | Text] = ["-".join(names), *_now(state, one, other, wide=wide)]
        cells += [words.size(wire)]
        if has_codec:
            cells += [(words.saved if wide else words.saved_share)(payload, wire)]
        if has_price:
            cells += [words.dollars(wire / 1e9 * state.options.usd_per_gb)]
        table.add_row(*cells)
    return table


def egress_row(state: RunState) -> Text:
    """What all links cost together; an empty row before that can be told."""
    price = state.options.usd_per_gb
    total = words.dollars(sum(region.bytes_sent for region in state.regions) / 1e9 * price)
    if total == "-":
        return Text()
    parts = [f"at {price:g} $ a GB: {total} $ so far"]
    usd_per_hour = sum(region.sent_bytes_per_s for region in state.regions) / 1e9 * price * 3600
    if usd_per_hour > 0:
        parts.append(f"{usd_per_hour:.2f} $ an hour")
    egress = [(region.status or {}).get("egress") or {} for region in state.regions]
    per_million = [one["usd_per_million_tokens"] for one in egress if _has_tokens(one)]
    if per_million:
        parts.append(f"{sum(per_million):.3f} $ a million tokens")
    return line_of((", ".join(parts), DIM))


def _has_tokens(egress: Mapping[str, Any]) -> bool:
    return egress.get("usd_per_million_tokens") is not None


def _sent(one: RegionState, other: RegionState, name: str) -> int:
    return sum(int(end.get(name, 0)) for end in (one.link(other.name), other.link(one.name)))


def _now(state: RunState, one: RegionState, other: RegionState, *, wide: bool) -> tuple[Text, str]:
    """Round trip and rates; of a link that is silent no old ones."""
    there, back = one.link(other.name), other.link(one.name)
    link_state, silent_s = there.get("state"), state.silent_s(one, other)
    if link_state is not None and link_state != "connected":
        return Text(f"{link_state} {there['since_s']:.0f} s", style="red"), "-/-"
    if silent_s is not None:
        # At 80 columns a codec's column leaves less room.
        roomy = wide or state.options.codec == "none"
        return Text(f"no answer {'for ' if roomy else ''}{silent_s:.0f} s", style="red"), "-/-"
    rates = (words.mbit(_rate(*ends)) for ends in ((there, back), (back, there)))
    return _round_trip(there, wide=wide), "/".join(rates)


def _rate(sender: Mapping[str, Any], receiver: Mapping[str, Any]) -> float | None:
    """Bytes per second while they flow, as either end knows it: short bursts tell nothing."""
    sent: float | None = (sender.get("rate_bytes_per_s") or {}).get("send")
    received: float | None = (receiver.get("rate_bytes_per_s") or {}).get("receive")
    return received if sent is None else sent


def _round_trip(link: Mapping[str, Any], *, wide: bool) -> Text:
    rtt_s = link.get("rtt_s") or {}
    if rtt_s.get("last") is None:
        return Text("-")
    names = ("last", "min", "p50", "p99") if wide else ("last",)
    return Text("/".join(f"{rtt_s[name] * 1e3:.1f}" for name in names) + " ms")
