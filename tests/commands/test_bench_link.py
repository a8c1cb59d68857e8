"""`geotrain bench link`: its options, and what follows from them."""

import pytest

from geotrain.commands.bench import parse
from geotrain.config import load_config
from geotrain.errors import ConfigError
from geotrain.lab.bench.link import real_plan
from geotrain.lab.bench.link_options import EndPlan, LinkBench


def test_defaults():
    assert parse(["link"]) == LinkBench()


def test_every_option():
    given = "--rtt-ms 50 --mbit 200 --loss 0.001 --jitter-ms 2 --lanes 1 --congestion cubic "
    given += "--message-mib 4 --seconds 3 --both-ways --emulator netns --no-tls --json"
    assert parse(["link", *given.split()]) == LinkBench(
        rtt_s=0.05,
        mbit=200.0,
        loss=0.001,
        jitter_s=0.002,
        lanes=1,
        congestion="cubic",
        message_bytes=4 << 20,
        seconds=3.0,
        both_ways=True,
        emulator="netns",
        tls=False,
        json=True,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--mbit -1", "--mbit must be 0, or from 1"),
        ("--loss 1", "--loss must be from 0 to 0.5"),
        ("--seconds 0", "--seconds must be from 0.5"),
        ("--message-mib 0", "--message-mib must be from 0.01"),
        ("--lanes 0", "--lanes must be auto, or from 1"),
        ("--lanes many", "invalid _lanes value"),
        ("--emulator relay --congestion bbr", "relays and the loopback cannot"),
        ("--rtt-ms 0 --mbit 0 --congestion bbr", "relays and the loopback cannot"),
        ("--config site.toml --peer a --no-tls", "leave out --tls"),
        ("--config site.toml", "--config and --peer go together"),
        ("--config site.toml --peer a --rtt-ms 5 --loss 0.1", "leave out --rtt-ms, --loss"),
    ],
)
def test_what_cannot_be_is_refused(given, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["link", *given.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_without_any_limit_nothing_is_emulated():
    options = parse(["link", "--rtt-ms", "0", "--mbit", "0"])
    assert (options.is_emulated, options.emulator) == (False, "relay")
    assert parse(["link", "--rtt-ms", "0"]).is_emulated


@pytest.mark.parametrize("mbit", [0, 20, 1000])
@pytest.mark.parametrize("message_mib", [0.013, 1, 256])
def test_the_window_holds_the_path_and_two_messages_at_least(mbit, message_mib):
    options = parse(["link", "--mbit", str(mbit), "--message-mib", str(message_mib)])
    traffic = options.traffic
    assert traffic.num_slots >= 2
    assert traffic.message_bytes % 64 == 0
    assert traffic.num_slots * traffic.message_bytes >= mbit * 1e6 / 8 * options.rtt_s


def test_a_plan_survives_the_way_to_its_process():
    plan = LinkBench(congestion="cubic").plan(1, url=None, host="10.77.0.2", port=0)
    assert EndPlan.from_json(plan.to_json()) == plan
    files = {"certificate": "a.pem", "key": "a.key", "authority": "authority.pem"}
    plan = LinkBench().plan(0, url="https://h:1", host="10.77.0.2", port=0, tls=files)
    assert EndPlan.from_json(plan.to_json()).tls == files


SITE = """
version = 1
[run]
id = "weather"
global_batch = 8
regions = [{ name = "a", layers = "0:1" }, { name = "b", layers = "1:2" }, \
{ name = "c", layers = "2:3" }]
[site]
name = "b"
listen = "127.0.0.1:7070"
[site.peers.a]
url = "http://10.0.0.1:7070"
"""


def test_a_real_link_takes_everything_from_the_config(tmp_path):
    file = tmp_path / "b.toml"
    file.write_text(SITE)
    config = load_config(file)
    options = parse(["link", "--config", str(file), "--peer", "a", "--seconds", "5"])
    plan = real_plan(options, config)
    assert (plan.region, plan.index, plan.peer) == ("b", 1, "a")
    assert (plan.url, plan.host, plan.port) == ("http://10.0.0.1:7070", "127.0.0.1", 7070)
    assert plan.run["bench"]["seconds"] == 5.0 and plan.run_id == "weather"
    leading = real_plan(parse(["link", "--config", str(file), "--peer", "c"]), config)
    assert (leading.index, leading.url, leading.tls) == (0, None, None)
    tls = '[site.tls]\ncertificate = "b.pem"\nkey = "b.key"\nauthority = "authority.pem"\n'
    file.write_text(SITE.replace("http:", "https:") + tls)
    plan = real_plan(options, load_config(file))
    assert plan.url == "https://10.0.0.1:7070"
    assert plan.tls["key"] == str(tmp_path / "b.key")
    with pytest.raises(ConfigError, match="--peer x: no neighbour of b; there are: a, c"):
        real_plan(parse(["link", "--config", str(file), "--peer", "x"]), config)
