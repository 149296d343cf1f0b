"""The commands of the pages for newcomers, run as they stand there."""

# Long: it runs the pages' commands, each a process of its own, after the demo.

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Give the directory in which the pages' commands run: a checkout's configurations are in it."""
    directory = tmp_path_factory.mktemp("newcomer")
    (directory / "config").symlink_to(ROOT / "config")
    return directory


# Long: see the top. The second page goes on with the archive of the first one.
@pytest.mark.parametrize("page", ["first_topic.md", "drill.md"])
def test_commands_of_the_page_work_one_after_the_other(directory, page):
    """Every block of the language sh, in one shell that ends with the first failure."""
    blocks = BLOCK.findall((ROOT / "docs" / page).read_text())
    assert blocks
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(blocks)],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert page != "first_topic.md" or "Verified" in done.stdout
