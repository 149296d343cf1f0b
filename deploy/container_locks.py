"""
Write the locks of the container's packages: `make lock`.

Each lock has a version and the hashes of every package that pyproject.toml leads to, so that an image of
today's sources is the same tomorrow. A test holds the locks against pyproject.toml. Versions that are locked
already are kept where pyproject.toml allows them; `--upgrade` takes the newest.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "deploy" / "container"
PYTHON = "3.12"
"""The version of the Dockerfile's base image."""


def main() -> None:
    """Write the three locks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    _write("requirements.lock", "pyproject.toml")
    _write("requirements-spark.lock", "pyproject.toml", "--extra", "spark")
    _write("requirements-build.lock", "-", wanted="\n".join(project["build-system"]["requires"]))


def _write(name: str, *source: str, wanted: str = "") -> None:
    command = [
        *(str(Path(sys.executable).parent / "uv"), "pip", "compile", *source),
        *("--generate-hashes", "--python-version", PYTHON, "--python-platform", "linux"),
        *("--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"),
        *("--output-file", str(LOCKS / name), *sys.argv[1:]),
    ]
    subprocess.run(command, check=True, input=wanted, text=True, cwd=ROOT)  # noqa: S603 a fixed command


if __name__ == "__main__":
    main()
