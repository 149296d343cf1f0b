"""Which files of tieringd run while something happens, as a reader would have to open them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType

PACKAGE = Path(__file__).parents[2] / "tieringd"


class TracedFiles:
    """
    Records the files whose functions are called in this thread, and in threads that start meanwhile.

    Used as a context manager. Paths in `files` are relative to the package, such as `archiving/archiver.py`.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._is_recording = False
        self._prefix = f"{PACKAGE}/"

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def start(self) -> None:
        """Record from now on."""
        self._is_recording = True

    def stop(self) -> None:
        """Record no more."""
        self._is_recording = False

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._is_recording and event == "call" and frame.f_code.co_filename.startswith(self._prefix):
            self.files.add(frame.f_code.co_filename.removeprefix(self._prefix))
