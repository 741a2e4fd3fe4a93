#!/usr/bin/env python3
"""Checks src/gguf against gguf-py in both directions.

usage: check_gguf.py [GGUF_TEST]     build/cpu/src/gguf/gguf_test by default; needs gguf from PyPI

Random blocks of every type, written and decoded by gguf-py, must decode to the same bits; and what
the builder of the unit tests writes, which they read, must be what gguf-py reads. Ends with
"N passed, N failed, N skipped"; everything is skipped where gguf is not installed.
"""
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
CASES = 3  # two seeds of blocks, and one file of the builder


def run_test(binary, name, **variables):
    """True if the test ran and passed."""
    done = subprocess.run([binary, f"--gtest_filter={name}"], cwd=ROOT, text=True,
                          env={**os.environ, **variables}, capture_output=True, check=False)
    passed = done.returncode == 0 and "[  PASSED  ] 1 test" in done.stdout
    if not passed:
        print(done.stdout + done.stderr)
    return passed


def same_blocks(binary, folder, seed):
    path = str(folder / f"blocks_{seed}.gguf")
    subprocess.run([sys.executable, ROOT / "tests/data/gguf/make_blocks.py", path, "--blocks", "500",
                    "--seed", str(seed)], check=True, stderr=subprocess.DEVNULL)
    return run_test(binary, "GgufDecode.GivesTheBitsOfGgufPyInAGivenFile", NIBBLE_GGUF_BLOCKS=path)


def same_builder(binary, folder):
    """The file of the test GgufFile.IsWrittenForGgufPy, as gguf-py reads it."""
    import gguf

    path = folder / "builder.gguf"
    if not run_test(binary, "GgufFile.IsWrittenForGgufPy", NIBBLE_GGUF_OUT=str(path)):
        return False
    reader = gguf.GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items()
              if not name.startswith("GGUF.")}
    expected = {"general.alignment": 64, "u8": 200, "i8": -100, "u16": 60000, "i16": -30000,
                "u32": 4000000000, "i32": -7, "f32": 0.5, "bool": True, "string": "text",
                "u64": 2 ** 64 - 1, "i64": -2 ** 60, "f64": 0.1, "strings": ["a", "", "\u4e16"],
                "floats": [0.5, -1.5], "ints": [-1, 2]}
    if values != expected:
        print("gguf-py reads", json.dumps(values), "instead of", json.dumps(expected))
        return False
    tensors = {tensor.name: (tensor.tensor_type.name, tensor.shape.tolist()[::-1],
                             tensor.data.tobytes().hex()) for tensor in reader.tensors}
    wanted = {"a": ("F32", [2, 3], struct.pack("<6f", 1, 2, 3, 4, 5, 6).hex()),
              "b": ("Q8_0", [2, 1, 32], bytes(range(68)).hex())}
    if tensors != wanted:
        print("gguf-py reads", tensors, "instead of", wanted)
        return False
    return True


def main():
    binary = str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else
                              ROOT / "build/cpu/src/gguf/gguf_test").resolve())
    try:
        import gguf  # noqa: F401
    except ImportError:
        print("gguf is not installed: pip install gguf")
        print(f"0 passed, 0 failed, {CASES} skipped")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        results = [same_blocks(binary, folder, 11), same_blocks(binary, folder, 12),
                   same_builder(binary, folder)]
    print(f"{sum(results)} passed, {results.count(False)} failed, 0 skipped")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
