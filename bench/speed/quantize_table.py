#!/usr/bin/env python3
"""Speed of `nibble quantize` beside the ceilings of disk and memory, as a Markdown table.

    bench/speed/quantize_table.py MODEL WORK_FOLDER [OUT.md] [--runs N] [--threads N]

MODEL is an unquantized BF16 checkpoint of some GB. Every row is the median of N runs; "warm" reads
from the page cache, "cold" after the source's pages were dropped. The result's pages are written to
the device before a run ends (the program flushes every shard). Ceilings, measured before and after
the rows: reading the model's files cold, and writing half as many bytes into WORK_FOLDER and
flushing them, through the page cache and past it (O_DIRECT).
"""
import argparse
import concurrent.futures
import json
import mmap
import os
import pathlib
import shutil
import statistics
import subprocess
import time

BLOCK = 8 << 20


def run_json(*command):
    return json.loads(subprocess.run([*map(str, command), "--json"], check=True, text=True,
                                     stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)


def weights(folder):
    return sorted(pathlib.Path(folder).glob("*.safetensors"))


def drop(folder):
    for path in weights(folder):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(folder):
    buffer = bytearray(BLOCK)
    for path in weights(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def blocks_of(paths, shares):
    """(path, offset, bytes) of every block, dealt out in turn."""
    found = [(path, at, min(BLOCK, path.stat().st_size - at)) for path in paths
             for at in range(0, path.stat().st_size, BLOCK)]
    return [found[share::shares] for share in range(shares)]


def read_ceiling(folder, flags):
    """GB/s of two threads reading cold files in blocks of 8 MiB."""
    drop(folder)

    def read(blocks):
        buffer = mmap.mmap(-1, BLOCK)  # aligned, as direct reading needs
        for path, at, size in blocks:
            file = os.open(path, os.O_RDONLY | flags)
            os.preadv(file, [buffer], at)
            os.close(file)
        return sum(size for _, _, size in blocks)

    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        total = sum(pool.map(read, blocks_of(weights(folder), 2)))
    return total / (time.perf_counter() - begin) / 1e9


def write_ceiling(work, size, flags):
    """GB/s of writing `size` bytes in blocks of 8 MiB and flushing them."""
    path = work / "ceiling.bin"
    block = mmap.mmap(-1, BLOCK)
    block[:] = os.urandom(BLOCK)
    begin = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    for _ in range(size // BLOCK):
        os.write(file, block)
    os.fsync(file)
    os.close(file)
    seconds = time.perf_counter() - begin
    path.unlink()
    return size // BLOCK * BLOCK / seconds / 1e9


def ceilings_line(args, when):
    size = sum(path.stat().st_size for path in weights(args.model)) // 2
    return (f"Disk {when} the rows, GB/s: read cold {read_ceiling(args.model, 0):.2f}, directly "
            f"{read_ceiling(args.model, os.O_DIRECT):.2f}; write and flush "
            f"{write_ceiling(args.work, size, 0):.2f}, directly "
            f"{write_ceiling(args.work, size, os.O_DIRECT):.2f}.")


def quantize(args, source, work, scheme, rule, cold):
    times, report = [], None
    for _ in range(args.runs):
        target = work / "result"
        shutil.rmtree(target, ignore_errors=True)
        (drop if cold else warm)(source)
        os.sync()
        begin = time.perf_counter()
        report = run_json(args.nibble, "quantize", source, target, "--scheme", scheme,
                          "--scale-rule", rule, "--threads", args.threads)
        times.append(time.perf_counter() - begin)
    shutil.rmtree(target, ignore_errors=True)
    return statistics.median(times), min(times), report


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path, nargs="?")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    args = parser.parse_args()
    int4 = args.work / "int4"
    if not int4.exists():
        run_json(args.nibble, "quantize", args.model, int4, "--scheme", "w4a16_g32",
                 "--scale-rule", "absmax")
    rows = [(args.model, "BF16", "w4a16_g32", "absmax"), (args.model, "BF16", "w4a16_g32", "best"),
            (args.model, "BF16", "w4a8", "absmax"), (args.model, "BF16", "w4a8", "quark"),
            (args.model, "BF16", "w4a8", "best"), (int4, "INT4 g32", "w4a8", "absmax"),
            (int4, "INT4 g32", "w4a8", "best"), (args.model, "BF16", "w8a8_fp8", "best")]
    before = ceilings_line(args, "before")
    memory = run_json(args.nibble, "bench", "kernels", "--scheme", "bf16", "--m", "1", "--n",
                      "1024", "--k", "1024", "--threads", args.threads)["ceilings"]["read_gbps"]
    lines = ["| Source | Target | Rule | Pages | s, median (best) | Input GB/s | G weights/s "
             "| Peak RSS, MB | SNR, dB |", "| --- | --- | --- | --- | --: | --: | --: | --: | --: |"]
    for source, stored, scheme, rule in rows:
        size = sum(path.stat().st_size for path in weights(source))
        count = sum(path.stat().st_size for path in weights(args.model)) / 2
        for cold in (False, True):
            median, best, report = quantize(args, source, args.work, scheme, rule, cold)
            lines.append(
                f"| {stored} | `{scheme}` | `{rule}` | {'cold' if cold else 'warm'} | "
                f"{median:.2f} ({best:.2f}) | {size / median / 1e9:.2f} | "
                f"{count / median / 1e9:.2f} | {report['peak_rss_bytes'] / 1e6:.0f} | "
                f"{report['snr_db']['mean']:.2f} |")
            print(lines[-1], flush=True)
    lines += ["", before, ceilings_line(args, "after")]
    lines.append(f"Memory: read {memory:.1f} GB/s with {args.threads} threads.")
    print("\n".join(lines[-3:]))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
