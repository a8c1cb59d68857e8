from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from geotrain.commands.check import (
    MemoryLimit,
    arena_problem,
    check,
    congestion,
    memory_limit,
    summary,
)
from geotrain.config import Config, load_config
from geotrain.daemon.tls import site_tls, warnings
from geotrain.errors import ConfigError
from geotrain.lab.certificates import Authority
from geotrain.transport.congestion import InForce, probe

MIB = 1 << 20
SITE = """
version = 1
[run]
id = "wiki"
global_batch = 16
steps = 100
regions = [{ name = "virginia", layers = "0:6" }, { name = "frankfurt", layers = "6:12" }]
[site]
name = "virginia"
arena_mib = 256
[site.peers.frankfurt]
url = "http://10.0.0.2:7070"
egress_usd_per_gb = 0.02
"""


@pytest.fixture
def config(tmp_path) -> Config:
    file = tmp_path / "site.toml"
    file.write_text(SITE)
    return load_config(file)


def machine(folder: Path, cgroup: str, limits: dict[str, str]) -> MemoryLimit:
    """The limit on a machine with this /proc/self/cgroup and these files below /sys/fs/cgroup."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in limits.items():
        file = folder / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return memory_limit(proc=folder / "proc", cgroups=folder / "cgroup")


def test_version_2_limit_of_the_own_cgroup(tmp_path):
    limit = machine(tmp_path, "0::/job.slice/run\n", {"job.slice/run/memory.max": str(64 * MIB)})
    assert limit.limit_bytes == 64 * MIB
    assert "job.slice/run/memory.max" in limit.source


def test_tightest_parent_counts(tmp_path):
    limits = {"job.slice/run/memory.max": "max", "job.slice/memory.max": str(32 * MIB)}
    assert machine(tmp_path, "0::/job.slice/run\n", limits).limit_bytes == 32 * MIB


def test_version_1_limit(tmp_path):
    limits = {"memory/job/memory.limit_in_bytes": str(48 * MIB)}
    limit = machine(tmp_path, "3:cpu:/x\n4:memory,hugetlb:/job\n0::/\n", limits)
    assert limit.limit_bytes == 48 * MIB


def test_container_that_sees_only_its_root(tmp_path):
    limits = {"memory.max": str(16 * MIB)}
    assert machine(tmp_path, "0::/host/path/of/it\n", limits).limit_bytes == 16 * MIB


@pytest.mark.parametrize("text", ["max", "9223372036854771712"])
def test_no_limit_leaves_the_machines_memory(tmp_path, text):
    limit = machine(tmp_path, "0::/\n4:memory:/\n", {"memory.max": text})
    assert limit.source == "what this machine has"
    assert limit.limit_bytes > MIB


def test_no_cgroups_at_all(tmp_path):
    limit = memory_limit(proc=tmp_path / "none", cgroups=tmp_path)
    assert limit.source == "what this machine has"


def test_arena_beyond_the_limit_is_a_problem(config):
    memory = MemoryLimit(limit_bytes=256 * MIB, source="the limit")
    problem = arena_problem(config, memory)
    assert problem is not None
    assert str(problem) == (
        f"{config.path}: site.arena_mib: must be below 256 MiB, the limit (got 256)"
    )
    assert arena_problem(config, MemoryLimit(limit_bytes=257 * MIB, source="x")) is None


def test_summary_tells_what_the_file_comes_to(config):
    memory = MemoryLimit(limit_bytes=400 * MIB, source="what the cgroup allows (x)")
    lines = [f"{label:<8}{text}" for label, text in summary(config, memory, None)]
    assert lines == [
        f"run     wiki, 100 steps, hash {config.run.hash[:12]}",
        "step    16 samples in 8 microbatches, fp32, window classic",
        "region  virginia: layers 0:6 (this site)",
        "        frankfurt: layers 6:12",
        "listen  127.0.0.1:7070, status page 127.0.0.1:7071",
        "peer    frankfurt: dialled at http://10.0.0.2:7070, egress 0.02 $/GB",
        f"links   {congestion('auto', probe('auto'))}",
        "        not encrypted: no [site.tls] here",
        f"socket  {config.socket_path}",
        "arena   256 MiB for each rank; 400 MiB is what the cgroup allows (x); "
        "the arena takes over half",
    ]


def test_congestion_says_what_links_run_and_what_was_refused():
    as_asked = InForce(name="cubic", refused="")
    assert congestion("auto", as_asked) == "congestion control cubic (auto)"
    unknown = InForce(name="", refused="")
    assert congestion("auto", unknown) == "congestion control as the system has it (auto)"
    told = congestion("bbr", InForce(name="cubic", refused="bbr cannot be had here (no)"))
    assert told == "congestion control cubic; bbr cannot be had here (no)"


def test_check_prints_the_summary(config, capsys):
    assert check(config) == 0
    assert capsys.readouterr().out.startswith(f"{config.path} is fine\n  run ")


def test_check_refuses_an_arena_that_no_machine_has(tmp_path):
    file = tmp_path / "site.toml"
    file.write_text(SITE.replace("arena_mib = 256", f"arena_mib = {1 << 20}"))
    with pytest.raises(ConfigError, match=r"site\.arena_mib: must be below"):
        check(load_config(file))


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def with_tls(folder: Path) -> Config:
    file = folder / "site.toml"
    names = {"certificate": "virginia.pem", "key": "virginia.key", "authority": "authority.pem"}
    lines = [f'{key} = "{name}"' for key, name in names.items()]
    file.write_text("\n".join([SITE.replace("http:", "https:"), "[site.tls]", *lines]))
    return load_config(file)


def test_check_tells_until_when_the_certificate_is_good(tmp_path, authority, capsys):
    now = datetime.now(UTC)
    authority.issue("virginia", ends=now + timedelta(days=30))
    assert check(with_tls(tmp_path)) == 0
    told = capsys.readouterr().out
    assert "encrypted with TLS 1.3; this site's certificate is good until 2" in told
    assert "warning" not in told


def test_check_warns_before_a_certificate_ends_and_of_an_open_key(tmp_path, authority, capsys):
    files = authority.issue("virginia", ends=datetime.now(UTC) + timedelta(days=13))
    files.key.chmod(0o640)
    assert check(with_tls(tmp_path)) == 0
    told = capsys.readouterr().out
    assert "warning   the certificate ends in 13.0 days; renew it" in told
    assert f"warning   others than its owner can read or change {files.key}: chmod 600" in told
    tls = site_tls(with_tls(tmp_path))
    assert warnings(tls, now_s=tls.not_after_s - 14.5 * 86_400).ends_soon == ""
    assert "in 0.0 days" in warnings(tls, now_s=tls.not_after_s + 5.0).ends_soon


def test_check_names_the_key_of_a_certificate_that_is_not_good(tmp_path, authority):
    config = with_tls(tmp_path)
    with pytest.raises(ConfigError, match=r"site\.tls\.certificate: cannot be read"):
        check(config)
    authority.issue("frankfurt", file_name="virginia")
    with pytest.raises(ConfigError, match=r"site\.tls\.certificate: must name region virginia"):
        check(config)
