"""What `deploy/kubernetes` renders to: held against the API's schemas, and its container run on this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

import kubernetes_validate
import pytest
import yaml

from tests.e2e.log_files import RECORDS, write_partition
from tests.support.daemon import Daemon
from tests.support.ports import free_ports
from tests.support.processes import Server, program
from tieringd.config.load import parse_config

ROOT = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("statefulset", "strimzi", "redpanda")
VERSIONS = ("1.30", "1.33", "1.37")
"""The oldest in which a native sidecar ends after the broker, one between, and the newest."""
ENVIRON = {"TIERINGD_ACCESS_KEY": "key", "TIERINGD_SECRET_KEY": "secret"}


@cache
def rendered(overlay: str) -> list[dict]:
    """Return the resources that kustomize makes."""
    done = subprocess.run(
        [program("kubectl"), "kustomize", str(ROOT / overlay)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@cache
def values() -> dict:
    """Return the pod template that is given to Redpanda's chart."""
    return yaml.safe_load((ROOT / "redpanda" / "values.yaml").read_text())["statefulset"]["podTemplate"]


def of_kind(overlay: str, *kinds: str) -> list[dict]:
    return [one for one in rendered(overlay) if one["kind"] in kinds]


def pod_templates(overlay: str) -> list[dict]:
    """Return the pods' labels and specs, those that Redpanda's chart makes included."""
    if overlay == "redpanda":
        return [{"metadata": {"labels": values()["labels"]}, "spec": values()["spec"]}]
    return [one["spec"]["template"] for one in of_kind(overlay, "StatefulSet", "Deployment")]


def container(template: dict) -> dict:
    """Return the container that tieringd runs in."""
    spec = template["spec"]
    (found,) = [
        one
        for one in [*spec.get("initContainers", []), *spec.get("containers", [])]
        if one["name"] == "tieringd"
    ]
    return found


def config_text(overlay: str) -> str:
    (found,) = [one for one in of_kind(overlay, "ConfigMap") if one["metadata"]["name"] == "tieringd"]
    return found["data"]["tieringd.yaml"]


def pod_environ(overlay: str, template: dict) -> dict[str, str]:
    """Return the variables that the container gets, those of the Secret included."""
    found = dict(ENVIRON)
    for one in container(template).get("env", []):
        value = one.get("value", f"{overlay}-0")
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        found[one["name"]] = value
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_resources_keep_to_the_schemas_of_the_api(overlay, version):
    """Resources have no field that the API does not know, apart from the Prometheus Operator's own kind."""
    for resource in rendered(overlay):
        if resource["kind"] != "PodMonitor":
            kubernetes_validate.validate(resource, version, strict=True)
    if overlay == "redpanda":
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "redpanda-0"}}
        spec = values()["spec"] | {"containers": [{"name": "redpanda", "image": "redpanda"}]}
        kubernetes_validate.validate(pod | {"spec": spec}, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_of_it_can_take_the_broker_out_of_service(overlay):
    """No probe, no container that ends with tieringd, and a policy that closes one port alone."""
    for template in pod_templates(overlay):
        found = container(template)
        assert not [name for name in found if name.endswith("Probe")]
        assert found["command"][:2] == ["/bin/sh", "/etc/tieringd-supervise/supervise.sh"]
        is_sidecar = found in template["spec"].get("initContainers", [])
        assert is_sidecar == (overlay != "strimzi")
        assert found.get("restartPolicy") == ("Always" if is_sidecar else None)
    (policy,) = of_kind(overlay, "NetworkPolicy")
    others, admin = policy["spec"]["ingress"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert "from" not in others
    assert {port for one in others["ports"] for port in range(one["port"], one["endPort"] + 1)} == set(
        range(1, 65536)
    ) - {9640}
    assert [one["port"] for one in admin["ports"]] == [9640]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_prometheus_and_the_policy_select_the_pods(overlay):
    """Selectors name a label of the pods and a port of the container, on which the admin page listens."""
    (monitor,) = of_kind(overlay, "PodMonitor")
    (policy,) = of_kind(overlay, "NetworkPolicy")
    endpoint, detail = monitor["spec"]["podMetricsEndpoints"]
    assert {"targetLabel": "job", "replacement": "tieringd"} in endpoint["relabelings"]
    # The rules look at the job of the small page: series of both in one job would be there twice.
    assert {"targetLabel": "job", "replacement": "tieringd-partitions"} in detail["relabelings"]
    assert (detail["path"], detail["port"]) == ("/metrics/partitions", endpoint["port"])
    for template in pod_templates(overlay):
        labels = template["metadata"]["labels"]
        for selector in (monitor["spec"]["selector"], policy["spec"]["podSelector"]):
            assert selector["matchLabels"].items() <= labels.items()
        ports = {one["name"]: one["containerPort"] for one in container(template)["ports"]}
        config = parse_config(config_text(overlay), source=overlay, environ=pod_environ(overlay, template))
        assert (config.admin.host, config.admin.port) == ("0.0.0.0", ports[endpoint["port"]])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_log_and_pins_are_on_one_mount(overlay):
    """A link leads nowhere from one mount to another, also where both are of the same volume."""
    for template in pod_templates(overlay):
        mounts = {PurePosixPath(one["mountPath"]): one for one in container(template)["volumeMounts"]}
        assert not [one for one in mounts.values() if "subPath" in one]

        def mount_of(path, mounts=mounts):
            return next(mounts[one] for one in (path, *path.parents) if one in mounts)

        config = parse_config(config_text(overlay), source=overlay, environ=pod_environ(overlay, template))
        state = PurePosixPath(config.state_directory)
        for log_dir in map(PurePosixPath, config.broker.log_dirs):
            if config.broker.kind == "redpanda":
                continue  # Its segments are not pinned.
            assert mount_of(log_dir) is mount_of(state)
            # A log directory that is the root of its mount would have no place for pins beside it.
            assert log_dir not in mounts
            assert log_dir not in state.parents
            assert not mount_of(log_dir).get("readOnly", False)
        volumes = {one["name"] for one in template["spec"].get("volumes", [])}
        claims = {
            one["metadata"]["name"]
            for resource in of_kind(overlay, "StatefulSet")
            for one in resource["spec"]["volumeClaimTemplates"]
        }
        known = volumes | claims | ({"datadir"} if overlay == "redpanda" else set())
        assert {one["name"] for one in mounts.values()} <= known


def test_sidecar_has_the_broker_s_volume_where_the_broker_has_it():
    """The sidecar runs as the broker's user, because another user may be refused a link."""
    (template,) = pod_templates("statefulset")
    (broker,) = template["spec"]["containers"]
    ours = container(template)
    assert broker["volumeMounts"][0] in ours["volumeMounts"]
    assert broker["securityContext"]["runAsUser"] == ours["securityContext"]["runAsUser"]
    (log_dir,) = [one["value"] for one in broker["env"] if one["name"] == "KAFKA_LOG_DIRS"]
    assert yaml.safe_load(config_text("statefulset"))["broker"]["log_dirs"] == [log_dir]


def test_each_strimzi_broker_has_one_pod_with_its_own_volume():
    """Each pod is on its broker's node, and no selector matches it for another broker."""
    seen = {}
    for one in of_kind("strimzi", "Deployment"):
        spec = one["spec"]["template"]["spec"]
        (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        broker = term["labelSelector"]["matchLabels"]["strimzi.io/pod-name"]
        number = broker.rpartition("-")[2]
        environ = pod_environ("strimzi", one["spec"]["template"])
        assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == f"data-0-{broker}"
        assert environ["LOG_DIR"] == f"/var/lib/kafka/data-0/kafka-log{number}"
        assert environ["SUPERVISE_WAIT_FOR"] == f"{environ['LOG_DIR']}/meta.properties"
        # Of the term only the broker's own label counts: its pods do not have ours.
        assert list(term["labelSelector"]["matchLabels"]) == ["strimzi.io/pod-name"]
        assert one["spec"]["selector"]["matchLabels"]["tieringd-broker"] == number
        assert one["spec"]["strategy"] == {"type": "Recreate"}
        seen[broker] = one["metadata"]["name"]
    assert seen == {f"my-cluster-broker-{number}": f"tieringd-{number}" for number in range(3)}


class Pod(Daemon):
    """The rendered container as a process on this host: its mounts are directories of a test."""

    def __init__(self, directory: Path, **changes) -> None:
        """Make the mounts; *changes* are to the configuration, for want of a broker and a store."""
        (template,) = pod_templates("statefulset")
        found = container(template)
        self.mounts = {one["mountPath"]: directory / one["name"] for one in found["volumeMounts"]}
        for path in self.mounts.values():
            path.mkdir()
        config = yaml.safe_load(self.mapped(config_text("statefulset"))) | changes
        config = {name: value for name, value in config.items() if value is not None}
        self.config = self.mounts["/etc/tieringd"] / "tieringd.yaml"
        self.config.write_text(yaml.safe_dump(config))
        (script,) = [
            one["data"]["supervise.sh"]
            for one in of_kind("statefulset", "ConfigMap")
            if "supervise.sh" in one["data"]
        ]
        (self.mounts["/etc/tieringd-supervise"] / "supervise.sh").write_text(script)
        environ = {name: self.mapped(value) for name, value in pod_environ("statefulset", template).items()}
        self.wait_for = Path(environ["SUPERVISE_WAIT_FOR"])
        self.environ = (
            os.environ
            | environ
            | {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "SUPERVISE_INTERVAL_SECONDS": "0.5",
                "SUPERVISE_REST_SECONDS": "0.2",
                # A machine that stands still loses one answer, and not the next one.
                "SUPERVISE_SILENT_MAX": "2",
                "SUPERVISE_HEALTH_URL": f"http://127.0.0.1:{config['admin']['port']}/healthz",
            }
        )
        self._url = f"http://127.0.0.1:{config['admin']['port']}"
        self.server = Server(
            [self.mapped(one) for one in found["command"]],
            output=directory / "container.log",
            start=self._launched,
        )

    def mapped(self, text: str) -> str:
        """Return *text* with the container's paths as they are on this host."""
        for mount, path in sorted(self.mounts.items(), key=lambda item: -len(item[0])):
            text = text.replace(mount, str(path)) if mount != "/tmp" else text
        return text

    def _launched(self, *, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.server.command, stdout=stdout, stderr=stderr, env=self.environ, start_new_session=True
        )

    def starts(self) -> list[dict]:
        """Return the starts of tieringd that the log shows."""
        return self.events("starting")

    def pid(self) -> int:
        """Return the process id of tieringd, which is the supervisor's child."""
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text().split()
        (found,) = [
            int(one) for one in children if b"tieringd\0run" in Path(f"/proc/{one}/cmdline").read_bytes()
        ]
        return found


@pytest.fixture
def pod(tmp_path):
    """Give the container of the plain StatefulSet, with a directory for the store and no broker."""
    (port,) = free_ports(1)
    data = tmp_path / "data"
    changes = {
        "broker": {"kind": "none", "log_dirs": [str(data / "data")]},
        "admin": {"host": "127.0.0.1", "port": port},
        "cloud_storage_backend": "file",
        "cloud_storage_file_root": str(tmp_path / "archive"),
        "cloud_storage_enable_remote_write": True,
        "cloud_storage_reconciliation_interval_ms": 100,
        "cloud_storage_bucket": None,
        "cloud_storage_region": None,
        "cloud_storage_access_key": None,
        "cloud_storage_secret_key": None,
        "storage_min_free_bytes": 0,
        "log_retention_ms": -1,
        "topics": {},
    }
    pod = Pod(tmp_path, **changes)
    pod.server.launch()
    yield pod
    if pod.server.is_running:
        os.killpg(pod.server.pid, signal.SIGKILL)
        pod.server.wait(180)


# Long: the container's process is started several times.
def test_container_waits_for_the_broker_s_log_directory_and_archives_it(pod, tmp_path):
    """The container starts before the broker, restarts what ends in it, and stops all of it well."""
    assert pod.starts() == []
    write_partition(tmp_path / "data" / "data", "orders-0", segments=2)
    pod.wait_for.write_text("version=1\ncluster.id=4L6g3nShT-eMCtK--X86sw\nnode.id=0\n")
    pod.until(lambda: pod.events("admin page listens"), "tieringd listens")
    pod.until_next_offset("orders", 2 * RECORDS)

    with pod.config.open("a") as file:
        file.write("\nshutdown_timeout_ms: 20000\n")
    pod.until(lambda: pod.events("configuration reloaded"), "the changed configuration is reloaded")

    pod.until(lambda: "supervise: tieringd answers" in pod.output_text(), "its answer is seen")
    os.kill(pod.pid(), signal.SIGKILL)
    pod.until(lambda: "tieringd ended with 137" in pod.output_text(), "the end is said")
    pod.until(lambda: pod.server.is_running and is_healthy(pod), "tieringd runs again")

    pod.until(lambda: pod.output_text().count("supervise: tieringd answers") >= 2, "its answer is seen")
    os.kill(pod.pid(), signal.SIGSTOP)
    pod.until(lambda: "tieringd is killed and started again" in pod.output_text(), "the hang is seen")
    pod.until(lambda: pod.output_text().count("tieringd ended with 137") >= 2, "the end is said")
    pod.until(lambda: pod.server.is_running and is_healthy(pod), "tieringd runs again")

    pod.send_signal(signal.SIGTERM)
    assert pod.wait() == 0
    assert "ended with 0" not in pod.output_text()


def test_container_lives_on_with_a_faulty_configuration(pod):
    """The broker's pod stays as it is; the next start is with the file as it is then."""
    good = pod.config.read_text()
    pod.config.write_text("nonsense: true")
    pod.wait_for.parent.mkdir()
    pod.wait_for.touch()
    pod.until(lambda: "tieringd ended with 2" in pod.output_text(), "the fault is said")
    assert pod.server.is_running
    pod.wait_for.write_text("version=1\ncluster.id=4L6g3nShT-eMCtK--X86sw\nnode.id=0\n")
    pod.config.write_text(good)
    pod.until(lambda: pod.events("admin page listens"), "tieringd listens")
    pod.send_signal(signal.SIGTERM)
    assert pod.wait() == 0


PROGRAMS = {
    # Slow, so that the signal comes between the last look at it and the start.
    "cksum": "touch looked; sleep 1; exec /usr/bin/cksum",
    "tieringd": "exec sleep 600",
}


def test_signal_right_before_a_start_prevents_it(tmp_path):
    """A pod that is deleted in that moment would wait for its whole grace, and kill tieringd at the end."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tieringd.yaml").touch()
    script = ROOT / "common" / "supervise.sh"
    container = subprocess.Popen(
        ["/bin/sh", str(script), str(tmp_path / "tieringd.yaml")],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        start_new_session=True,
    )
    try:
        while not (tmp_path / "looked").exists():
            time.sleep(0.01)
        container.send_signal(signal.SIGTERM)
        assert container.wait(30) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(container.pid, signal.SIGKILL)


def is_healthy(pod) -> bool:
    try:
        return pod.get("/healthz")[0] == 200
    except OSError:
        return False
