import json
from pathlib import Path

import pytest

from geotrain.config import Config, load_config
from geotrain.configuration.rules import SOCKET_PATH_LIMIT_BYTES, default_socket_path, is_local
from geotrain.configuration.run_table import RunConfig
from geotrain.errors import ConfigError, Problem

RUN = """
[run]
id = "wiki"
global_batch = 16
regions = [
    { name = "virginia", layers = "0:6" },
    { name = "frankfurt", layers = "6:9" },
    { name = "tokyo", layers = "9:12" },
]
"""
SITE = """
[site]
name = "frankfurt"
"""
TLS = """
[site.tls]
certificate = "keys/frankfurt.pem"
key = "frankfurt.key"
authority = "a.pem"
"""
RUN_TABLE = {
    "id": "wiki",
    "global_batch": 16,
    "regions": [{"name": "virginia", "layers": "0:6"}, {"name": "frankfurt", "layers": "6:9"}],
}


def load(folder: Path, text: str, *, header: str = "version = 1\n") -> Config:
    file = folder / "site.toml"
    file.write_text(header + text)
    return load_config(file)


def problems(folder: Path, text: str, *, header: str = "version = 1\n") -> dict[str, Problem]:
    """The problems of a file, by key."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, header=header)
    assert len({problem.key for problem in caught.value.problems}) == len(caught.value.problems)
    return {problem.key: problem for problem in caught.value.problems}


def test_smallest_file_resolves_every_default(tmp_path):
    config = load(tmp_path, RUN + SITE)
    assert config.path == tmp_path / "site.toml"
    assert (config.index, config.run.num_regions) == (1, 3)
    assert list(config.neighbours) == ["virginia", "tokyo"]
    assert config.neighbours["tokyo"].url is None
    assert [(region.first, region.last) for region in config.run.regions] == [
        (0, 6),
        (6, 9),
        (9, 12),
    ]
    assert config.run.canonical() == {
        "id": "wiki",
        "seed": 0,
        "steps": None,
        "regions": [
            {"name": "virginia", "layers": "0:6"},
            {"name": "frankfurt", "layers": "6:9"},
            {"name": "tokyo", "layers": "9:12"},
        ],
        "global_batch": 16,
        "precision": "fp32",
        "threads": 1,
        "max_grad_norm": None,
        "plan": {"microbatches": 8, "window": "classic", "replay": None},
        "compression": {"activations": "none", "gradients": "none"},
    }


def test_a_file_with_every_key_is_accepted(tmp_path):
    config = load(
        tmp_path,
        RUN
        + """
seed = 7
steps = 1000
precision = "bf16"
threads = 4
max_grad_norm = 1
plan = { microbatches = 4, window = [3, 2, 1], replay = "old/plan.jsonl" }
compression = { activations = "planes", gradients = "planes" }
[site]
name = "frankfurt"
listen = "[::]:7070"
status = "[::1]:0"
arena_mib = 64
mesh = { replica = 2, tensor = 4 }
socket = "run/rank.sock"
plan_log = "plan.jsonl"
[site.peers.virginia]
url = "http://virginia.example:7070"
egress_usd_per_gb = 0.02
[site.peers.tokyo]
[site.link]
security = "plaintext"
ping_interval_s = 0.5
congestion = "cubic"
[site.liveness]
silent_s = 5
wait_s = 60
[site.limits]
egress_usd_per_day = 12.5
in_flight = 6
in_flight_samples = 64
""",
    )
    assert config.run.max_grad_norm == 1.0
    assert config.neighbours["virginia"].egress_usd_per_gb == 0.02
    assert config.socket_path == tmp_path / "run" / "rank.sock"
    assert config.site.limits.in_flight == 6
    assert config.site.limits.in_flight_samples == 64
    assert config.replay_path == tmp_path / "old" / "plan.jsonl"
    assert config.plan_log_path == tmp_path / "plan.jsonl"
    assert config.site.link.congestion == "cubic"


@pytest.mark.parametrize("name", ["reno", "BBR", ""])
def test_a_congestion_control_is_one_of_three(tmp_path, name):
    found = problems(tmp_path, RUN + SITE + f'link.congestion = "{name}"')
    assert "cubic" in found["site.link.congestion"].allowed


def test_every_problem_is_told_at_once(tmp_path):
    found = problems(
        tmp_path,
        """
speed = 3
[run]
id = "wiki"
seed = -1
global_batch = "16"
regions = [{ name = "virginia", layers = "0:6" }, { name = "frank furt", layers = "5:9" }]
plan = { microbatches = true, window = [1] }
[site]
name = "virginai"
silent_s = 3
status = "0.0.0.0:7071"
peers.oslo = { url = "ftp://oslo" }
""",
    )
    assert set(found) == {
        "speed",
        "run.seed",
        "run.global_batch",
        "run.regions[1].name",
        "run.regions[1].layers",
        "run.plan.microbatches",
        "run.plan.window",
        "site.name",
        "site.silent_s",
        "site.status",
        "site.peers.oslo",
        "site.peers.oslo.url",
    }
    assert all(problem.file == str(tmp_path / "site.toml") for problem in found.values())
    assert str(found["run.seed"]) == (
        f"{tmp_path}/site.toml: run.seed: must be >= 0; remove the key to use 0 (got -1)"
    )
    assert "url" not in found["site.peers.oslo"].allowed
    assert "site.liveness.silent_s" in found["site.silent_s"].allowed


@pytest.mark.parametrize(
    ("wrong", "key", "nearest"),
    [
        ("[run]\nglobal_bach = 1", "run.global_bach", "global_batch"),
        ("[run.plan]\nmicrobatch = 1", "run.plan.microbatch", "microbatches"),
        ("[site]\nlisen = 'x'", "site.lisen", "listen"),
        ("[site.liveness]\nsilent = 1", "site.liveness.silent", "silent_s"),
        ("[site.peers.tokyo]\negress_usd = 1", "site.peers.tokyo.egress_usd", "egress_usd_per_gb"),
        ("[sites]", "sites", "site"),
    ],
)
def test_misspelt_key_names_the_nearest_valid_one(tmp_path, wrong, key, nearest):
    assert f'did you mean "{nearest}"?' in problems(tmp_path, wrong)[key].allowed


def test_misspelt_required_key_is_not_also_called_missing(tmp_path):
    found = problems(tmp_path, RUN.replace("global_batch", "globalbatch") + SITE)
    assert set(found) == {"run.globalbatch"}


@pytest.mark.parametrize(
    ("line", "key", "nearest"),
    [
        ('precision = "bf61"', "run.precision", "bf16"),
        ('compression = { gradients = "plane" }', "run.compression.gradients", "planes"),
    ],
)
def test_misspelt_value_names_the_nearest_choice(tmp_path, line, key, nearest):
    assert f'did you mean "{nearest}"?' in problems(tmp_path, RUN + line + SITE)[key].allowed


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("version = 2\n", "this geotrain reads version = 1 only"),
        ('version = "1"\n', "this geotrain reads version = 1 only"),
        ("version = true\n", "this geotrain reads version = 1 only"),
        ("", "is missing; write version = 1 at the top"),
        ("verison = 1\n", 'is missing; write version = 1 at the top (instead of "verison")'),
    ],
)
def test_unknown_version_is_refused_beside_all_else_that_is_wrong(tmp_path, header, message):
    found = problems(tmp_path, RUN + SITE, header=header)
    assert set(found) == {"version"}
    assert found["version"].allowed == message
    wrong = RUN.replace("global_batch = 16", "global_batch = 0") + SITE.replace("name", "nme", 1)
    found = problems(tmp_path, wrong, header=header)
    assert set(found) == {"version", "run.global_batch", "site.nme"}
    assert found["version"].allowed == message


def test_versions_of_both_files_are_told_beside_all_else(tmp_path):
    (tmp_path / "run.toml").write_text('version = 7\nid = "x"\nglobal_batch = 0\n')
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, 'run = "run.toml"\n[site]\n', header="version = 2\n")
    assert {(Path(problem.file).name, problem.key) for problem in caught.value.problems} == {
        ("site.toml", "version"),
        ("run.toml", "version"),
        ("run.toml", "global_batch"),
        ("run.toml", "regions"),
        ("site.toml", "site.name"),
    }


def test_a_run_file_that_cannot_be_read_does_not_hide_the_version(tmp_path):
    found = problems(tmp_path, 'run = "gone.toml"\n[site]\nname = "a"\n', header="")
    assert set(found) == {"version", "run"}


@pytest.mark.parametrize(
    ("ranges", "key", "message"),
    [
        (["1:6", "6:9", "9:12"], "run.regions[0].layers", "nobody owns 0:1"),
        (["0:6", "7:9", "9:12"], "run.regions[1].layers", "nobody owns layers 6:7"),
        (["0:6", "5:9", "9:12"], "run.regions[1].layers", "layers 5:6 are already virginia's"),
        (["0:6", "6:9", "8:12"], "run.regions[2].layers", "layers 8:9 are already frankfurt's"),
        (["0:6", "6:6", "6:12"], "run.regions[1].layers", "region frankfurt owns no layer"),
        (["0:6", "9:6", "6:12"], "run.regions[1].layers", "region frankfurt owns no layer"),
        (["0:6", "6-9", "9:12"], "run.regions[1].layers", "half-open"),
        (["0:6", "6:9", "9:٣"], "run.regions[2].layers", "half-open"),
    ],
)
def test_layer_ranges_must_tile_the_model(tmp_path, ranges, key, message):
    run = RUN
    for before, after in zip(("0:6", "6:9", "9:12"), ranges, strict=True):
        run = run.replace(f'layers = "{before}"', f'layers = "<{after}>"')
    found = problems(tmp_path, run.replace("<", "").replace(">", "") + SITE)
    assert set(found) == {key}
    assert message in found[key].allowed


def test_two_regions_cannot_share_a_name(tmp_path):
    found = problems(tmp_path, RUN.replace("tokyo", "virginia") + SITE)
    assert set(found) == {"run.regions[2].name"}


@pytest.mark.parametrize("window", ['"wide"', "0", "[2, 0, 1]", "[]", "true", "1.5", "4096"])
def test_window_that_means_nothing_is_one_problem(tmp_path, window):
    found = problems(tmp_path, RUN + f"plan.window = {window}" + SITE)
    assert set(found) == {"run.plan.window"}
    assert 'must be "auto", "classic"' in found["run.plan.window"].allowed


def test_windows_may_follow_the_links(tmp_path):
    assert load(tmp_path, RUN + 'plan.window = "auto"' + SITE).run.plan.window == "auto"


@pytest.mark.parametrize("count", ['"many"', "0", "4097", "true", "1.5", "[8]"])
def test_microbatches_that_mean_nothing_are_one_problem(tmp_path, count):
    found = problems(tmp_path, RUN + f"plan.microbatches = {count}" + SITE)
    assert set(found) == {"run.plan.microbatches"}
    assert 'must be "auto" or a whole number from 1 to 4096' in (
        found["run.plan.microbatches"].allowed
    )


def test_microbatches_follow_only_where_windows_do(tmp_path):
    both = 'plan = { microbatches = "auto", window = "auto" }'
    assert load(tmp_path, RUN + both + SITE).run.plan.microbatches == "auto"
    found = problems(tmp_path, RUN + 'plan.microbatches = "auto"' + SITE)
    assert "only with window" in found["run.plan.microbatches"].allowed


def test_window_list_wants_one_entry_a_region(tmp_path):
    found = problems(tmp_path, RUN + "plan.window = [2, 1]" + SITE)
    assert found["run.plan.window"].allowed == "must have one entry for each region: 3, not 2"


def test_more_microbatches_than_samples_are_refused(tmp_path):
    found = problems(tmp_path, RUN + "plan.microbatches = 17" + SITE)
    assert "must not exceed global_batch = 16" in found["run.plan.microbatches"].allowed


def test_a_site_must_be_a_region_and_its_peers_others(tmp_path):
    found = problems(tmp_path, RUN + '[site]\nname = "toky"\n[site.peers.toky]\n[site.peers.oslo]')
    assert set(found) == {"site.name", "site.peers.toky", "site.peers.oslo"}
    assert 'did you mean "tokyo"?' in found["site.name"].allowed
    assert "is this site itself" in found["site.peers.toky"].allowed
    assert "must be one of run.regions: virginia, " in found["site.peers.oslo"].allowed


def test_peers_beyond_the_neighbours_are_allowed_and_unused(tmp_path):
    config = load(tmp_path, RUN + SITE.replace("frankfurt", "virginia") + "[site.peers.tokyo]")
    assert list(config.neighbours) == ["frankfurt"]


@pytest.mark.parametrize("listen", ["0.0.0.0:7070", "[::]:7070", "8.8.8.8:1", "virginia.example:1"])
def test_public_listen_address_needs_plaintext_in_words(tmp_path, listen):
    site = SITE + f'listen = "{listen}"\n'
    found = problems(tmp_path, RUN + site)
    assert set(found) == {"site.link.security"}
    for words in (listen, "[site.tls]", "WireGuard", "ssh"):
        assert words in found["site.link.security"].allowed
    assert load(tmp_path, RUN + site + TLS).site.listen == listen
    assert load(tmp_path, RUN + site + '[site.link]\nsecurity = "plaintext"').site.listen == listen


def test_paths_of_tls_are_relative_to_the_file(tmp_path):
    config = load(tmp_path, RUN + SITE + TLS.replace('"a.pem"', '"/etc/a.pem"'))
    assert config.tls_files == {
        "certificate": tmp_path / "keys" / "frankfurt.pem",
        "key": tmp_path / "frankfurt.key",
        "authority": Path("/etc/a.pem"),
    }
    assert load(tmp_path, RUN + SITE).tls_files is None


def test_all_three_files_of_tls_are_wanted(tmp_path):
    found = problems(tmp_path, RUN + SITE + '[site.tls]\nkey = "a.key"')
    assert set(found) == {"site.tls.certificate", "site.tls.authority"}


def test_urls_and_tls_go_together(tmp_path):
    def peers(scheme):
        return f'[site.peers.tokyo]\nurl = "{scheme}://t:1"\n'

    found = problems(tmp_path, RUN + SITE + peers("https"))
    assert "needs [site.tls]" in found["site.peers.tokyo.url"].allowed
    found = problems(tmp_path, RUN + SITE + TLS + peers("http"))
    assert "must begin with https://" in found["site.peers.tokyo.url"].allowed
    assert load(tmp_path, RUN + SITE + TLS + peers("https")).neighbours["tokyo"].url


def test_tls_and_plaintext_contradict_each_other(tmp_path):
    found = problems(tmp_path, RUN + SITE + TLS + '[site.link]\nsecurity = "plaintext"')
    assert "contradicts [site.tls]" in found["site.link.security"].allowed


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("10.1.2.3:1", True),
        ("172.31.0.1:1", True),
        ("172.32.0.1:1", False),
        ("192.168.0.1:1", True),
        ("100.64.0.1:1", False),
        ("[fd00::1]:1", True),
        ("[2001:db8::1]:1", False),
        ("[::ffff:10.0.0.1]:1", True),
        ("[::ffff:8.8.8.8]:1", False),
        ("0.0.0.0:1", False),
        ("host:1", False),
    ],
)
def test_which_addresses_count_as_private(address, local):
    assert is_local(address) is local


@pytest.mark.parametrize("address", ["7070", "host", ":1", "host:", "h:65536", "::1:7070", "h:-1"])
def test_address_that_is_none(tmp_path, address):
    found = problems(tmp_path, RUN + SITE + f'listen = "{address}"')
    assert found["site.listen"].allowed == 'must be "host:port" or "[ipv6]:port", port 0 to 65535'


def test_status_page_stays_on_loopback(tmp_path):
    found = problems(tmp_path, RUN + SITE + 'status = "10.0.0.1:7071"')
    assert "loopback" in found["site.status"].allowed
    found = problems(tmp_path, RUN + SITE + 'status = "127.0.0.1:7070"')
    assert found["site.status"].allowed == "must differ from site.listen"


@pytest.mark.parametrize(
    "url",
    ["10.0.0.1:7070", "http://", "http://h", "http://h:0", "http://h:99999", "http://u@h:1",
     "http://h:1/x", "http://h:1/?q", "ftp://h:1", "HTTP://h:1", "http://[::1:70", "http://a..b:1",
     "http://exa mple:1", "http://h\\n:1", f"http://{'h' * 64}:1", f"http://{'h.' * 150}h:1"],
)  # fmt: skip
def test_url_that_cannot_be_dialled(tmp_path, url):
    found = problems(tmp_path, RUN + SITE + f'peers.tokyo.url = "{url}"')
    assert set(found) == {"site.peers.tokyo.url"}
    assert 'must be "https://host:port"' in found["site.peers.tokyo.url"].allowed


def test_liveness_limits_must_fit_together(tmp_path):
    found = problems(
        tmp_path,
        RUN + SITE + "liveness = { silent_s = 10, wait_s = 5 }\nlink.ping_interval_s = 20",
    )
    assert "must be >= liveness.silent_s = 10" in found["site.liveness.wait_s"].allowed
    found = problems(tmp_path, RUN + SITE + "liveness.silent_s = 2\nlink.ping_interval_s = 1.5")
    assert "at most half" in found["site.link.ping_interval_s"].allowed


def test_lanes_are_a_number_or_auto(tmp_path):
    assert load(tmp_path, RUN + SITE).site.link.lanes == "auto"
    assert load(tmp_path, RUN + SITE + "link.lanes = 8").site.link.lanes == 8
    for wrong in ("0", "65", '"many"', "true", "1.5"):
        found = problems(tmp_path, RUN + SITE + f"link.lanes = {wrong}")
        assert 'must be "auto" or a whole number' in found["site.link.lanes"].allowed


def test_hash_is_over_the_resolved_run(tmp_path):
    short = load(tmp_path, RUN + SITE)
    spelt_out = load(
        tmp_path,
        RUN.replace('id = "wiki"\nglobal_batch = 16', 'seed = 0\nglobal_batch = 16\nid = "wiki"')
        + 'plan = { window = "classic" }\n[site]\nname = "tokyo"\n',
    )
    other = load(tmp_path, RUN + "seed = 1" + SITE)
    assert short.run.hash == spelt_out.run.hash != other.run.hash
    assert len(bytes.fromhex(short.run.hash)) == 32
    assert json.loads(json.dumps(short.run.canonical())) == short.run.canonical()


def test_run_built_in_code_is_checked_as_well():
    assert RunConfig.model_validate(RUN_TABLE).index_of("frankfurt") == 1
    with pytest.raises(ValueError, match="one entry for each region"):
        RunConfig.model_validate(RUN_TABLE | {"plan": {"window": [1]}})
    with pytest.raises(ValueError, match="nobody owns"):
        RunConfig.model_validate(RUN_TABLE | {"regions": [{"name": "a", "layers": "1:2"}]})


@pytest.mark.parametrize("table", ["[run]", ""])
def test_run_file_may_carry_its_table_or_bare_keys(tmp_path, table):
    keys = RUN.replace("[run]", table)
    (tmp_path / "run.toml").write_text("version = 1\n" + keys)
    config = load(tmp_path, 'run = "run.toml"\n' + SITE)
    assert config.run.hash == load(tmp_path, RUN + SITE).run.hash


def test_problems_of_a_run_file_name_that_file(tmp_path):
    (tmp_path / "run.toml").write_text(RUN.replace("[run]", "sed = 1").replace("6:9", "6:10"))
    found = problems(tmp_path, 'run = "run.toml"\n[site]\nname = "oslo"\n')
    assert {key: Path(problem.file).name for key, problem in found.items()} == {
        "sed": "run.toml",
        "regions[2].layers": "run.toml",
        "site.name": "site.toml",
    }


def test_unreadable_files_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.toml: the file: cannot be read: No such file"):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match=r"the file: is not valid TOML: .*line 2"):
        load(tmp_path, "= 3")
    (tmp_path / "site.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(tmp_path / "site.toml")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load(tmp_path, "x = " + "[" * 100_000)
    found = problems(tmp_path, 'run = "run.toml"\n' + SITE)
    assert found["run"].allowed == "cannot be read: No such file or directory"
    assert found["run"].value == '"run.toml"'
    (tmp_path / "run.toml").write_text("x = ")
    with pytest.raises(ConfigError, match=r"run.toml: the file: is not valid TOML"):
        load(tmp_path, 'run = "run.toml"\n' + SITE)


def test_tables_of_the_wrong_kind(tmp_path):
    found = problems(tmp_path, "run = 3\nsite = []\n")
    assert found["run"].allowed == found["site"].allowed == "must be a table"


def test_default_socket_lies_in_the_runtime_directory(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert default_socket_path("wiki", "tokyo") == Path("/run/user/1000/geotrain/wiki.tokyo.sock")


def test_default_socket_path_always_fits(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    long = default_socket_path("r" * 63, "t" * 63)
    assert long.parent == Path("/run/user/1000/geotrain")
    assert long != default_socket_path("r" * 63, "u" * 63)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "d" * 200)
    deep = default_socket_path("wiki", "tokyo")
    assert deep.parent.parent == Path("/tmp")
    assert max(len(str(path)) for path in (long, deep)) <= SOCKET_PATH_LIMIT_BYTES


def test_socket_given_too_long_is_refused(tmp_path):
    found = problems(tmp_path, RUN + SITE + f'socket = "/tmp/{"s" * 120}"')
    assert "must be at most 107 bytes" in found["site.socket"].allowed


@pytest.mark.parametrize(
    ("socket", "text"),
    [
        ("", "is a folder"),
        ("/tmp", "is a folder"),
        ("a\\u0000b", "zero byte"),
        ("~no-such-user-at-all/x.sock", "user that this machine does not have"),
    ],
)
def test_socket_that_cannot_be_one_is_refused(tmp_path, socket, text):
    found = problems(tmp_path, RUN + SITE + f'socket = "{socket}"')
    assert text in found["site.socket"].allowed


def test_a_home_of_nobody_is_told_for_every_path(tmp_path):
    nobody = "~no-such-user-at-all/x"
    table = "".join(f'{key} = "{nobody}"\n' for key in ("certificate", "key", "authority"))
    text = RUN + SITE + f'plan_log = "{nobody}"\n[site.tls]\n{table}'
    found = problems(tmp_path, text)
    assert set(found) == {"site.plan_log", *(f"site.tls.{key}" for key in table.split()[::3])}
    assert all("user that this machine does not have" in each.allowed for each in found.values())
