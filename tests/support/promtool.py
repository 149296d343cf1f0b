"""
Prometheus, and its promtool, which tries alert rules on series that a test makes up; from Debian's package.

It lives outside the source tree, in `~/.cache/tieringd` or in `$TIERINGD_CACHE`, in a directory that
exists only when it is complete. Run as `python -m tests.support.promtool` to fetch it.
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
    Return the program: the one on the PATH, or the one that was fetched.

    Raises:
        MissingPartError: There is neither.
    """
    return _required("promtool")


def require_prometheus() -> str:
    """
    Return Prometheus itself, which comes in the same package.

    Raises:
        MissingPartError: It is neither on the PATH nor was it fetched.
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
    Fetch the program unless it is there, and return its path.

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
    # Renamed as the last step: a directory that exists is complete, however a fetch ends.
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
    """Download the package; on a machine without a list of packages get that first."""
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
    """Fetch it and say where it is."""
    try:
        path = fetch_promtool()
    except MissingPartError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
