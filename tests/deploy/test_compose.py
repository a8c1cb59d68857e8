"""compose.yaml against the Compose specification's schema, and against sites and image."""

import ipaddress
import json
from importlib.resources import files as package_files
from urllib.parse import urlsplit

import jsonschema
import pytest
from deployed import DEPLOY, IMAGE_FOLDERS, REGIONS, compose, mebibytes, site

from geotrain.configuration.rules import split_address


def mounts(service: str) -> dict[str, str]:
    """Target -> source."""
    volumes = compose()["services"][service]["volumes"]
    return {volume.split(":")[1]: volume.split(":")[0] for volume in volumes}


def test_it_follows_the_schema():
    folder = package_files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((folder / "compose-spec.json").read_text(encoding="utf-8"))
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(compose())] == []
    wrong = {**compose(), "services": {"daemon": {"imagine": "geotrain"}}}
    assert not validator.is_valid(wrong)


def test_each_region_has_a_daemon_and_a_trainer():
    expected = {f"{region}-{role}" for region in REGIONS for role in ("daemon", "trainer")}
    assert set(compose()["services"]) == expected


@pytest.mark.parametrize("region", REGIONS)
def test_daemon_and_trainer_share_the_socket_and_nothing_else_does(region):
    volume = mounts(f"{region}-daemon")["/run/geotrain"]
    users = [s for s in compose()["services"] if mounts(s).get("/run/geotrain") == volume]
    assert sorted(users) == [f"{region}-daemon", f"{region}-trainer"]


def test_every_volume_is_declared_and_used_and_mounted_where_the_image_has_a_place():
    used = set()
    for service in compose()["services"]:
        for target, source in mounts(service).items():
            if source.startswith("."):
                assert (DEPLOY / source).is_dir()
            else:
                assert target in IMAGE_FOLDERS
                used.add(source)
    assert used == set(compose()["volumes"])


@pytest.mark.parametrize("region", REGIONS)
def test_both_processes_read_the_regions_own_site_file(region):
    for role in ("daemon", "trainer"):
        service = compose()["services"][f"{region}-{role}"]
        folder, _, name = service["environment"]["GEOTRAIN_CONFIG"].rpartition("/")
        assert mounts(f"{region}-{role}")[folder] == "./sites"
        assert name == f"{region}.toml"


def test_only_the_daemons_are_in_the_network_that_joins_the_regions():
    networks = {name: set(one["networks"]) for name, one in compose()["services"].items()}
    for region in REGIONS:
        assert networks[f"{region}-daemon"] == {region, "link"}
        assert networks[f"{region}-trainer"] == {region}
    assert set(compose()["networks"]) == {*REGIONS, "link"}


def test_addresses_are_those_of_the_sites():
    (pool,) = compose()["networks"]["link"]["ipam"]["config"]
    addresses = {
        region: compose()["services"][f"{region}-daemon"]["networks"]["link"]["ipv4_address"]
        for region in REGIONS
    }
    assert len({*addresses.values(), pool["gateway"]}) == 3
    for address in (*addresses.values(), pool["gateway"]):
        assert ipaddress.ip_address(address) in ipaddress.ip_network(pool["subnet"])
    assert split_address(site("frankfurt").site.listen)[0] == addresses["frankfurt"]
    assert urlsplit(site("virginia").neighbours["frankfurt"].url).hostname == addresses["frankfurt"]


def test_no_port_is_published():
    assert all("ports" not in service for service in compose()["services"].values())


@pytest.mark.parametrize("region", REGIONS)
def test_a_trainer_waits_for_its_daemon_and_has_no_health_check_of_a_daemon(region):
    trainer = compose()["services"][f"{region}-trainer"]
    assert trainer["depends_on"] == {f"{region}-daemon": {"condition": "service_healthy"}}
    assert trainer["healthcheck"] == {"disable": True}
    assert "healthcheck" not in compose()["services"][f"{region}-daemon"]  # the image's own


@pytest.mark.parametrize("region", REGIONS)
def test_memory_limits_hold_the_arena(region):
    for role in ("daemon", "trainer"):
        limit = mebibytes(compose()["services"][f"{region}-{role}"]["mem_limit"])
        assert limit >= 2 * site(region).site.arena_mib


def test_build_paths_are_there():
    for region in REGIONS:
        build = compose()["services"][f"{region}-daemon"]["build"]
        context = (DEPLOY / build["context"]).resolve()
        assert (context / "pyproject.toml").exists()
        assert (context / build["dockerfile"]).exists()
