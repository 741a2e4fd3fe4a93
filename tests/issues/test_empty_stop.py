"""`--stop ""` was accepted and ignored; the server refuses an empty stop string."""

import pytest

from cli_tools import INVALID, STORYTELLER, fails, succeeds

COMMANDS = [["generate", STORYTELLER, "--prompt", "Once", "--max-tokens", "2"],
            ["chat", STORYTELLER]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("flags", [["--stop", ""], ["--stop", "x", "--stop", ""], ["--stop="]])
def test_an_empty_stop_string_is_refused(command, flags):
    fails(INVALID, "--stop", arguments=[*command, *flags])


def test_others_are_taken():
    succeeds(*COMMANDS[0], "--stop", " ", "--stop", "\n")
