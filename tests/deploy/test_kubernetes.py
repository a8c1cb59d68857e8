"""The Kubernetes objects against its own schemas, against each other, and against the image."""

import kubernetes_validate
import pytest
from deployed import (
    IMAGE_FOLDERS,
    dockerfile,
    kubernetes,
    mebibytes,
    pod,
    pod_containers,
    pod_site,
    port,
)

KINDS = ("ConfigMap", "Job", "NetworkPolicy", "PersistentVolumeClaim", "Service")
VERSIONS = ("1.29", "1.37")
"""The oldest with sidecars, and the newest there are schemas of."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_follows_the_schema(kind, version):
    kubernetes_validate.validate(kubernetes()[kind], version, strict=True)


def test_a_wrong_key_would_be_found():
    service = kubernetes()["Service"]
    wrong = {**service, "spec": {**service["spec"], "publishNotReady": True}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_these_are_all():
    assert tuple(sorted(kubernetes())) == KINDS


def test_selectors_find_the_pod():
    labels = kubernetes()["Job"]["spec"]["template"]["metadata"]["labels"]
    assert kubernetes()["Service"]["spec"]["selector"] == labels
    assert kubernetes()["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert all(one["metadata"]["labels"] == labels for one in kubernetes().values())


def test_the_links_port_is_the_same_everywhere(tmp_path):
    listen = port(pod_site(tmp_path).site.listen)
    (container_port,) = pod_containers()["daemon"]["ports"]
    (service_port,) = kubernetes()["Service"]["spec"]["ports"]
    ((policy_port,),) = [rule["ports"] for rule in kubernetes()["NetworkPolicy"]["spec"]["ingress"]]
    assert container_port["containerPort"] == service_port["port"] == listen
    assert service_port["targetPort"] == policy_port["port"] == container_port["name"]


def test_the_daemon_is_a_sidecar_that_the_trainer_waits_for():
    (daemon,) = pod()["initContainers"]
    (trainer,) = pod()["containers"]
    assert (daemon["name"], daemon["restartPolicy"]) == ("daemon", "Always")
    assert daemon["command"] == ["geotrain", "daemon"]
    assert "startupProbe" in daemon
    assert trainer["name"] == "trainer"
    assert pod()["restartPolicy"] == "Never"


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_ask_from_inside_the_pod(probe):
    """The status page is on loopback, out of the kubelet's reach; test_health.py runs this."""
    assert pod_containers()["daemon"][probe]["exec"] == {"command": ["geotrain", "status"]}
    assert pod_containers()["daemon"][probe]["timeoutSeconds"] >= 10


def test_every_mount_has_a_volume_and_every_reference_an_object(tmp_path):
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    mounted = set()
    for container in pod_containers().values():
        for mount in container["volumeMounts"]:
            assert mount["mountPath"] in (*IMAGE_FOLDERS, "/etc/geotrain", "/tmp")
            mounted.add(mount["name"])
    assert mounted == set(volumes)
    assert volumes["site"]["configMap"]["name"] == kubernetes()["ConfigMap"]["metadata"]["name"]
    claim = volumes["checkpoints"]["persistentVolumeClaim"]["claimName"]
    assert claim == kubernetes()["PersistentVolumeClaim"]["metadata"]["name"]


def test_both_containers_share_the_sockets_folder_and_the_site_file():
    (runtime,) = (rest for name, rest in dockerfile() if name == "ENV" and "XDG" in rest)
    for container in pod_containers().values():
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        environment = {one["name"]: one["value"] for one in container["env"]}
        assert environment["XDG_RUNTIME_DIR"] == mounts["socket"]
        assert f"XDG_RUNTIME_DIR={mounts['socket']}" in runtime
        assert environment["GEOTRAIN_CONFIG"] == f"{mounts['site']}/site.toml"
    assert "emptyDir" in {v["name"]: v for v in pod()["volumes"]}["socket"]


def test_memory_limits_hold_the_arena(tmp_path):
    arena_mib = pod_site(tmp_path).site.arena_mib
    for container in pod_containers().values():
        resources = container["resources"]
        assert resources["limits"]["memory"] == resources["requests"]["memory"]
        assert mebibytes(resources["limits"]["memory"]) >= 2 * arena_mib


def test_nobody_is_root():
    assert pod()["securityContext"]["runAsNonRoot"] is True
    for container in pod_containers().values():
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_a_listen_address_for_everyone_comes_with_a_policy(tmp_path):
    assert pod_site(tmp_path).site.listen.startswith("0.0.0.0:")
    assert kubernetes()["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress"]
    assert kubernetes()["Service"]["spec"]["type"] == "ClusterIP"
