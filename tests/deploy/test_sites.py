"""The two example sites: each is fine by itself, and they fit together."""

import re
import sys
from urllib.parse import urlsplit

import pytest
from command_lines import example_lines
from deployed import DEPLOY, REGIONS, pod_site, port, site

from geotrain import cli

sys.path.insert(0, str(DEPLOY / "examples"))


@pytest.mark.parametrize("region", REGIONS)
def test_geotrain_check_is_content(region, capsys):
    file = DEPLOY / "sites" / f"{region}.toml"
    assert cli.main(["check", "--config", str(file)]) == 0
    assert f"{file} is fine" in capsys.readouterr().out


def test_both_have_the_same_run_in_their_order():
    virginia, frankfurt = (site(region) for region in REGIONS)
    assert virginia.run.hash == frankfurt.run.hash
    assert [virginia.index, frankfurt.index] == [0, 1]
    assert virginia.run.num_regions == 2


def test_one_dials_where_the_other_listens():
    virginia, frankfurt = (site(region) for region in REGIONS)
    url = virginia.neighbours["frankfurt"].url
    assert urlsplit(url).netloc == frankfurt.site.listen
    assert frankfurt.neighbours["virginia"].url is None


def test_no_port_meets_another_and_all_sites_use_the_same():
    for region in REGIONS:
        assert (port(site(region).site.listen), port(site(region).site.status)) == (7070, 7071)


def test_the_run_fits_the_script_that_its_lines_name():
    import nanogpt

    run = site("virginia").run
    assert run.regions[-1].last == nanogpt.GPTConfig().num_layers
    text = (DEPLOY / "examples" / "nanogpt.py").read_text(encoding="utf-8")
    assert f'"--batch", type=int, default={run.global_batch},' in text
    for file, example, argv in example_lines():
        if not file.startswith(("deploy/examples/", "deploy/README")):
            assert example.stem == "nanogpt", file
            assert f"--steps {run.steps}" in " ".join(argv).replace("=", " "), file


def test_each_site_file_has_a_geotrain_run_and_a_torchrun_line():
    for region in REGIONS:
        text = (DEPLOY / "sites" / f"{region}.toml").read_text(encoding="utf-8")
        assert re.search(rf"geotrain run --config deploy/sites/{region}.toml -- python ", text)
        assert re.search(rf"geotrain run --config deploy/sites/{region}.toml -- torchrun ", text)


def test_the_site_of_the_pod_is_one_of_them(tmp_path):
    pod = pod_site(tmp_path)
    assert cli.main(["check", "--config", str(pod.path)]) == 0
    assert pod.run.hash == site("frankfurt").run.hash
    ours, theirs = pod.site.model_dump(), site("frankfurt").site.model_dump()
    for own in ("listen", "link"):
        del ours[own], theirs[own]
    assert ours == theirs
    assert port(pod.site.listen) == port(site("frankfurt").site.listen)
