"""The wheel and the image's contents, built and run here: there is no container engine to build the image."""

# Long: installs every package of the lock into an empty environment.

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.e2e.log_files import write_partition
from tests.support.daemon import directory_config, write_config
from tests.support.old_python import MENDS_TIMEOUTS
from tests.support.ports import free_ports
from tests.support.processes import Server, program
from tieringd.cli.init import SECRETS
from tieringd.config.model import Config
from tieringd.config.units import DURATION, parse_quantity

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy/container"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEEDED = {
    "requirements.lock": PROJECT["project"]["dependencies"],
    "requirements-spark.lock": [
        *PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"]["spark"],
    ],
    "requirements-build.lock": PROJECT["build-system"]["requires"],
}


def instructions(stage: str) -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions of a stage, each on one line."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            name = rest.split()[-1]
            found[name] = [(word, rest)]
        elif word:
            found[name].append((word, rest.strip()))
    return found[stage]


def values(stage: str, word: str) -> list[str]:
    return [rest for name, rest in instructions(stage) if name == word]


def locked(name: str) -> dict[str, str]:
    """Return the versions in a lock, by package; each must have a hash."""
    entries = (LOCKS / name).read_text().replace("\\\n", " ").splitlines()
    assert [one for one in entries if one.strip() and "--hash=sha256:" not in one] == []
    pairs = [one.split()[0].partition("==") for one in entries if one.strip()]
    return {canonicalize_name(package): version for package, _, version in pairs}


@pytest.mark.parametrize("name", NEEDED)
def test_lock_has_what_pyproject_asks_for(name):
    """Each dependency in a version that it allows. `make lock` writes the locks again."""
    found = locked(name)
    for one in map(Requirement, NEEDED[name]):
        assert one.specifier.contains(found.get(canonicalize_name(one.name), "0")), one


def test_image_installs_from_the_locks_only():
    """Nothing comes in another version than that of the lock; the image has its labels and both packages."""
    for stage in ("wheel", "install", "install-spark"):
        for run in values(stage, "RUN"):
            for part in run.split("&&"):
                if "pip install" in part:
                    assert "--require-hashes" in part or "--no-deps /wheels" in part, part
    assert [one.split()[-1] for one in values("wheel", "COPY")] == [
        *("./", "./", "./tieringd", "./pyspark_tieringd", "./deploy", "./docs")
    ]
    (labels,) = values("base", "LABEL")
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels
    copied = {
        one.split()[0].strip("./") for _, one in instructions("wheel") + instructions("base") if _ == "COPY"
    }
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {one.split("/")[0] for one in copied} <= kept
    assert instructions("daemon")[0] == ("FROM", "base AS daemon"), "the last stage is the daemon's"
    assert values("base", "ARG")[0] == f"VERSION={PROJECT['project']['version']}"


def test_composition_gives_the_secrets_that_a_first_configuration_names():
    """A container without one of them would end, and start again, for a variable that is not set."""
    (service,) = yaml.safe_load((LOCKS / "compose.yaml").read_text())["services"].values()
    given = {name: service["environment"].get(name) for name in SECRETS}
    assert given == {name: f"${{{name}:-}}" for name in SECRETS}


def test_composition_keeps_log_and_pins_on_one_mount_and_waits_for_the_uploads():
    """The stop time of the service is longer than the daemon's own."""
    (service,) = yaml.safe_load((LOCKS / "compose.yaml").read_text())["services"].values()
    assert "/var/lib/kafka:/var/lib/kafka" in service["volumes"]
    shutdown_ms = Config.model_fields["shutdown_timeout_ms"].default
    assert parse_quantity(service["stop_grace_period"], DURATION) >= 1.5 * shutdown_ms


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Give an environment with the locked packages and the wheel, as the image's /opt/tieringd."""
    directory = tmp_path_factory.mktemp("package")
    # A build in the checkout would write there.
    source = directory / "source"
    for name in ("tieringd", "pyspark_tieringd", "deploy", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(directory),
        str(source),
    ]
    run(build)
    (wheel,) = directory.glob("*.whl")
    environment, lock = directory / "environment", LOCKS / "requirements.lock"
    run([program("uv"), "venv", "--quiet", "--python", python_for_the_lock(), str(environment)])
    install = [program("uv"), "pip", "install", "--quiet", "--python", str(environment / "bin/python")]
    run([*install, "--require-hashes", "--requirement", str(lock)])
    run([*install, "--no-deps", str(wheel)])
    return environment, wheel


def python_for_the_lock() -> str:
    """Return this Python, or a newer one where this is too old for a package that is locked for the image."""
    if not MENDS_TIMEOUTS:
        return sys.executable
    find = [program("uv"), "python", "find", "--no-python-downloads", ">=3.11.3"]
    found = subprocess.run(find, check=False, capture_output=True, text=True)
    assert found.returncode == 0, (
        f"The image's packages need Python 3.11.3 or newer beside {sys.executable}; "
        f"`{program('uv')} python install 3.12` installs one.\n{found.stderr}"
    )
    return found.stdout.strip()


def run(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_wheel_has_everything(installed):
    """Both packages, what `generate` prints, and the marker for type checkers."""
    names = set(zipfile.ZipFile(installed[1]).namelist())
    assert {
        "tieringd/py.typed",
        "tieringd/deploy/prometheus/alerts.yml",
        "tieringd/deploy/grafana/overview.json",
        "tieringd/deploy/docs/runbook.md",
        "tieringd/deploy/kubernetes/strimzi/brokers/0/kustomization.yaml",
        "tieringd/cli/completion.json",
        "tieringd/cli/spark/quiet-log4j2.properties",
    } <= names
    assert [one for one in names if one.startswith("pyspark_tieringd/")]
    sources = {one.relative_to(ROOT).as_posix() for one in (ROOT / "tieringd").rglob("*.py")}
    assert sources <= names


# Long: compiles and starts each program of a new environment.
def test_installed_wheel_does_the_main_job_as_the_image_runs_it(installed, tmp_path):
    """
    The image's environment, entry point, command and health check archive a partition, and print its rules.

    The admin page listens on every address, as nothing outside a container reaches its loopback.
    """
    environ = {"HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    (line,) = values("base", "ENV")
    declared = dict(one.split("=", 1) for one in shlex.split(line))
    (port,) = free_ports(1)
    environ["PATH"] = f"{installed[0] / 'bin'}:{os.environ['PATH']}"
    environ["TIERINGD_ADMIN_HOST"] = declared["TIERINGD_ADMIN_HOST"]
    environ["TIERINGD_HEALTH_URL"] = declared["TIERINGD_HEALTH_URL"].replace(":9640", f":{port}")
    write_partition(tmp_path / "logs", "orders-0", segments=1)
    config = directory_config(
        [tmp_path / "logs"], tmp_path / "archive", tmp_path / "state", admin={"port": port}
    )
    environ["TIERINGD_CONFIG"] = str(write_config(tmp_path / "tieringd.yaml", config))
    (entry,) = json.loads(values("base", "ENTRYPOINT")[0])
    command = json.loads(values("base", "CMD")[0])
    program_path = str(installed[0] / "bin" / entry)
    (health,) = values("base", "HEALTHCHECK")
    checks = json.loads(health.partition("CMD ")[2])
    output = tmp_path / "daemon.log"

    def start(*, stdout, stderr):
        return subprocess.Popen(
            [program_path, *command], stdout=stdout, stderr=stderr, env=environ, cwd=tmp_path
        )

    daemon = Server(["tieringd"], output=output, start=start)
    daemon.launch()
    try:
        daemon.wait_until(lambda: "segment durable" in output.read_text())
        assert '"host": "0.0.0.0"' in output.read_text()
        healthy = subprocess.run(
            [str(installed[0] / "bin" / checks[0]), *checks[1:]],
            check=False,
            capture_output=True,
            env=environ,
        )
        assert healthy.returncode == 0, healthy.stderr
    finally:
        daemon.kill()
    sick = subprocess.run(
        [str(installed[0] / "bin" / checks[0]), *checks[1:]], check=False, capture_output=True, env=environ
    )
    assert sick.returncode != 0
    done = subprocess.run(
        [program_path, "archive", "topics", "--format", "json"],
        check=True,
        capture_output=True,
        text=True,
        env=environ,
        cwd=tmp_path,
    )
    (topic,) = json.loads(done.stdout)
    assert (topic["topic"], topic["segments"]) == ("orders", 1)
    rules = subprocess.run(
        [program_path, "generate", "prometheus-rules"],
        check=True,
        capture_output=True,
        text=True,
        env=environ,
    )
    assert yaml.safe_load(rules.stdout)["groups"]
