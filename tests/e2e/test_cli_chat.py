"""`nibble chat` through a pseudo-terminal: turns, streaming, Ctrl-C, leaving."""

import os
import pty
import select
import signal
import subprocess
import time

import pytest

from cli_tools import BINARY, ROOT, SANITIZER, STORYTELLER

CTRL_C, CTRL_D = b"\x03", b"\x04"
SLOW = 60  # seconds; far above what anything here takes


class Chat:
    """The program on a terminal of its own."""

    def __init__(self, *flags):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execv(BINARY, [BINARY, "chat", str(STORYTELLER), *map(str, flags)])
        self.shown = ""
        self.read_at = []  # when something was shown
        self.state = None

    def read(self, seconds):
        """Reads what comes within this time; false when nothing did or the program left."""
        if not select.select([self.terminal], [], [], seconds)[0]:
            return False
        try:
            block = os.read(self.terminal, 65536)
        except OSError:
            return False
        self.shown += block.decode(errors="replace")
        self.read_at.append(time.monotonic())
        return bool(block)

    def wait_for(self, text, since=0):
        deadline = time.monotonic() + SLOW
        while text not in self.shown[since:]:
            assert time.monotonic() < deadline and (self.read(1) or self.alive()), self.shown
        return self.shown[since:]

    def say(self, line):
        """Sends a line, returns the answer once the prompt is back."""
        since = len(self.shown)
        os.write(self.terminal, line.encode() + b"\n")
        shown = self.wait_for("\n> ", since)
        return shown.replace(line, "", 1).removesuffix("> ").strip()

    def alive(self):
        if self.state is None:
            pid, state = os.waitpid(self.pid, os.WNOHANG)
            self.state = state if pid else None
        return self.state is None

    def leave(self):
        """Waits for the end; the exit status."""
        deadline = time.monotonic() + SLOW
        while self.alive():
            assert time.monotonic() < deadline, self.shown
            self.read(0.05)
        while self.read(0):
            pass
        assert not SANITIZER.search(self.shown), self.shown
        return os.waitstatus_to_exitcode(self.state)

    def close(self):
        if self.alive():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.terminal)


@pytest.fixture
def start(terminals):
    chats = []

    def begin(*flags):
        chats.append(Chat("--log-level", "error", *flags))
        chats[-1].wait_for("> ")
        return chats[-1]

    yield begin
    for chat in chats:
        chat.close()


def test_several_turns(start):
    chat = start("--max-tokens", 12, "--temperature", 0)
    first = chat.say("Tell me a story about a king.")
    assert first
    second = chat.say("Tell me a story about a king.")
    assert second and second != first  # the conversation so far is part of the prompt
    chat.say("/reset")
    assert chat.say("Tell me a story about a king.") == first
    os.write(chat.terminal, b"/quit\n")
    assert chat.leave() == 0


def test_answers_are_streamed(start):
    chat = start("--max-tokens", 200, "--temperature", 0)
    for _ in range(5):  # a busy machine may join many pieces
        begin = len(chat.read_at)
        chat.say("Tell me a long story about the sea.")
        if len(chat.read_at) - begin > 4:
            break
    else:
        pytest.fail("no answer came in pieces")


def test_control_c_stops_the_answer_and_not_the_program(start):
    chat = start("--max-tokens", 900, "--temperature", 1)
    question = "Tell me a very long story."
    for _ in range(5):  # a short answer may be over before the key is pressed
        since = len(chat.shown)
        os.write(chat.terminal, question.encode() + b"\n")
        while len(chat.shown) < since + len(question) + 40 and "\n> " not in chat.shown[since:]:
            assert chat.read(SLOW), chat.shown
        os.write(chat.terminal, CTRL_C)
        answer = chat.wait_for("\n> ", since)
        assert chat.alive()
        if "[stopped]" in answer:
            break
        chat.say("/reset")
    else:
        pytest.fail("no answer was stopped")
    assert chat.say("/help").startswith("/reset")
    os.write(chat.terminal, CTRL_D)
    assert chat.leave() == 0


def test_control_c_at_the_prompt_drops_the_line(start):
    chat = start("--max-tokens", 4, "--temperature", 0)
    since = len(chat.shown)
    os.write(chat.terminal, b"half a li" + CTRL_C)
    assert "Ctrl-D" in chat.wait_for("\n> ", since)
    assert chat.alive()
    assert chat.say("Hello")
    os.write(chat.terminal, CTRL_D)
    assert chat.leave() == 0


@pytest.mark.parametrize("how", [CTRL_D, b"/quit\n", b"/exit\n"])
def test_leaving(start, how):
    chat = start()
    os.write(chat.terminal, how)
    assert chat.leave() == 0


def test_unknown_command_and_empty_lines(start):
    chat = start("--max-tokens", 4)
    assert "no command /fly" in chat.say("/fly")
    assert chat.say("   ") == ""
    os.write(chat.terminal, CTRL_D)
    assert chat.leave() == 0


def test_too_long_a_turn_leaves_the_conversation_usable(start):
    chat = start("--max-tokens", 4, "--temperature", 0)
    first = chat.say("Hello")
    assert first
    for _ in range(4):
        answer = chat.say("king " * 300)  # a terminal's line holds 4095 bytes
        if "tokens" in answer:
            break
    else:
        pytest.fail("the context never filled up")
    assert chat.alive()
    chat.say("/reset")
    assert chat.say("Hello") == first


def test_piped_lines():
    result = subprocess.run(
        [BINARY, "chat", str(STORYTELLER), "--max-tokens", "6", "--temperature", "0"], cwd=ROOT,
        input="Tell me a story.\n\nAnd then?", text=True, capture_output=True, timeout=SLOW,
        check=False)
    assert result.returncode == 0, result.stderr
    assert ">" not in result.stdout
    assert len([line for line in result.stdout.split("\n") if line]) >= 2
