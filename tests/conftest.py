"""What several test files need from the machine, and the helpers of tests/e2e for all folders."""

import os
import pathlib
import pty
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "e2e"))


@pytest.fixture(scope="session")
def terminals():
    """Skips where the machine has no pseudo-terminals (a chroot without /dev/pts)."""
    try:
        ends = pty.openpty()
    except OSError as error:
        pytest.skip(f"no pseudo-terminal: {error}")
    for end in ends:
        os.close(end)
