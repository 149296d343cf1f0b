"""
The licences of the container's packages: `make lock` writes `docs/licences.md`.

Names come from the locks, licences from the metadata of the installed packages. A test holds the page against
both, and refuses a licence of another family.
"""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "licences.md"
_LOCKS: Final = ("requirements.lock", "requirements-spark.lock")
_LONGEST: Final = 40
"""A longer `License` field holds a text instead of a name."""
_HEAD: Final = """\
# Licences of the packages in the image

Written by `make lock` from the locks in [deploy/container](../deploy/container) and the metadata of packages.
The image installs each package unchanged, by version and hash. No package is under GPL or AGPL.

| package | licence |
|---|---|
"""


def locked() -> list[str]:
    """Return the names of all packages in the image's locks."""
    text = "".join((ROOT / "deploy" / "container" / name).read_text() for name in _LOCKS)
    return sorted(set(re.findall(r"^([A-Za-z0-9_.-]+)==", text, re.MULTILINE)))


def licence_of(package: str) -> str:
    """
    Return the licence that an installed package names.

    Raises:
        PackageNotFoundError: It is not installed.
        ValueError: It names none.
    """
    found = metadata(package)
    if "License-Expression" in found:
        return found["License-Expression"]
    named = found["License"].strip() if "License" in found else ""
    if named and len(named) <= _LONGEST and "\n" not in named and named != "Dual License":
        return named
    classifiers = found.get_all("Classifier") or []
    names = [one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License ::")]
    if not names:
        raise ValueError(f"{package} names no licence in its metadata")
    return ", ".join(names)


def rendered() -> str:
    """Return the page."""
    return _HEAD + "".join(f"| {package} | {licence_of(package)} |\n" for package in locked())


def main() -> None:
    """Write the page."""
    PAGE.write_text(rendered())


if __name__ == "__main__":
    main()
