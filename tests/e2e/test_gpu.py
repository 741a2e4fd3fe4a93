"""nibble on a GPU: what it serves, and what it says when the GPU, its driver or its memory fail.

NIBBLE_BIN names the binary (default build/cuda-sm90/tools/nibble), beside which libnibble_cuda.so
lies; NIBBLE_FAULTY_LIBRARY a build of that library whose GPU has a fault (default: beside it, or in
build/cuda-sm90/tests/cuda). Without library or GPU, what needs them is skipped. Standard library
only: run by pytest, or by `python3 tests/e2e/test_gpu.py`.
"""

import concurrent.futures
import contextlib
import ctypes
import http.client
import json
import math
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/cuda-sm90"
BINARY = pathlib.Path(os.environ.get("NIBBLE_BIN", BUILD / "tools/nibble")).absolute()
LIBRARY = BINARY.parent / "libnibble_cuda.so"
MODEL = ROOT / "models/storyteller"
INVALID, UNSUPPORTED, EXHAUSTED, UNAVAILABLE, INTERNAL = 2, 5, 7, 9, 70


def faulty_library():
    given = os.environ.get("NIBBLE_FAULTY_LIBRARY")
    places = [given] if given else [BINARY.parent / "libnibble_cuda_faulty.so",
                                    BUILD / "tests/cuda/libnibble_cuda_faulty.so"]
    return next((pathlib.Path(place).absolute() for place in places
                 if pathlib.Path(place).exists()), None)


def has_gpu():
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


needs_library = unittest.skipUnless(LIBRARY.exists(), "no libnibble_cuda.so beside nibble")
needs_gpu = unittest.skipUnless(LIBRARY.exists() and has_gpu(), "no GPU, or no build for one")
needs_faults = unittest.skipUnless(LIBRARY.exists() and has_gpu() and faulty_library(),
                                   "no GPU, or no libnibble_cuda_faulty.so")


def nibble(*arguments, library_path=None, timeout=120, **environment):
    changed = {**os.environ, **environment}
    if library_path:
        before = os.environ.get("LD_LIBRARY_PATH", "")
        changed["LD_LIBRARY_PATH"] = f"{library_path}:{before}" if before else str(library_path)
    return subprocess.run([BINARY, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
                          errors="replace", timeout=timeout, env=changed)


def generate(*flags, model=MODEL, tokens=8, prompt="Once upon a time", **options):
    return nibble("generate", model, "--prompt", prompt, "--max-tokens", tokens, "--temperature",
                  0, *flags, **options)


OLD_DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = 12040; return 0; }
int cuGetProcAddress_v2(const char* name, void** out, int version, long flags, void* status) {
  *out = strcmp(name, "cuInit") == 0 ? (void*)cuInit
       : strcmp(name, "cuDriverGetVersion") == 0 ? (void*)cuDriverGetVersion
       : strcmp(name, "cuGetProcAddress") == 0 ? (void*)cuGetProcAddress_v2 : (void*)0;
  return *out ? 0 : 500;
}
"""


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def refused(self, run, code, *words):
        """One message of the program, with every word; nothing on stdout."""
        self.assertEqual(run.returncode, code, run.stderr)
        messages = [line for line in run.stderr.splitlines() if line.startswith("nibble: ")]
        self.assertEqual(len(messages), 1, run.stderr)
        for word in words:
            self.assertIn(word, messages[0])
        self.assertEqual(run.stdout, "")
        print(f"\n  {messages[0]}", file=sys.stderr)

    def fault(self, text):
        """The flags of a GPU with this fault."""
        library = self.folder / "libnibble_cuda_faulty.so"
        if not library.exists():
            library.symlink_to(faulty_library())
        (self.folder / "fault").write_text(text)
        return ["--device", "cuda", "--cuda-library", library]


class Server:
    """`nibble serve` on a free port."""

    def __init__(self, *flags, model=MODEL):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [BINARY, "serve", model, "--port", self.port, *flags]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stderr=self.log)
        deadline = time.monotonic() + 60
        while self.get("/health")[0] != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                self.log.seek(0)
                raise RuntimeError(f"no server: {self.log.read()}")
            time.sleep(0.05)

    def get(self, path):
        try:
            return self.request("GET", path, None)
        except OSError:
            return 0, ""

    def request(self, method, path, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body),
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")

    def complete(self, **fields):
        return self.request("POST", "/v1/completions",
                            {"prompt": "Once upon a time", "temperature": 0, **fields})

    def complete_at_once(self, count, **fields):
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            return [sent.result() for sent in
                    [pool.submit(self.complete, **fields) for _ in range(count)]]

    def logged(self):
        """Read without moving the place where the server writes."""
        return os.pread(self.log.fileno(), 1 << 20, 0).decode(errors="replace")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.process.wait()
            self.log.close()


class Partings:
    """How the greedy texts of a second server differ from a first one's.

    The first's text is the one that counts: behind a token that differs both go on from it, so
    every position of it is compared.
    """

    def __init__(self, first, second, prompts, length):
        self.positions = 0
        self.gaps = []  # of the first's log-probabilities, at each parting
        self.squares = []  # of differences of log-probabilities that both give, before and there
        for prompt in prompts:
            left = length
            while left > 0:
                left -= self.add(*(self.text(server, prompt, left) for server in (first, second)))
                prompt += self.taken

    def add(self, first, second):
        """Compares two texts up to where they part; returns how many positions that is."""
        both = range(min(len(first["tokens"]), len(second["tokens"])))
        parting = next((i for i in both if first["tokens"][i] != second["tokens"][i]), None)
        count = len(both) if parting is None else parting + 1
        for top, other in zip(first["top_logprobs"][:count], second["top_logprobs"]):
            self.squares += [(top[token] - other[token]) ** 2 for token in top if token in other]
        if parting is not None:
            top = first["top_logprobs"][parting]
            other = top.get(second["tokens"][parting], -math.inf)
            self.gaps.append(first["token_logprobs"][parting] - other)
        self.positions += count
        self.taken = "".join(first["tokens"][:count])
        return count

    @staticmethod
    def text(server, prompt, length):
        status, body = server.complete(prompt=prompt, max_tokens=length, logprobs=5,
                                       ignore_eos=True)
        assert status == 200, body
        return json.loads(body)["choices"][0]["logprobs"]

    @property
    def step(self):
        return math.sqrt(sum(self.squares) / len(self.squares))

    def __str__(self):
        gaps = ", ".join(f"{gap:.3f}" for gap in sorted(self.gaps))
        return (f"{len(self.gaps)} of {self.positions} tokens differ, log-probabilities by "
                f"{self.step:.3f}; gaps {gaps}")


@needs_gpu
class Answers(Case):
    PROMPTS = ("Once upon a time", "The little dog", "Tom had a red ball", "One day, Lily",
               "In the forest", "Mum said", "The sun was", "A big bear")

    @contextlib.contextmanager
    def serving(self, *flags, model):
        server = Server(*flags, model=model)
        try:
            yield server
        finally:
            self.assertEqual(server.stop(), 0)

    def test_log_levels_are_the_librarys_too(self):
        asked = ("generate", MODEL, "--prompt", "The sun", "--max-tokens", 1, "--device", "cuda")
        for level, lines in (("warning", 0), ("info", 1), ("debug", 2)):
            run = nibble("--log-level", level, *asked)
            self.assertEqual(run.returncode, 0, run.stderr)
            # One line of how many checks there were, and one of each of them.
            found = len(re.findall("info self-test: ", run.stderr)), \
                len(re.findall("debug self-test: ", run.stderr)) > 0
            self.assertEqual(found, (int(lines > 0), lines > 1), run.stderr)

    def test_texts_of_integers_equal_the_cpus(self):
        # All is the CPU's arithmetic but the order in which attention adds values, which hardly ever
        # makes an activation the next INT8 number. Where it does, differences are from there on
        # about as large as what rounding activations costs; what that costs the unquantized model
        # shows.
        step = None
        for scheme in ("w8a8_int8", "w4a8"):
            model = self.folder / scheme
            self.assertEqual(nibble("quantize", MODEL, model, "--scheme", scheme).returncode, 0)
            with self.serving("--device", "cpu", model=model) as cpu:
                if step is None:
                    with self.serving("--device", "cpu", model=MODEL) as ideal:
                        own = Partings(cpu, ideal, self.PROMPTS, 48)
                    print(f"\n  {scheme} and bf16 on the CPU: {own}", file=sys.stderr)
                    step = own.step
                with self.serving("--device", "cuda", model=model) as gpu:
                    found = Partings(cpu, gpu, self.PROMPTS, 48)
            print(f"\n  {scheme} on the CPU and on the GPU: {found}", file=sys.stderr)
            self.assertEqual(found.positions, 48 * len(self.PROMPTS))
            self.assertEqual(found.gaps, [])
            self.assertLessEqual(found.step, 0.1 * step)

    def test_blocks_of_int8_and_bf16_are_near_the_cpus(self):
        # The CPU has BF16 in fixed point and adds it in another order, so that now and then an
        # activation becomes the next INT8 number.
        text = self.folder / "text.txt"
        text.write_text((ROOT / "tests/data/text/the_black_cat.txt").read_text()[:6000])
        for permute in ("fold", "gather"):
            model = self.folder / permute
            run = nibble("quantize", MODEL, model, "--scheme", "w4a8_bf16", "--block", 32,
                         "--outlier-share", 0.1, "--permute", permute, "--calibrate", text,
                         "--calibration-windows", 4, "--calibration-length", 200)
            self.assertEqual(run.returncode, 0, run.stderr)

            def perplexity(*flags, model=model):
                run = nibble("eval", "ppl", model, "--text", text, "--window", 64, "--json", *flags)
                self.assertEqual(run.returncode, 0, run.stderr)
                return json.loads(run.stdout)["perplexity"]

            cpu = perplexity("--device", "cpu")
            found = [perplexity("--device", "cuda", *kernel) / cpu - 1
                     for kernel in ((), ("--kernel", "gemm_w4a8_bf16_sm80"))]
            print(f"\n  {permute}: perplexity {cpu:.4f}, on the GPU {found}", file=sys.stderr)
            self.assertLess(max(map(abs, found)), 2e-3)
            if permute == "fold":  # --ignore-fmpq gathers otherwise, which no GPU kernel does
                self.assertNotIn(perplexity("--device", "cuda", "--ignore-fmpq") / cpu - 1, found)

    @staticmethod
    def speculations(model):
        return ({"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3,
                 "prompt_lookup_min": 1},
                {"method": "draft_model", "num_speculative_tokens": 4, "model": str(model)})

    @staticmethod
    def counted(server, kind):
        """Tokens that speculation has proposed (`draft`) or got right (`accepted`)."""
        return float(re.search(rf"^vllm:spec_decode_num_{kind}_tokens_total\S* (\S+)$",
                               server.get("/metrics")[1], re.MULTILINE)[1])

    def test_proposals_change_no_text(self):
        # Rows that verify proposals take the kernels of as many sequences, which add floats in
        # other orders than those of one row do: a parting must be a near tie.
        story = "Lily had a red ball. Lily had a blue ball. Lily had a red ball. Lily had"
        for scheme in ("w4a8", "w4a16_g32"):
            model = self.folder / scheme
            self.assertEqual(nibble("quantize", MODEL, model, "--scheme", scheme).returncode, 0)
            with self.serving("--device", "cuda", model=model) as plain:
                for config in self.speculations(model):
                    with self.serving("--device", "cuda", "--speculative-config",
                                      json.dumps(config), model=model) as ahead:
                        found = Partings(plain, ahead, (story, *self.PROMPTS), 48)
                        accepted = self.counted(ahead, "accepted")
                    print(f"\n  {scheme}, {config['method']}: {found}", file=sys.stderr)
                    self.assertGreater(accepted, 0)
                    self.assertEqual(found.positions, 48 * (1 + len(self.PROMPTS)))
                    if scheme == "w4a8":
                        self.assertLessEqual(len(found.gaps), 1)
                    self.assertLessEqual(max(found.gaps, default=0), 0.1)

    def test_proposals_change_no_sampled_text(self):
        # A token takes the random number of its place in its answer, with proposals or without. So
        # answers part only where attention adds values in another order and two tokens' sampled
        # scores are as good as equal.
        prompt = "Lily had a red ball. Lily had a blue ball. Lily had"
        model = self.folder / "w4a8"
        self.assertEqual(nibble("quantize", MODEL, model, "--scheme", "w4a8").returncode, 0)

        def texts(server):
            answers = (server.complete(prompt=prompt, max_tokens=48, temperature=0.8, seed=seed,
                                       ignore_eos=True) for seed in range(64))
            return [json.loads(body)["choices"][0]["text"] for _, body in answers]

        with self.serving("--device", "cuda", model=model) as server:
            plain = texts(server)
        self.assertGreater(len(set(plain)), 60)
        for config in self.speculations(model):
            with self.serving("--device", "cuda", "--speculative-config", json.dumps(config),
                              model=model) as server:
                ahead = texts(server)
                proposed, accepted = (self.counted(server, kind) for kind in ("draft", "accepted"))
            parted = sum(one != other for one, other in zip(plain, ahead))
            print(f"\n  {config['method']}: {parted} of {len(plain)} sampled answers part, "
                  f"{accepted:.0f} of {proposed:.0f} proposed tokens right", file=sys.stderr)
            self.assertGreater(accepted, 0)
            self.assertLessEqual(parted, len(plain) // 8)

    def test_answers_of_a_form_run_beside_others(self):
        model = self.folder / "w4a8"  # texts do not depend on the batch
        self.assertEqual(nibble("quantize", MODEL, model, "--scheme", "w4a8").returncode, 0)
        with self.serving("--device", "cuda", model=model) as server:
            alone = server.complete(max_tokens=64, ignore_eos=True)
            with concurrent.futures.ThreadPoolExecutor(12) as pool:
                forms = [pool.submit(server.complete, max_tokens=64, regex="[a-f]{3}-[0-9]{20}",
                                     temperature=1, seed=seed) for seed in range(8)]
                slow = pool.submit(server.complete, max_tokens=4, regex=".?" * 10)
                others = [pool.submit(server.complete, max_tokens=64, ignore_eos=True)
                          for _ in range(3)]
            text = json.loads(alone[1])["choices"][0]["text"]
            for other in others:
                self.assertEqual(json.loads(other.result()[1])["choices"][0]["text"], text)
            for form in forms:
                choice = json.loads(form.result()[1])["choices"][0]
                self.assertRegex(choice["text"], "^[a-f]{3}-[0-9]{20}$")
                self.assertEqual(choice["finish_reason"], "stop")
            self.assertEqual(slow.result()[0], 200, slow.result()[1])

    def test_serves_and_is_healthy(self):
        server = Server("--device", "cuda")
        try:
            status, body = server.complete(max_tokens=20)
            self.assertEqual(status, 200, body)
            self.assertEqual(json.loads(body)["usage"]["completion_tokens"], 20)
            self.assertEqual(server.get("/health"), (200, '{"status":"ok"}'))
        finally:
            self.assertEqual(server.stop(), 0)

    def test_embeddings_are_those_of_transformers(self):
        golden = json.loads((ROOT / "tests/golden/storyteller_embeddings.json").read_text())
        texts = [entry["text"] for entry in golden["entries"]]
        for pooling in ("last", "mean"):
            server = Server("--device", "cuda", "--pooling", pooling)
            try:
                with concurrent.futures.ThreadPoolExecutor(9) as pool:  # beside what is generated
                    others = [pool.submit(server.complete, max_tokens=64) for _ in range(8)]
                    status, body = server.request("POST", "/v1/embeddings", {"input": texts})
                    self.assertEqual([other.result()[0] for other in others], [200] * 8)
                self.assertEqual(status, 200, body)
                for entry, got in zip(golden["entries"], json.loads(body)["data"]):
                    apart = math.dist(got["embedding"], entry[pooling])
                    self.assertLess(apart, 0.02)  # the model computes in BF16
            finally:
                self.assertEqual(server.stop(), 0)

    def test_more_gpus_than_there_are(self):
        self.refused(generate("--device", "cuda:64"), INVALID, "no GPU 64")


@needs_faults
class Faults(Case):
    def test_the_library_without_fault_answers(self):
        good = generate(*self.fault("none"))
        self.assertEqual(good.returncode, 0, good.stderr)
        self.assertEqual(good.stdout, generate("--device", "cuda").stdout)

    def test_a_kernel_that_is_wrong_is_not_served(self):
        for command in (generate, lambda *flags: nibble("serve", MODEL, "--port", 0, *flags)):
            self.refused(command(*self.fault("damaged")), UNAVAILABLE, "self-test",
                         "kernel gemm_bf16", "embed_tokens", "reference", "--device cpu")

    def test_a_kernel_for_few_rows_that_is_wrong_is_not_served(self):
        model = self.folder / "w4a16_g128"
        self.assertEqual(nibble("quantize", MODEL, model, "--scheme", "w4a16_g128").returncode, 0)
        self.refused(generate(*self.fault("few"), model=model), UNAVAILABLE, "self-test",
                     "kernel gemm_w4a16", "with 9 rows", "reference", "--device cpu")
        self.assertEqual(generate(*self.fault("few")).returncode, 0)

    def test_a_kernel_that_faults_is_not_served(self):
        for command in (generate, lambda *flags: nibble("serve", MODEL, "--port", 0, *flags)):
            self.refused(command(*self.fault("trap 0")), UNAVAILABLE, "self-test",
                         "kernel gemm_bf16", "cudaError", "--device cpu")

    def test_a_server_outlives_a_fault_and_says_so(self):
        server = Server(*self.fault("trap 3000"), "--max-num-seqs", 4)
        try:
            begin = time.monotonic()
            status, body = server.complete(max_tokens=900, ignore_eos=True)
            self.assertEqual(status, 500, body)
            error = json.loads(body)["error"]
            self.assertIn("cudaError", error["message"])
            self.assertLess(time.monotonic() - begin, 30)
            status, body = server.get("/health")
            self.assertEqual(status, 503)
            self.assertIn("cudaError", json.loads(body)["error"]["message"])
            print(f"\n  /health: {body}", file=sys.stderr)
            status, body = server.complete(max_tokens=4)
            self.assertEqual(status, 503)
            self.assertIn("failed", json.loads(body)["error"]["message"])
            self.assertEqual(server.get("/metrics")[0], 200)
        finally:
            self.assertGreaterEqual(server.stop(), 0)  # ended by itself, not by a signal

    def test_every_request_ends_with_an_error_object(self):
        server = Server(*self.fault("trap 3000"), "--max-num-seqs", 2)
        try:
            answers = server.complete_at_once(5, max_tokens=900, ignore_eos=True)
            for status, body in answers:  # two ran, three waited
                self.assertEqual(status, 500, body)
                self.assertIn("failed" if "another request" in body else "cudaError",
                              json.loads(body)["error"]["message"])
        finally:
            server.stop()

    def test_steps_that_cannot_be_recorded_run_all_the_same(self):
        good = generate("--device", "cuda", tokens=40)
        bare = generate(*self.fault("graphs 0"), tokens=40)
        self.assertEqual(bare.returncode, 0, bare.stderr)
        self.assertEqual(bare.stdout, good.stdout)
        self.assertIn("no GPU memory left to record steps", bare.stderr)
        server = Server(*self.fault("graphs 1"), "--max-num-seqs", 8)
        try:
            for status, body in server.complete_at_once(5, max_tokens=40, logprobs=2):
                self.assertEqual(status, 200, body)
            self.assertEqual(server.get("/health")[0], 200)
        finally:
            self.assertEqual(server.stop(), 0)

    def test_a_stream_ends_with_an_error_object(self):
        server = Server(*self.fault("trap 3000"))
        try:
            status, body = server.complete(max_tokens=900, ignore_eos=True, stream=True)
            self.assertEqual(status, 200)
            events = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
            self.assertGreater(len(events), 10)
            errors = [event for event in events if '"error"' in event]
            self.assertEqual(len(errors), 1, events[-3:])
            self.assertIn("cudaError", json.loads(errors[0])["error"]["message"])
        finally:
            server.stop()

    def test_one_answer_ends_with_a_message(self):
        run = generate(*self.fault("trap 3000"), tokens=900)
        if run.returncode == 0:  # the story ended before the fault
            run = generate(*self.fault("trap 200"), tokens=900)
        self.assertEqual(run.returncode, UNAVAILABLE, run.stderr)
        self.assertIn("cudaError", run.stderr)

    def test_an_evaluation_ends_with_a_message(self):
        run = nibble("eval", "ppl", MODEL, "--text", "docs/cuda.md", "--window", 16,
                     *self.fault("trap 50"), "--json")
        self.assertIn(run.returncode, (UNAVAILABLE, INTERNAL), run.stderr)
        self.assertIn("cudaError", run.stderr)
        self.assertEqual(run.stdout, "")

    def test_a_benchmark_ends_with_a_message(self):
        run = nibble("bench", "offline", MODEL, *self.fault("trap 3000"), "--json")
        self.assertIn(run.returncode, (UNAVAILABLE, INTERNAL), run.stderr)
        self.assertIn("cudaError", run.stderr)
        self.assertEqual(run.stdout, "")


@needs_library
class Drivers(Case):
    def shadow(self, name):
        """A folder with a library of this name that has none of its functions."""
        with open("/proc/self/maps") as maps:
            ctypes.CDLL("libm.so.6")
            other = next(line.split()[-1] for line in maps if "/libm" in line)
        shutil.copy(other, self.folder / name)
        return self.folder

    def test_no_driver(self):
        if has_gpu():
            self.skipTest("this machine has a driver")
        self.refused(generate("--device", "cuda"), UNAVAILABLE, "no NVIDIA driver", "--device cpu")

    def test_a_driver_that_is_none(self):
        run = generate("--device", "cuda", library_path=self.shadow("libcuda.so.1"))
        self.refused(run, UNAVAILABLE, "no GPU can be used", "--device cpu")

    def test_an_old_driver(self):
        compiler = shutil.which("cc") or shutil.which("gcc")
        if not compiler:
            self.skipTest("no C compiler for a driver of an old version")
        source = self.folder / "cuda.c"
        source.write_text(OLD_DRIVER)
        subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o",
                        self.folder / "libcuda.so.1", source], check=True)
        run = generate("--device", "cuda", library_path=self.folder)
        self.refused(run, UNAVAILABLE, "CUDA 12.4", "needs 13", "--device cpu")
        run = generate("--device", "auto", library_path=self.folder)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("computing on the CPU", run.stderr)

    @needs_gpu
    def test_a_hidden_gpu(self):
        run = generate("--device", "cuda", CUDA_VISIBLE_DEVICES="")
        self.refused(run, UNAVAILABLE, "CUDA_VISIBLE_DEVICES", "--device cpu")
        run = generate("--device", "auto", CUDA_VISIBLE_DEVICES="")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("computing on the CPU", run.stderr)
        self.assertEqual(run.stdout, generate("--device", "cpu").stdout)

    @needs_gpu
    def test_no_cublaslt(self):
        run = generate("--device", "cuda", "--kernel", "gemm_bf16_cublaslt",
                       library_path=self.shadow("libcublasLt.so.13"))
        self.refused(run, UNAVAILABLE, "libcublasLt.so.13", "cublasLt", "--device cpu")


HOLDER = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, f"{name}: {code}"
context, device = ctypes.c_void_p(), ctypes.c_int()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
free, total, memory = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
for piece in (1 << 30, 64 << 20, 8 << 20, 2 << 20):
    while True:
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        if free.value < int(sys.argv[1]) + piece:
            break
        if cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(piece)) != 0:
            break
print(free.value, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held_memory(left):
    """Another process holds all of the GPU's memory but about `left` bytes."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(left)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(timeout=60)


@needs_gpu
class Memory(Case):
    def test_a_cache_larger_than_the_gpu(self):
        run = nibble("serve", MODEL, "--port", 0, "--device", "cuda", "--kv-cache-memory", "4TiB",
                     "--max-num-seqs", 1000000)
        self.refused(run, EXHAUSTED, "KV cache", "MiB does not fit", "weights take",
                     "MiB free", "--kv-cache-memory")

    def test_another_process_holds_the_memory(self):
        with held_memory(700 << 20):
            self.refused(generate("--device", "cuda"), EXHAUSTED, "no memory for a KV cache",
                         "weights take", "MiB free", "end what else uses the GPU")
        with held_memory(4 << 30):
            run = generate("--device", "cuda")
            self.assertEqual(run.returncode, 0, run.stderr)

    def test_another_process_holds_nearly_all(self):
        with held_memory(0) as left:
            run = generate("--device", "cuda")
            self.assertIn(run.returncode, (EXHAUSTED, UNAVAILABLE), run.stderr)
            messages = [line for line in run.stderr.splitlines() if line.startswith("nibble: ")]
            self.assertEqual(len(messages), 1, run.stderr)
            print(f"\n  {left >> 20} MiB left: {messages[0]}", file=sys.stderr)

    def test_another_process_takes_what_is_left_while_it_serves(self):
        server = Server("--device", "cuda", "--kv-cache-memory", "64MiB", "--max-num-seqs", 8)
        try:
            with held_memory(0) as left:
                answers = server.complete_at_once(5, max_tokens=40, logprobs=2)
                print(f"\n  {left >> 20} MiB left: {sorted(status for status, _ in answers)}",
                      file=sys.stderr)
            for status, body in answers:
                self.assertEqual(status, 200, body)
            self.assertEqual(server.get("/health")[0], 200)
        finally:
            self.assertEqual(server.stop(), 0)

    def test_a_benchmark_that_does_not_fit(self):
        with held_memory(700 << 20):
            run = nibble("bench", "offline", MODEL, "--device", "cuda", "--batch", 4096,
                         "--input-len", 60, "--output-len", 4, "--max-num-batched-tokens", 65536,
                         "--json")
            self.refused(run, EXHAUSTED, "MiB of GPU memory", "MiB are free")

    def test_what_is_planned_fits(self):
        for kv in ("bf16", "fp8", "int8", "int4"):
            run = nibble("bench", "capacity", MODEL, "--device", "cuda", "--kv-cache-dtype", kv,
                         "--json")
            self.assertEqual(run.returncode, 0, run.stderr)
            report = json.loads(run.stdout)
            self.assertGreater(report["free_bytes_after"], 0)
            self.assertGreaterEqual(report["cache_bytes"], 0.85 * report["free_bytes_before"])
            print(f"\n  {run.stdout.strip()}", file=sys.stderr)


@needs_gpu
class StaticRanges(Case):
    """Numbers far outside of the int4_static cache's ranges."""

    TEXT = ROOT / "tests/data/text/the_black_cat.txt"
    CACHE = ("--device", "cuda", "--kv-cache-dtype", "int4_static")

    def setUp(self):
        super().setUp()
        self.model = self.folder / "model"
        shutil.copytree(MODEL, self.model)
        run = nibble("calibrate-kv", self.model, "--calibrate", self.TEXT,
                     "--calibration-windows", 2, "--calibration-length", 64)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.sidecar = json.loads((self.model / "nibble_kv.json").read_text())
        for layer in self.sidecar["layers"]:  # wide enough for anything
            for half in (layer["keys"], layer["values"]):
                half["ranges"]["step"] = [1e3] * len(half["ranges"]["step"])
        self.write()

    def write(self):
        (self.model / "nibble_kv.json").write_text(json.dumps(self.sidecar))

    def narrow_a_channel(self):
        """From now on each token has one number outside."""
        self.sidecar["layers"][2]["values"]["ranges"]["step"][5] = 1e-9
        self.write()

    def counts(self, log):
        return [int(number) for number in re.findall(
            r"(\d+) keys and values so far lay far outside of the int4_static", log)]

    def warned_of(self, run):
        self.assertEqual(run.returncode, 0, run.stderr)
        return self.counts(run.stderr)

    def test_prompts_and_answers(self):
        def answer():
            return generate(*self.CACHE, "--json", model=self.model)
        self.assertEqual(self.warned_of(answer()), [])
        self.narrow_a_channel()
        run = answer()
        beyond = self.warned_of(run)[0] - json.loads(run.stdout)["prompt_tokens"]
        self.assertIn(beyond, (0, 1))  # the step behind the prompt's may be under way

    def test_evaluations(self):
        text = self.folder / "short.txt"
        text.write_text(self.TEXT.read_text()[:2000])

        def evaluate():
            return nibble("eval", "ppl", self.model, "--text", text, "--window", 128, *self.CACHE)
        self.assertEqual(self.warned_of(evaluate()), [])
        self.narrow_a_channel()
        counts = self.warned_of(evaluate())  # logits are read, nothing is sampled
        print(f"\n  {counts}", file=sys.stderr)
        self.assertEqual(counts, sorted(counts))
        self.assertGreater(counts[-1], 100)

    def test_warming_up_counts_nothing(self):
        self.narrow_a_channel()
        server = Server(*self.CACHE, model=self.model)
        try:
            before = self.counts(server.logged())
            print(f"\n  {before} before the first request", file=sys.stderr)
            self.assertLess(max(before, default=0), 10)  # thousands of tokens warm up
            self.assertEqual(server.complete(max_tokens=12)[0], 200)
            after = self.counts(server.logged())
            self.assertGreater(len(after), len(before))
            self.assertLess(after[-1], 100)
        finally:
            self.assertEqual(server.stop(), 0)


@needs_gpu
class Calibration(Case):
    TEXT = ROOT / "tests/data/text/the_black_cat.txt"
    WINDOWS = ("--calibration-windows", 16, "--calibration-length", 128)

    def quantized(self, name, *flags, source=MODEL, **options):
        out = self.folder / name
        run = nibble("quantize", source, out, "--calibrate", self.TEXT, *self.WINDOWS, "--json",
                     *flags, **options)
        self.assertEqual(run.returncode, 0, run.stderr)
        return out, json.loads(run.stdout)

    def divergence(self, model):
        run = nibble("eval", "kld", MODEL, model, "--text", ROOT / "docs/calibration.md",
                     "--window", 256, "--device", "cuda", "--json")
        self.assertEqual(run.returncode, 0, run.stderr)
        return json.loads(run.stdout)["kld"]

    def test_codes_are_as_good_as_the_cpus(self):
        for scheme, method in (("w4a16_g32", "gptq"), ("w4a8", "gptq"), ("w4a16_g32", "gptaq")):
            found = {}
            for device in ("cpu", "cuda"):
                model, report = self.quantized(f"{scheme}-{method}-{device}", "--scheme", scheme,
                                               "--method", method, "--device", device)
                found[device] = self.divergence(model)
                self.assertGreater(report["calibration_seconds"]["layers"], 0)
            print(f"\n  {scheme} {method}: KLD {found}", file=sys.stderr)
            # 2,048 tokens decide little of 768 columns, and ties fall otherwise on a GPU.
            self.assertLess(found["cuda"], 1.1 * found["cpu"])
            self.assertGreater(found["cuda"], 0.9 * found["cpu"])

    def test_bytes_are_the_same_in_every_run(self):
        bytes_of = []
        for name, memory in (("first", "2GiB"), ("second", "2GiB"), ("files", "600MiB")):
            model, _ = self.quantized(name, "--scheme", "w4a16_g32", "--device", "cuda", "--memory",
                                      memory)
            bytes_of.append([path.read_bytes() for path in sorted(model.glob("*.safetensors"))])
        self.assertEqual(bytes_of[0], bytes_of[1])
        self.assertEqual(bytes_of[0], bytes_of[2])

    def experts(self):
        config = json.loads((MODEL / "config.json").read_text())
        config.update(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=6,
                      num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True,
                      num_hidden_layers=2)
        (self.folder / "config.json").write_text(json.dumps(config))
        run = nibble("make-dummy", "--config", self.folder / "config.json", "--out",
                     self.folder / "experts")
        self.assertEqual(run.returncode, 0, run.stderr)
        return self.folder / "experts"

    def test_experts_are_as_good_as_the_cpus(self):
        source = self.experts()
        for method in ("gptq", "gptaq"):
            errors, bytes_of = {}, []
            for device in ("cpu", "cuda", "cuda"):
                name = f"{method}-{device}-{len(errors)}"
                model, _ = self.quantized(name, "--scheme", "w4a16_g32", "--method", method,
                                          "--device", device, source=source)
                report = json.loads((model / "quantization_report.json").read_text())
                rounded = [each for each in report["tensors"] if "output_error" in each]
                self.assertTrue(all(each["rounding"] == method for each in rounded))
                errors[name] = sum(each["output_error"] for each in rounded) / len(rounded)
                bytes_of.append([path.read_bytes() for path in sorted(model.glob("*.safetensors"))])
            print(f"\n  experts: mean error {errors}", file=sys.stderr)
            cpu, first, _ = errors.values()
            self.assertLess(abs(first / cpu - 1), 0.03)
            self.assertEqual(bytes_of[1], bytes_of[2])

    def test_what_is_not_computed_there(self):
        for model, method in ((MODEL, "autoround"), (self.experts(), "lwc")):
            run = nibble("quantize", model, self.folder / "out", "--scheme", "w4a16_g32",
                         "--calibrate", self.TEXT, *self.WINDOWS, "--method", method, "--device",
                         "cuda")
            self.refused(run, UNSUPPORTED, method, "--device cpu")


@needs_gpu
@unittest.skipUnless((BINARY.parent / "libnibble_cuda_bench.so").exists(),
                     "no libnibble_cuda_bench.so beside nibble")
class ExpertBenchmark(Case):
    SIZES = ["--experts", 16, "--top-k", 4, "--hidden", 256, "--width", 128]

    def test_its_report(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "report.json"
            for routing, active in (("balanced", [4, 12, 16]), ("one", [4, 4, 4])):
                run = nibble("bench", "moe", "--backend", "cuda", *self.SIZES, "--scheme",
                             "bf16,w4a16_g32", "--m", "1,3,100", "--routing", routing, "--copies",
                             3, "--json", path)
                self.assertEqual(run.returncode, 0, run.stderr)
                report = json.loads(path.read_text())
                self.assertTrue(report["backend"].startswith("cuda:"))
                self.assertGreater(report["ceilings"]["read_gbps"], 100)
                runs = report["runs"]
                self.assertEqual([each["active_experts"] for each in runs], active * 2)
                for each in runs:
                    self.assertGreater(each["us"], 1)
                    self.assertGreaterEqual(each["kernel_launches"], 2)
                    self.assertEqual(each["kernel_launches"] % 1, 0)

    def test_a_scheme_without_kernels(self):
        run = nibble("bench", "moe", "--backend", "cuda", *self.SIZES, "--scheme",
                     "w8a8_fp8_block", "--m", 1)
        if run.returncode != 0:
            self.assertEqual(run.returncode, UNSUPPORTED, run.stderr)
            self.assertIn("no CUDA kernel for experts", run.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
