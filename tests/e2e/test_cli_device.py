"""--device: which device computes, and what is said where there is none."""

import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("NIBBLE_BIN", ROOT / "build/cpu/tools/nibble"))
MODEL = ROOT / "models/storyteller"


def nibble(*arguments):
    return subprocess.run([BINARY, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
                          timeout=120)


def generate(*flags):
    return nibble("generate", MODEL, "--prompt", "Once", "--max-tokens", "3", "--temperature", "0",
                  *flags)


def has_gpu():
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_cpu_and_auto_answer_alike():
    explicit, automatic = generate("--device", "cpu"), generate()
    assert explicit.returncode == 0 and automatic.returncode == 0
    if not has_gpu():
        assert explicit.stdout == automatic.stdout


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", ""])
def test_unknown_devices_are_refused(device):
    run = generate("--device", device)
    assert run.returncode == 2
    assert "--device" in run.stderr and "cuda:N" in run.stderr


def test_a_named_gpu_is_never_replaced():
    if has_gpu():
        pytest.skip("this machine has a GPU")
    for device in ("cuda", "cuda:1"):
        run = generate("--device", device)
        assert run.returncode == 9, run.stderr
        assert "--device cpu" in run.stderr  # the remedy
        assert run.stdout == ""


def test_a_library_that_is_none_is_named(tmp_path):
    missing = tmp_path / "libnibble_cuda.so"
    run = generate("--device", "cuda", "--cuda-library", missing)
    assert run.returncode == 9 and str(missing) in run.stderr
    missing.write_bytes(b"no library")
    run = generate("--device", "cuda", "--cuda-library", missing)
    assert run.returncode == 9 and str(missing) in run.stderr
    run = generate("--device", "auto", "--cuda-library", missing)
    assert run.returncode == 0 and "computing on the CPU" in run.stderr


def test_kernels_of_a_gpu_need_one():
    if has_gpu():
        pytest.skip("this machine has a GPU")
    run = nibble("bench", "kernels", "--backend", "cuda", "--m", "1", "--json")
    assert run.returncode == 9 and "--device cpu" in run.stderr
    assert run.stdout == ""


def test_memory_is_planned_for_gpus():
    run = nibble("bench", "capacity", MODEL, "--device", "cpu", "--json")
    assert run.returncode == 5 and "--device cuda" in run.stderr
    assert run.stdout == ""
