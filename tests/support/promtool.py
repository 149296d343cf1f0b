"""
Prometheus and promtool, which tests alert rules on made-up series; both from Debian's package.

They are installed outside the source tree, in `~/.cache/tieringd` or in `$TIERINGD_CACHE`, in a directory
that exists only when it is complete. `python -m tests.support.promtool` fetches them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.components import used
from tests.support.kafka_jars import MissingPartError, cache_directory

_PACKAGE = "prometheus"
_ELSEWHERE = "install promtool so that it is on the PATH"


def require_promtool() -> str:
    """
    Return the path of promtool: the program in PATH, or the one that was fetched.

    Raises:
        MissingPartError: There is neither.
    """
    return _required("promtool")


def require_prometheus() -> str:
    """
    Return the path of Prometheus, which is in the same package.

    Raises:
        MissingPartError: Prometheus is not in PATH, and was not fetched.
    """
    return _required("prometheus")


def _required(name: str) -> str:
    fetched = _fetched(name)
    found = shutil.which(name) or (str(fetched) if fetched.is_file() else None)
    if found is None:
        raise MissingPartError(f"{fetched} is missing; run `python -m tests.support.promtool`")
    used(name)
    return found


def fetch_promtool() -> str:
    """
    Fetch promtool unless it is installed, and return its path.

    Raises:
        MissingPartError: This is not Debian, or its package cannot be fetched.
    """
    try:
        return require_promtool()
    except MissingPartError:
        directory = _fetched("promtool").parents[2]
    for name in ("apt-get", "dpkg-deb"):
        if shutil.which(name) is None:
            raise MissingPartError(f"{name} is not installed; {_ELSEWHERE}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The rename is the last step, so that an existing directory is always complete.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetching-") as temporary:
        _download(Path(temporary))
        (archive,) = Path(temporary).glob("*.deb")
        unpacked = Path(temporary) / "unpacked"
        subprocess.run(["dpkg-deb", "--extract", archive, unpacked], check=True)
        try:
            unpacked.rename(directory)
        except OSError:
            # Another process was faster; its directory is as complete as ours.
            if not directory.is_dir():
                raise
    return require_promtool()


def _fetched(name: str) -> Path:
    return cache_directory() / "prometheus" / "usr" / "bin" / name


def _download(directory: Path) -> None:
    """Download the package. If that fails, update the list of packages and try again."""
    download = ["apt-get", "--quiet", "download", _PACKAGE]
    if subprocess.run(download, check=False, capture_output=True, cwd=directory).returncode == 0:
        return
    subprocess.run(["apt-get", "--quiet", "update"], check=False, capture_output=True)
    done = subprocess.run(download, check=False, capture_output=True, text=True, cwd=directory)
    if done.returncode != 0:
        raise MissingPartError(
            f"the package {_PACKAGE} could not be fetched; {_ELSEWHERE}:\n{done.stdout}{done.stderr}"
        )


def main() -> int:
    """Fetch promtool and print its path."""
    try:
        path = fetch_promtool()
    except MissingPartError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
