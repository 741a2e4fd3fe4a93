"""Servers for tests with official clients."""

import json
import pathlib
import subprocess

from test_openai import BINARY, KEY

FAKE = pathlib.Path(BINARY).parents[1] / "tests/fake_server/fake_server"


class FakeServer:
    """Says what it is told: the contents of all messages, over and over, until a "$"."""

    key = KEY

    def __init__(self):
        self.process = subprocess.Popen(
            [FAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self):
        self.process.stdin.close()
        return self.process.wait(timeout=60)


def says(content="", thought="", calls=()):
    """What a model that speaks Hermes's language writes."""
    text = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    text += content
    for name, arguments in calls:
        text += f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    return text + "$"
