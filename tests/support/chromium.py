"""
Chromium without a window, which shows the status page; from Debian's packages.

It is installed outside the source tree, in `~/.cache/tieringd` or in `$TIERINGD_CACHE`, with the libraries
that this machine lacks, in a directory that exists only when it is complete.
`python -m tests.support.chromium` fetches it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.components import used
from tests.support.kafka_jars import MissingPartError, cache_directory, tell_where

_PACKAGES = ("chromium-headless-shell", "fonts-dejavu-core", "fontconfig-config")
_NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
_ELSEWHERE = "install Debian's package chromium so that it is on the PATH"
_URI = re.compile(r"^'[^']+' (?P<package>[^_ ]+)_", re.MULTILINE)
_SECONDS = 180


def require_chromium() -> list[str]:
    """
    Return the command of Chromium: the program in PATH, or the one that was fetched.

    Raises:
        MissingPartError: There is neither.
    """
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    fetched = _fetched()
    if found is None and not fetched.is_file():
        raise MissingPartError(f"{fetched} is missing; run `python -m tests.support.chromium`")
    used("chromium")
    return [found, "--headless"] if found is not None else [str(fetched)]


def browser_run(*arguments: str, profile: Path) -> str:
    """Run Chromium with *arguments* and a *profile* of its own; return its standard output."""
    libraries = sorted({str(one.parent) for one in (_root() / "usr" / "lib").glob("*-linux-*/**/*.so*")})
    environment = os.environ | {"LD_LIBRARY_PATH": ":".join(libraries), "HOME": str(profile)}
    if not Path("/etc/fonts").is_dir():
        environment["FONTCONFIG_PATH"] = str(_root() / "etc" / "fonts")
    # Without a sandbox of its own, which needs rights that a container does not give; the page is ours.
    options = (
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
    )
    done = subprocess.run(
        [*require_chromium(), *options, f"--user-data-dir={profile}", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def fetch_chromium() -> None:
    """
    Fetch Chromium unless it is installed.

    Raises:
        MissingPartError: This is not Debian, or its packages cannot be fetched.
    """
    if _fetched().is_file() or any(map(shutil.which, _NAMES)):
        return
    for name in ("apt-get", "dpkg-deb"):
        if shutil.which(name) is None:
            raise MissingPartError(f"{name} is not installed; {_ELSEWHERE}")
    _root().parent.mkdir(parents=True, exist_ok=True)
    # The rename is the last step, so that an existing directory is always complete.
    with tempfile.TemporaryDirectory(dir=_root().parent, prefix="fetching-") as temporary:
        unpacked = Path(temporary) / "unpacked"
        _download(Path(temporary))
        for archive in Path(temporary).glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", archive, unpacked], check=True)
        try:
            unpacked.rename(_root())
        except OSError:
            # Another process was faster; its directory is as complete as ours.
            if not _root().is_dir():
                raise


def _download(directory: Path) -> None:
    """Download the packages with those that they need and that are not installed."""
    packages = _missing_packages()
    if not packages:
        subprocess.run(["apt-get", "--quiet", "update"], check=False, capture_output=True)
        packages = _missing_packages()
    done = subprocess.run(
        ["apt-get", "--quiet", "download", *(packages or _PACKAGES)],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
    )
    if done.returncode != 0:
        raise MissingPartError(f"Chromium could not be fetched; {_ELSEWHERE}:\n{done.stdout}{done.stderr}")


def _missing_packages() -> list[str]:
    command = ["apt-get", "--quiet=2", "--print-uris", "--yes", "--no-install-recommends", "install"]
    done = subprocess.run([*command, *_PACKAGES], check=False, capture_output=True, text=True)
    return sorted(set(_URI.findall(done.stdout)))


def _root() -> Path:
    return cache_directory() / "chromium"


def _fetched() -> Path:
    return _root() / "usr" / "lib" / "chromium" / "chromium-headless-shell"


def _fetched_command() -> str:
    fetch_chromium()
    return " ".join(require_chromium())


if __name__ == "__main__":
    sys.exit(tell_where(_fetched_command))
