"""The demo's options and the files it writes."""

from pathlib import Path

import pytest

from geotrain.config import load_config
from geotrain.lab.demo.options import Options, layer_ranges, parse, site_toml, socket_path
from geotrain.lab.settings import LinkSettings


@pytest.mark.parametrize("regions", [1, 2, 3, 16])
def test_the_files_are_valid_and_agree_on_the_run(tmp_path, regions):
    options = Options(regions=regions, microbatches=40, codec="planes", usd_per_gb=0.05)
    configs = []
    for index, name in enumerate(options.names):
        path = tmp_path / f"{name}.toml"
        dial = f"10.77.0.{index + 2}:7400" if index < regions - 1 else None
        listen = f"10.77.0.{index + 1}:7400"
        path.write_text(site_toml(options, index, folder=tmp_path, listen=listen, dial=dial))
        configs.append(load_config(path))
    assert len({config.run.hash for config in configs}) == 1
    for index, config in enumerate(configs):
        assert config.index == index
        assert config.socket_path == socket_path(tmp_path, options.names[index])
        urls = {name: peer.url for name, peer in config.neighbours.items()}
        expected = {options.names[index - 1]: None} if index else {}
        if index < regions - 1:
            expected[options.names[index + 1]] = f"http://10.77.0.{index + 2}:7400"
        assert urls == expected
        prices = {peer.egress_usd_per_gb for peer in config.neighbours.values()}
        assert prices == ({0.05} if regions > 1 else set())
    run = configs[0].run
    assert run.plan.window == [40] * (regions - 1) + [1]
    assert (run.global_batch, run.compression.gradients) == (40, "planes")


@pytest.mark.parametrize(
    ("num_layers", "num_regions", "ranges"),
    [
        (6, 1, [(0, 6)]),
        (6, 4, [(0, 2), (2, 4), (4, 5), (5, 6)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_layers_are_spread_evenly(num_layers, num_regions, ranges):
    assert layer_ranges(num_layers, num_regions) == ranges


def test_options_have_the_documented_defaults():
    assert parse([]) == Options(
        regions=2, rtt_ms=100.0, mbit=1000.0, steps=30, microbatches=8, codec="none"
    )
    assert parse(["--rtt-ms", "0", "--codec", "planes", "--verify", "--json"]) == Options(
        rtt_ms=0.0, codec="planes", verify=True, json=True
    )
    options = parse(["--plain", "--no-baseline", "--usd-per-gb", "0.09"])
    assert (options.plain, options.no_baseline, options.usd_per_gb) == (True, True, 0.09)
    argv = [
        "--emulator",
        "relay",
        "--loss",
        "0.001",
        "--jitter-ms",
        "2",
        "--script",
        "weather.toml",
    ]
    options = parse(argv)
    assert (options.emulator, options.script) == ("relay", Path("weather.toml"))
    assert options.link == LinkSettings(
        delay_s=0.05, rate_bytes_per_s=125e6, jitter_s=0.002, loss=0.001
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--regions", "0"], "--regions must be from 1 to 16"),
        (["--rtt-ms", "-5"], "--rtt-ms must be from 0"),
        (["--mbit", "0"], "--mbit must be from 1"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--microbatches", "0"], "--microbatches must be from 1"),
        (["--codec", "zip"], "invalid choice"),
        (["--loss", "0.9"], "--loss must be from 0 to 0.5"),
        (["--jitter-ms", "-1"], "--jitter-ms must be from 0"),
        (["--usd-per-gb", "-1"], "--usd-per-gb must be from 0"),
        (["--usd-per-gb", "nan"], "--usd-per-gb must be from 0"),
        (["--script", "x", "--regions", "1"], "--script needs links"),
    ],
    ids=str,
)
def test_impossible_options_end_with_status_2_and_a_reason(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
