"""Each line of a command in the docs: run on a live daemon, or listed here with the reason why not."""

# Long: every command of the docs runs beside a daemon, most of them as a process of their own.

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.e2e.log_files import RECORDS, write_partition
from tests.support.daemon import directory_config, run_command, run_well, running_daemon, write_config
from tests.support.ports import free_ports

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "tests" / "README.md"]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)

ELSEWHERE = {
    "kubectl": "needs Kubernetes; tests/integration/test_kubernetes.py runs what the manifests run",
    "helm": "needs Kubernetes",
    "docker": "needs Docker",
    "spark-submit": "needs a cluster of Spark; tests/e2e/spark/test_standalone_cluster.py runs one here",
    "orders/bin/venv-pack": "needs YARN",
    "PYSPARK_DRIVER_PYTHON=orders/bin/python": "needs YARN",
    "pip": "needs a registry; tests/integration/test_package.py installs the wheel",
    "/opt/tieringd/bin/pip": "needs a registry; tests/integration/test_package.py installs the wheel",
    "python3": "begins an installation; tests/integration/test_package.py does the same elsewhere",
    "python3.11": "begins an installation for YARN",
    "ln": "changes /usr/local",
    "cp": "changes /etc",
    "sudo": "needs the broker's user; tests/unit/cli/test_doctor.py runs the command after it",
    "systemctl": "needs systemd as the first process; tests/unit/daemon/test_systemd_unit.py checks the unit",
    "journalctl": "needs systemd",
    "timedatectl": "needs systemd",
    "dmesg": "needs a kernel's log that may be read",
    "sysctl": "reads the kernel",
    "df": "reads the machine",
    "findmnt": "reads the machine",
    "ls": "reads the machine",
    "id": "reads the machine",
    "ss": "reads the machine",
    "pgrep": "reads the machine",
    "openssl": "reads a certificate of the operator's",
    "promtool": "needs an operator's configuration; tests/integration/test_live_alerts.py has ours",
    "kafka-configs.sh": "a tool of Kafka's, for an operator's broker",
    "kafka-transactions.sh": "a tool of Kafka's, for an operator's broker",
    "kafka-acls.sh": "a tool of Kafka's, for an operator's broker",
    "kafka-groups.sh": "a tool of Kafka's, for an operator's broker",
    "kafka-share-groups.sh": "a tool of Kafka's, for an operator's broker",
    "kafka-topics.sh": "a tool of Kafka's, for an operator's broker",
    "make": "takes minutes to hours; the test below sees that the target exists",
    "export": "sets a variable",
    "CONFIG=/etc/tieringd/tieringd.yaml": "sets a variable",
}
"""Programs whose lines are not run here, and why."""
OWN_TESTS = {
    "tieringd spark": "a session of Spark: tests/e2e/spark",
    "tieringd recover": "it needs a cluster or a stopped broker: tests/e2e/test_recover.py",
    "tieringd run": "the daemon: every test of this folder",
    "tieringd demo": "tests/e2e/test_demo.py",
    "tieringd archive resolve": "a partition that waits: tests/e2e/test_cluster_unclean.py",
    "tieringd archive init": "it runs before `archive copy` here, on the target",
    "tieringd topic delete-records": "it needs a broker: tests/e2e/test_gateway.py",
    "tieringd init": "tests/unit/cli/test_init.py",
    "tieringd doctor": "tests/unit/cli/test_doctor.py",
    "tieringd groups describe": "it needs a group: tests/unit/cli/test_groups.py",
}
"""Commands of tieringd that need more than a daemon over a directory, and the tests that run them."""
RUN_AS_BLOCKS = {"first_topic.md", "drill.md"}
"""Pages whose blocks of the language sh tests/e2e/test_doc_commands.py runs as they stand."""


def lines_of(page):
    """Return the lines of commands of a page, without prompts, comments, and ends in the next line."""
    found = []
    for language, block in BLOCK.findall(page.read_text()):
        if language not in {"", "sh"} or (language == "sh" and page.name in RUN_AS_BLOCKS):
            continue
        joined = re.sub(r" *\\\n *", " ", block)
        lines = [re.sub(r"^\$ ", "", re.split(r"\s+# ", line.strip())[0]) for line in joined.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        if any(program(line) in {"tieringd", "curl", *ELSEWHERE} for line in lines):
            found += lines
    return found


def program(line):
    return line.split()[0]


IN_DOCS = sorted({line for page in PAGES for line in lines_of(page)})
TO_RUN = [
    line
    for line in IN_DOCS
    if program(line) in {"tieringd", "curl"} and not line.startswith(tuple(OWN_TESTS))
]
OUTPUT = re.compile(r"^(\.\.\.|Verified|partition +start_offset|\d+ +\d+|TIERINGD_DEMO_DIR=)")
"""Lines of the README's block that shows what its two commands print. test_doc_commands.py runs the same."""


def test_every_line_is_run_or_listed():
    """A new program in the docs needs a test or a reason, and a reason needs a line."""
    unknown = [
        line
        for line in IN_DOCS
        if program(line) not in {"tieringd", "curl", *ELSEWHERE} and not OUTPUT.match(line)
    ]
    assert unknown == []
    assert [name for name in ELSEWHERE if not any(program(line) == name for line in IN_DOCS)] == []
    assert [name for name in OWN_TESTS if not any(line.startswith(name) for line in IN_DOCS)] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {line.split()[1] for line in IN_DOCS if program(line) == "make"} <= targets
    for path in re.findall(r"(tests/[\w/.]+)", " ".join([*ELSEWHERE.values(), *OWN_TESTS.values()])):
        assert (ROOT / path).exists(), path


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Give a running daemon that has archived a topic, its configuration, and a target for copies."""
    root = tmp_path_factory.mktemp("docs")
    write_partition(root / "logs", "orders-0", segments=3)
    ballast = {
        "tune_ballast_file": True,
        "ballast_file_path": str(root / "ballast"),
        "ballast_file_size": 4096,
    }
    (port,) = free_ports(1)
    # `tieringd status` reads the port from the configuration.
    admin = {"admin": {"port": port}}
    config = directory_config([root / "logs"], root / "archive", root / "state", **ballast, **admin)
    path = write_config(root / "tieringd.yaml", config)
    new = write_config(root / "new.yaml", config | {"cloud_storage_file_root": str(root / "new")})
    run_well("archive", "init", "--config", str(new))
    with running_daemon(path) as daemon:
        daemon.until_next_offset("orders", 3 * RECORDS)
        yield daemon, path, new


def filled(line, path, new):
    """Return the line with what this machine has in place of what the docs assume."""
    for old, value in (
        ("/etc/tieringd/tieringd.yaml", path),
        ("$CONFIG", path),
        ("/usr/share/doc/tieringd", path.parent / "doc"),
        ("new.yaml", new),
        ("--config F", f"--config {path}"),
        ("TOPIC-PARTITION", "orders-0"),
        ("TOPIC", "orders"),
        ("PARTITION", "0"),
    ):
        line = line.replace(old, str(value))
    return re.sub(r"(?<![/\w.-])tieringd\.yaml", str(path), line)


# Two of them, in the order of the page: what is moved is not there to be read.
AT_THE_END = [line for line in TO_RUN if line.startswith("tieringd archive move")]


@pytest.mark.parametrize("line", [*(line for line in TO_RUN if line not in AT_THE_END), *AT_THE_END])
def test_line_runs(line, live, monkeypatch):
    """The line exits 0, and prints no traceback."""
    daemon, path, new = live
    monkeypatch.setenv("TIERINGD_CONFIG", str(path))
    text = filled(line, path, new)
    if program(line) == "curl":
        text = text.replace("localhost:9640", daemon.url("").removeprefix("http://"))
        done = subprocess.run(["bash", "-c", text], check=False, capture_output=True, text=True, timeout=300)
        # A grep that finds nothing says so: a daemon that is well has no such series.
        assert done.returncode == 0 or (" grep " in text and done.returncode == 1), done.stderr
        assert not done.stdout.startswith("404")
    else:
        words = shlex.split(re.split(r" [|>] ", text)[0])
        done = run_command(*words[1:])
        assert done.returncode == 0, done.stderr.decode()
        assert b"Traceback" not in done.stderr


def test_table_has_no_page_left_out():
    """Each page with a block of commands is gone over."""
    assert {page.name for page in PAGES} >= {"runbook.md", "operating.md", "outage.md", "README.md"}
    assert len(TO_RUN) > 40
