"""`nibble chat` through a pseudo-terminal: turns, lines, commands, streaming, Ctrl-C, leaving."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
import time

import pytest

from cli_tools import (BINARY, INVALID, ROOT, SANITIZER, STORYTELLER, UNAVAILABLE, fails)
from stub_server import Stub

CTRL_C, CTRL_D = b"\x03", b"\x04"
SLOW = 60  # seconds; far above what anything here takes


ESCAPES = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|.\x08")


class Chat:
    """The program on a terminal of its own, of so many columns."""

    def __init__(self, *flags, model=STORYTELLER, columns=80):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            os.environ["TERM"] = "xterm-256color"
            os.chdir(ROOT)
            models = [str(model)] if model else []
            os.execv(BINARY, [BINARY, "chat", *models, *map(str, flags)])
        self.raw = ""
        self.shown = ""  # without what steers the terminal
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
        self.raw += block.decode(errors="replace")
        self.shown = ESCAPES.sub("", self.raw)
        self.read_at.append(time.monotonic())
        return bool(block)

    def write(self, data):
        """Sends much, reading what is echoed meanwhile."""
        while data:
            can_read, can_write, _ = select.select([self.terminal], [self.terminal], [], SLOW)
            if can_read:
                self.read(0)
            if can_write:
                data = data[os.write(self.terminal, data[:512]):]

    def wait_for(self, text, since=0):
        deadline = time.monotonic() + SLOW
        while text not in self.shown[since:]:
            assert time.monotonic() < deadline and (self.read(1) or self.alive()), self.shown
        return self.shown[since:]

    def say(self, line):
        """Sends a line, returns the answer once the prompt is back."""
        since = len(self.shown)
        self.write(line.encode() + b"\n")
        shown = self.wait_for("\n> ", since)
        return self.answer_in(shown.replace(line, "", 1))

    @staticmethod
    def answer_in(shown):
        """Without the prompt and the line that says how fast it was."""
        shown = shown.replace("\r", "").removesuffix("> ")
        return re.sub(r"\[\d+ tokens.*after [\d.]+ s\]\n?", "", shown).strip()

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

    def begin(*flags, **options):
        chats.append(Chat("--log-level", "error", *flags, **options))
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
    assert chat.say("/help").startswith("/clear")
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


@pytest.mark.parametrize("columns", [80, 200])
def test_a_full_context_slides(start, columns):
    chat = start("--max-tokens", 4, "--temperature", 0, columns=columns)
    first = chat.say("Hello")
    assert first
    for _ in range(4):
        answer = chat.say("king " * 300)
        if "were left out" in answer:
            break
    else:
        pytest.fail("the context never filled up")
    answer = chat.say("king " * 3000)  # alone above the context of 1024
    assert "does not fit" in answer and "tokens" in answer
    chat.say("/clear")
    assert chat.say("Hello") == first


@pytest.mark.parametrize("columns", [80, 200])
def test_lines_of_any_length(start, tmp_path, columns):
    """Typed and pasted ones arrive whole: 4095 bytes is where a terminal itself would cut."""
    stub = Stub()
    chat = start("--url", stub.start(), model=None, columns=columns)
    typed = " ".join(f"word{i}" for i in range(2000)) + " caf\u00e9 \u4f60\u597d END"
    assert len(typed) > 15000
    chat.say(typed)
    assert stub.bodies[-1]["messages"][-1]["content"] == typed
    pasted = "\n".join(f"line {i}: " + "x" * 300 for i in range(200))
    since = len(chat.shown)
    chat.write(b"Look: \x1b[200~" + pasted.encode() + b"\x1b[201~ what is it?\n")
    shown = chat.wait_for("\n> ", since)
    assert f"Look: [paste 1: {len(pasted)} bytes] what is it?" in shown
    assert stub.bodies[-1]["messages"][-1]["content"] == f"Look: {pasted} what is it?"
    chat.say(f"/save {tmp_path}/talk.json")
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in saved] == ["user", "assistant"] * 2
    assert saved[0]["content"] == typed


def test_what_is_typed_during_an_answer_is_kept(start):
    stub = Stub(first=0.5, gap=0.02)
    chat = start("--url", stub.start(), "--max-tokens", 20, model=None)
    since = len(chat.shown)
    ahead = "ahead " * 1500
    chat.write(b"first\n" + ahead.encode() + b"\n")
    deadline = time.monotonic() + SLOW
    while len(stub.bodies) < 2:
        assert time.monotonic() < deadline and (chat.read(0.2) or chat.alive()), chat.shown[since:]
    assert stub.bodies[-1]["messages"][-1]["content"] == ahead


def test_several_lines(start):
    stub = Stub()
    chat = start("--url", stub.start(), model=None)
    chat.write(b"one \\\ntwo\n")
    chat.wait_for("... ")
    chat.wait_for("\n> ", chat.shown.index("... "))
    assert stub.bodies[-1]["messages"][-1]["content"] == "one \ntwo"
    since = len(chat.shown)
    chat.write(b'"""first\n\n  third"""\n')
    chat.wait_for("[", since)
    assert stub.bodies[-1]["messages"][-1]["content"] == "first\n\n  third"


def test_keys_edit_the_line_and_history_brings_it_back(start, tmp_path):
    stub = Stub()
    url = stub.start()
    chat = start("--url", url, "--history", tmp_path / "lines", model=None)
    chat.write(b"ello\x01H\x05!\n")  # Ctrl-A, Ctrl-E
    chat.wait_for("[4 tokens")
    assert stub.bodies[-1]["messages"][-1]["content"] == "Hello!"
    os.write(chat.terminal, b"/quit\n")
    assert chat.leave() == 0
    assert (tmp_path / "lines").stat().st_mode & 0o077 == 0
    chat = start("--url", url, "--history", tmp_path / "lines", model=None)
    chat.write(b"\x1b[A\x1b[A\n")  # twice up: the line before /quit
    chat.wait_for("[4 tokens")
    assert len(stub.bodies) == 2 and stub.bodies[-1]["messages"][-1]["content"] == "Hello!"


def test_commands(start, tmp_path):
    stub = Stub()
    chat = start("--url", stub.start(), "--system", "Be brief.", model=None)
    assert chat.say("/set temperature 0.25") == "" and chat.say("/set max_tokens 9") == ""
    assert "temperature 0.25" in chat.say("/set")
    assert "from 0 to 100" in chat.say("/set temperature hot")
    assert "there is no setting heat" in chat.say("/set heat 1")
    chat.say("One")
    sent = stub.bodies[-1]
    assert sent["temperature"] == 0.25 and sent["max_tokens"] == 9
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    chat.say("/system Be long.")
    chat.say("Two")
    assert [m["content"] for m in stub.bodies[-1]["messages"]] == [
        "Be long.", "One", " word word word word", "Two"]
    file = tmp_path / "talk.json"
    assert chat.say(f"/save {file}") == ""
    chat.say("/clear")
    chat.say("Three")
    assert len(stub.bodies[-1]["messages"]) == 2
    assert chat.say(f"/load {file}") == ""
    chat.say("Four")
    assert [m["content"] for m in stub.bodies[-1]["messages"]][-2:] == [" word word word word", "Four"]
    assert len(stub.bodies[-1]["messages"]) == 6
    assert "/save needs" in chat.say("/save")
    assert "/nowhere/file" in chat.say("/load /nowhere/file").replace("/load /nowhere/file", "", 1)
    file.write_text('{"text": "a story"}')
    assert "--text" in chat.say(f"/load {file}")
    file.write_text('{"messages": [{"role": "user"}]}')
    assert "without role and content" in chat.say(f"/load {file}")


def test_control_c_twice_leaves(start):
    chat = start("--max-tokens", 4)
    os.write(chat.terminal, CTRL_C)
    chat.wait_for("Ctrl-C again")
    chat.wait_for("\n> ", chat.shown.index("again"))
    os.write(chat.terminal, CTRL_C)
    assert chat.leave() == 0


def test_control_c_stops_the_answer_of_a_server(start):
    chat = start("--url", Stub("stall").start(), model=None)
    os.write(chat.terminal, b"Hello\n")
    chat.wait_for("word word")
    os.write(chat.terminal, CTRL_C)
    chat.wait_for("[stopped]")
    chat.wait_for("\n> ", chat.shown.index("[stopped]"))
    os.write(chat.terminal, CTRL_C)  # the second
    assert chat.leave() == 0


def test_the_terminal_is_as_before(start):
    chat = start("--max-tokens", 4)
    os.write(chat.terminal, b"/quit\n")
    assert chat.leave() == 0
    flags = termios.tcgetattr(chat.terminal)[3]
    assert flags & termios.ICANON and flags & termios.ECHO


def test_base_models_continue_text(start, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(STORYTELLER, base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((base / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    chat = start("--max-tokens", 8, "--temperature", 0, model=base)
    assert "continued as text" in chat.shown
    answer = chat.say("Once upon a time")
    expected = subprocess.run(
        [BINARY, "generate", str(base), "--prompt", "Once upon a time", "--max-tokens", "8",
         "--temperature", "0", "--log-level", "error"], cwd=ROOT, capture_output=True, text=True,
        timeout=SLOW, check=True).stdout
    assert answer.startswith(expected.strip())
    chat.say(f"/save {tmp_path}/text.json")
    text = json.loads((tmp_path / "text.json").read_text())["text"]
    assert text.startswith("Once upon a time" + expected.rstrip("\n"))
    assert "system message" in chat.say("/system x")
    assert "left out" in chat.say("king " * 1500)


def test_thoughts_are_dimmed_and_not_repeated(start):
    """A model that thinks, as far as its template and its words say."""
    stub = Stub()

    async def thinking(writer, chat, tokens):
        from stub_server import chunk, frame, head
        writer.write(head(kind="text/event-stream", extra="Transfer-Encoding: chunked\r\n\r\n"))
        for delta in ({"reasoning_content": "Let me see."}, {"content": "\x1b[31mFour."}):
            writer.write(frame({"choices": [{"index": 0, "delta": delta}]}))
        writer.write(frame("[DONE]") + b"0\r\n\r\n")

    stub.stream = thinking
    chat = start("--url", stub.start(), model=None)
    chat.say("2+2?")
    assert "\x1b[2mLet me see.\x1b[0m\r\n\r\n[31mFour.\r\n" in chat.raw  # and no red
    chat.say("Sure?")
    assert stub.bodies[-1]["messages"][1]["content"] == "\x1b[31mFour."


def test_a_server_that_is_not_there():
    fails(UNAVAILABLE, "cannot reach", arguments=("chat", "--url", "http://127.0.0.1:9"))
    fails(INVALID, "--url", arguments=("chat",))
    fails(INVALID, "--url", arguments=("chat", STORYTELLER, "--url", "http://127.0.0.1:9"))


def test_piped_lines():
    result = subprocess.run(
        [BINARY, "chat", str(STORYTELLER), "--max-tokens", "6", "--temperature", "0"], cwd=ROOT,
        input="Tell me a story.\n\nAnd then?", text=True, capture_output=True, timeout=SLOW,
        check=False)
    assert result.returncode == 0, result.stderr
    assert ">" not in result.stdout
    assert len([line for line in result.stdout.split("\n") if line]) >= 2
