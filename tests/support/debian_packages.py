"""
Files of one of Debian's packages, outside the source tree: in `~/.cache/tieringd` or in `$TIERINGD_CACHE`.

Each package has a directory, which exists only when it is complete. Nothing is installed into the system.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.support.kafka_jars import MissingPartError


def fetch_package(package: str, directory: Path, *, elsewhere: str) -> None:
    """
    Unpack a package into *directory*, unless that is there.

    *elsewhere* says what to install in its place.

    Raises:
        MissingPartError: This is not Debian, or the package cannot be fetched.
    """
    if directory.is_dir():
        return
    for name in ("apt-get", "dpkg-deb"):
        if shutil.which(name) is None:
            raise MissingPartError(f"{name} is not installed; {elsewhere}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The rename is the last step, so that an existing directory is always complete.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetching-") as temporary:
        _download(package, Path(temporary), elsewhere=elsewhere)
        (archive,) = Path(temporary).glob("*.deb")
        unpacked = Path(temporary) / "unpacked"
        subprocess.run(["dpkg-deb", "--extract", archive, unpacked], check=True)
        try:
            unpacked.rename(directory)
        except OSError:
            # Another process was faster; its directory is as complete as ours.
            if not directory.is_dir():
                raise


def _download(package: str, directory: Path, *, elsewhere: str) -> None:
    """Download the package. If that fails, update the list of packages and try again."""
    download = ["apt-get", "--quiet", "download", package]
    if subprocess.run(download, check=False, capture_output=True, cwd=directory).returncode == 0:
        return
    subprocess.run(["apt-get", "--quiet", "update"], check=False, capture_output=True)
    done = subprocess.run(download, check=False, capture_output=True, text=True, cwd=directory)
    if done.returncode != 0:
        raise MissingPartError(
            f"the package {package} could not be fetched; {elsewhere}:\n{done.stdout}{done.stderr}"
        )
