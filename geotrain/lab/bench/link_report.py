"""The figures of `geotrain bench link`, as JSON and as a small table. Pure."""

from collections.abc import Mapping
from typing import Any

from geotrain.lab.bench.link_options import LinkBench

Figures = Mapping[str, Mapping[str, Any]]
"""Region -> what its end counted, the leading one first."""


def report(
    options: LinkBench,
    figures: Figures,
    *,
    emulator: str,
    sites_congestion: str | None,
    load: float,
    num_cpus: int | None,
) -> dict[str, Any]:
    """Every field of the JSON object.

    `mbit_s` and `utilisation` are those of the slower direction; `cpu_s_per_gb` is both ends'
    together, for a GB of payload that got across; the rest are sums and worst cases.
    """
    leader = next(iter(figures.values()))
    directions = _directions(options, figures)
    rates = [direction["mbit_s"] for direction in directions.values()]
    slowest = min(rates)
    repeated = [end["retransmitted_bytes"] for end in figures.values()]
    lags = {region: end["loop_lag_ms"]["p99"] for region, end in figures.items()}
    controls = sorted({name for end in figures.values() for name in end["congestion"]})
    return {
        "mbit_s": slowest,
        "utilisation": _share(slowest, options.mbit if options.config is None else None),
        "tls": leader["tls"],
        "lanes": leader["lanes"],
        "cpu_s_per_gb": round(sum(end["cpu_s_per_gb"] for end in figures.values()), 3),
        "rtt_ms": leader["rtt_ms"],
        "retransmitted_bytes": None if None in repeated else sum(repeated),
        "loop_lag_ms_p99": max(lags.values()),
        "congestion": {"sites": sites_congestion, "link": "+".join(controls)},
        "directions": directions,
        "cpu_s_per_gb_of": {name: round(end["cpu_s_per_gb"], 3) for name, end in figures.items()},
        "loop_lag_ms_p99_of": lags,
        "asked": _asked(options),
        "emulator": emulator,
        "load": load,
        "num_cpus": num_cpus,
    }


def _directions(options: LinkBench, figures: Figures) -> dict[str, dict[str, Any]]:
    first, second = figures
    found = {}
    for source, target in ((first, second), (second, first)):
        rate = figures[source]["sent_bytes_per_s"]
        if rate is None:
            continue
        mbit_s = round(rate * 8e-6, 2)
        found[f"{source} to {target}"] = {
            "mbit_s": mbit_s,
            "utilisation": _share(mbit_s, options.mbit if options.config is None else None),
            "retransmitted_bytes": figures[source]["retransmitted_bytes"],
        }
    return found


def _asked(options: LinkBench) -> dict[str, Any]:
    common = {
        "message_mib": options.message_bytes / (1 << 20),
        "seconds": options.seconds,
        "lanes": options.lanes or "auto",
        "both_ways": options.both_ways,
    }
    if options.config is not None:
        return {**common, "peer": options.peer}
    return {
        **common,
        "rtt_ms": options.rtt_s * 1e3,
        "mbit": options.mbit,
        "loss": options.loss,
        "jitter_ms": options.jitter_s * 1e3,
        "tls": options.tls,
        "congestion": options.congestion or "auto",
    }


def _share(mbit_s: float, asked_mbit: float | None) -> float | None:
    return None if asked_mbit is None else round(mbit_s / asked_mbit, 4)


def table(result: Mapping[str, Any]) -> str:
    """For people."""
    asked, lanes = result["asked"], result["lanes"]
    lines = [_where(result, asked), ""]
    for name, direction in result["directions"].items():
        share = direction["utilisation"]
        remark = f"  {share:.1%} of the rate asked for" if share is not None else ""
        lines.append(f"{name:<24}{direction['mbit_s']:10.1f} Mbit/s{remark}")
    lines.append(f"{'lanes':<24}{lanes:10d}  congestion control {result['congestion']['link']}")
    lines.append(f"{'TLS':<24}{result['tls']:>10}")
    for name, text in (("idle", "round trip, idle"), ("loaded", "round trip, loaded")):
        quantiles = result["rtt_ms"][name]
        if quantiles is not None:
            row = "  ".join(f"{key} {quantiles[key]:.1f}" for key in ("min", "p50", "p99"))
            lines.append(f"{text:<24}{row} ms, {quantiles['count']} control records")
    repeated = result["retransmitted_bytes"]
    if repeated is not None:
        lines.append(f"{'sent again by TCP':<24}{repeated / 1e6:10.2f} MB")
    lines.append(f"{'CPU, both ends':<24}{result['cpu_s_per_gb']:10.2f} s per GB of payload")
    lines.append(f"{'loop lag, p99':<24}{result['loop_lag_ms_p99']:10.2f} ms")
    if result["num_cpus"] is not None:
        lines.append(f"load {result['load']:.2f} on {result['num_cpus']} CPUs when it began")
    return "\n".join(lines)


def _where(result: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    size = f"messages of {asked['message_mib']:g} MiB for {asked['seconds']:g} s"
    if "peer" in asked:
        return f"link to {asked['peer']}, {size}"
    if result["emulator"] == "none":
        return f"loopback, nothing emulated, {size}"
    rate = "any rate" if asked["mbit"] is None else f"{asked['mbit']:g} Mbit/s"
    path = f"{asked['rtt_ms']:g} ms round trip, {rate}"
    path += f", jitter {asked['jitter_ms']:g} ms" if asked["jitter_ms"] else ""
    path += f", loss {asked['loss']:.2%}" if asked["loss"] else ""
    sites = result["congestion"]["sites"] or "the machine's"
    return f"link: {path} ({result['emulator']}, sites' kernels {sites}); {size}"
