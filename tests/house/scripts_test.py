"""What the scripts say while they build and when something fails, with stand-ins for cmake and apt."""

import os
import pathlib
import pty
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
COMPILER_ERROR = """[1/3] Building CXX object a.cc.o
[2/3] Building CXX object b.cc.o
FAILED: b.cc.o
/usr/bin/c++ -DVERY_LONG_COMMAND -c b.cc
b.cc:7:1: error: expected ';' before '}' token
    7 | }
ninja: build stopped: subcommand failed.
"""


class FuzzTargetsTest(unittest.TestCase):
    def test_every_target_has_seeds_and_words(self):
        fuzz = SCRIPTS.parent / "tests" / "fuzz"
        for target in fuzz.glob("fuzz_*.cc"):
            name = target.stem.removeprefix("fuzz_")
            self.assertTrue(any((fuzz / "corpus" / name).iterdir()), name)
            self.assertTrue((fuzz / "dictionaries" / f"{name}.dict").is_file(), name)


class ScriptsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "bin").mkdir()
        shutil.copytree(SCRIPTS, self.root / "scripts")
        path = f"{self.root}/bin:{os.environ['PATH']}"
        self.environment = {**os.environ, "TERM": "xterm", "PATH": path}
        self.environment.pop("CI", None)

    def command(self, name, text):
        """A stand-in for a program."""
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def start(self, lines, **options):
        """A script of these lines after sourcing common.sh."""
        script = self.root / "scripts" / "own.sh"
        script.write_text(f'source "$(dirname "$0")/common.sh"\n{lines}\n')
        return subprocess.Popen(["bash", str(script)], env=self.environment, **options)

    def run_script(self, lines):
        process = self.start(lines, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def test_compiler_error_is_shown_without_its_command(self):
        (self.root / "output").write_text(COMPILER_ERROR)
        self.command("cmake", f'[ "$1" = --preset ] || {{ cat {self.root}/output; exit 1; }}')
        status, output = self.run_script("build cpu nibble; echo went on")
        self.assertEqual(status, 1, output)
        self.assertIn("b.cc:7:1: error: expected ';'", output)
        self.assertNotIn("VERY_LONG_COMMAND", output)
        self.assertNotIn("went on", output)
        self.assertIn("own.sh: build cpu failed; all its output is in build/logs/build-cpu.log", output)
        self.assertEqual((self.root / "build/logs/build-cpu.log").read_text(), COMPILER_ERROR)

    def test_nothing_to_build_is_one_line(self):
        (self.root / "build/cpu").mkdir(parents=True)
        (self.root / "build/cpu/build.ninja").touch()
        self.command("cmake", '[ "$1" = --preset ] || echo "ninja: no work to do."')
        status, output = self.run_script("build cpu nibble")
        self.assertEqual(status, 0, output)
        self.assertRegex(output, r"^== build cpu: nothing to do, \d+ s\n$")

    def test_cmake_error_is_shown(self):
        self.command("cmake", 'echo "-- found much"; echo "CMake Error at x.cmake:3:"; exit 1')
        status, output = self.run_script("build cpu nibble")
        self.assertEqual(status, 1, output)
        self.assertIn("CMake Error at x.cmake:3:", output)
        self.assertNotIn("found much", output)
        self.assertIn("build/logs/configure-cpu.log", output)

    def test_missing_package_is_named(self):
        self.command("dpkg-query", "exit 1")
        self.command("apt-get", 'echo "E: Unable to locate package libtest"; exit 100')
        self.command("sudo", '[ "$1" = -v ] || exec "$@"')
        status, output = self.run_script("install_packages")
        self.assertEqual(status, 1, output)
        self.assertIn("E: Unable to locate package libtest", output)
        self.assertIn("build/logs/packages.log", output)

    def test_failed_test_is_shown_with_its_output(self):
        status, output = self.run_script(
            "stage tests bash -c '"
            'echo " 1/2 Test #1: Good.Test ...   Passed  0.01 sec"; echo "      Start 2: Bad.Test";'
            'echo " 2/2 Test #2: Bad.Test ...***Failed  0.01 sec"; echo "x.cc:3: Failure";'
            "exit 8'")
        self.assertEqual(status, 8, output)
        self.assertIn("x.cc:3: Failure", output)
        self.assertNotIn("Good.Test", output)

    def test_test_script_ends_with_the_counts(self):
        self.command("dpkg-query", 'printf "install ok installed"')
        self.command("cmake", 'echo "ninja: no work to do."')
        self.command("ctest", 'echo "1/1 Test #1: Bad.Test ...***Failed"; echo "x.cc:3: Failure"\n'
                     "echo '<testsuite><testcase name=\"Bad.Test\" status=\"fail\"><failure/>"
                     "</testcase></testsuite>' > build/cpu-tsan/reports/ctest.xml; exit 8")
        process = subprocess.run(["bash", "scripts/test.sh", "cpu-tsan"], cwd=self.root, text=True,
                                 env=self.environment, capture_output=True, timeout=60)
        self.assertEqual(process.returncode, 1, process.stderr)
        self.assertEqual(process.stdout.splitlines()[-1], "0 passed, 1 failed, 0 skipped")
        self.assertIn("x.cc:3: Failure", process.stderr)

    def test_terminal_has_one_line_that_changes(self):
        outer, inner = pty.openpty()
        process = self.start("stage wait bash -c 'echo \"[3/70] Building\"; sleep 2.5'",
                             stdout=inner, stderr=inner)
        os.close(inner)
        output = b""
        while chunk := self.read(outer):
            output += chunk
        self.assertEqual(process.wait(timeout=60), 0)
        self.assertIn(b"\r\033[K== wait: 3 of 70, 1 s", output)
        self.assertEqual(output.count(b"\n"), 1, output)

    @staticmethod
    def read(terminal):
        try:
            return os.read(terminal, 4096)
        except OSError:  # the other end is closed
            return b""

    def test_interrupt_ends_it(self):
        process = self.start("stage wait sleep 50; echo went on", stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, start_new_session=True)
        time.sleep(1.5)
        begin = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        self.assertLess(time.monotonic() - begin, 30)
        self.assertEqual(process.returncode, 130, output)
        self.assertIn("own.sh: interrupted", output)
        self.assertNotIn("went on", output)


if __name__ == "__main__":
    unittest.main()
