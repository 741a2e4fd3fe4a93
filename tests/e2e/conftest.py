"""What several test files need from the machine."""

import os
import pty

import pytest


@pytest.fixture(scope="session")
def terminals():
    """Skips where the machine has no pseudo-terminals (a chroot without /dev/pts)."""
    try:
        ends = pty.openpty()
    except OSError as error:
        pytest.skip(f"no pseudo-terminal: {error}")
    for end in ends:
        os.close(end)
