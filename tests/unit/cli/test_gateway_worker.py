"""What a worker of the gateway imports: a process of each kind pays for it in time and memory."""

import json
import subprocess
import sys

import pytest

STORES = {"aiobotocore", "azure", "botocore", "gcloud"}
"""Packages of the stores. A worker imports that of its own store when it opens it."""
MAX_MODULES = 1150
"""A worker imported 1004 or 1055 when this was written, with what only tests need; both kinds took 1297."""
MAX_FIRST_MODULES = 120
"""The modules before the kernel is asked to end the worker with its daemon: 78 when this was written."""


def modules_after(work):
    """Return the names of the modules that a process has imported after *work*."""
    script = f"import sys\nfrom tieringd.cli import gateway_worker\n{work}\n"
    done = subprocess.run(
        [sys.executable, "-c", script + "import json; print(json.dumps(sorted(sys.modules)))"],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(("kind", "other"), [("gateway", "endpoint"), ("endpoint", "gateway")])
def test_worker_imports_what_its_kind_needs(kind, other):
    """It imports no store that it does not use, nothing of the other kind, and not a daemon's parts."""
    modules = modules_after(f"import tieringd.daemon.workers.worker\ngateway_worker._{kind}(None)")
    assert f"tieringd.daemon.workers.{kind}_workers" in modules
    assert not {one.split(".")[0] for one in modules} & STORES
    assert f"tieringd.daemon.workers.{other}_workers" not in modules
    assert "tieringd.daemon.assembly" not in modules
    assert len(modules) < MAX_MODULES


def test_little_is_imported_before_a_worker_can_end_with_its_daemon():
    """The imports that take seconds come after that."""
    modules = modules_after("")
    assert len(modules) < MAX_FIRST_MODULES
    assert not modules & {"asyncio", "structlog", "uvloop"}
