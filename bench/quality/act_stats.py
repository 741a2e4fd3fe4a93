#!/usr/bin/env python3
"""How many blocks of activations hold outliers, before and after their channels are permuted.

    bench/quality/act_stats.py FOLDER [--out bench/results/comet.json]

FOLDER has safetensors files with the largest magnitude of each channel that enters a layer's
products (layers.N.SITE.absmax). An outlier is a channel larger than --times the median channel of
its site; a block with one needs 8 bits. Shares are weighed by the channels of the sites. `gather`
puts the channels of each site in order of size; `fold` gives all sites that read the residual
stream one order, by the sum of their relative sizes, keeps what attention puts out within its heads
(a block is taken as it is), and orders the rest by itself. Standard library only.
"""
import argparse
import json
import pathlib
import statistics
import struct

STREAM = ("qkv", "fc1")  # sites that read the residual stream
KINDS = {"F16": ("e", 2), "F32": ("f", 4)}


def read_sites(path):
    """{(layer, site): sizes of channels}"""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    sites = {}
    for name, tensor in json.loads(data[8:8 + length]).items():
        parts = name.split(".")
        if parts[-1] != "absmax":
            continue
        code, size = KINDS[tensor["dtype"]]
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        sites[int(parts[1]), parts[2]] = struct.unpack(f"<{(end - begin) // size}{code}",
                                                       data[begin:end])
    return sites


def with_outliers(outliers, order, block):
    """Blocks that hold one."""
    return sum(any(outliers[channel] for channel in order[begin:begin + block])
               for begin in range(0, len(order), block))


def largest_first(sizes):
    return sorted(range(len(sizes)), key=lambda channel: -sizes[channel])


def stream_order(sites):
    relative = None
    for (_, site), sizes in sites.items():
        if site in STREAM:
            mean = sum(sizes) / len(sizes)
            scaled = [size / mean for size in sizes]
            relative = scaled if relative is None else [a + b for a, b in zip(relative, scaled)]
    return largest_first(relative)


def shares(sites, block, times):
    order = stream_order(sites)
    blocks, found = 0, {"before": 0, "fold": 0, "gather": 0}
    outliers_of_all, channels = 0, 0
    for (_, site), sizes in sites.items():
        limit = times * statistics.median(sizes)
        outliers = [size > limit for size in sizes]
        outliers_of_all += sum(outliers)
        channels += len(sizes)
        own = largest_first(sizes)
        as_it_is = range(len(sizes))
        folded = order if site in STREAM else as_it_is if site == "out_proj" else own
        blocks += -(-len(sizes) // block)
        for name, arranged in (("before", as_it_is), ("fold", folded), ("gather", own)):
            found[name] += with_outliers(outliers, list(arranged), block)
    return {**{f"a8_share_{name}": count / blocks for name, count in found.items()},
            "outliers": outliers_of_all / channels}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--times", type=float, nargs="+", default=[6.0])
    parser.add_argument("--out", type=pathlib.Path, help="JSON whose list act_stats is replaced")
    args = parser.parse_args()
    rows = []
    for path in sorted(args.folder.glob("*.safetensors")):
        sites = read_sites(path)
        rows += [{"model": path.stem, "block": args.block, "times_median": times,
                  **shares(sites, args.block, times)} for times in args.times]
    print("| Model | Times the median | Outliers, % of channels | Blocks with outliers, % | fold | gather |")
    print("| --- | --: | --: | --: | --: | --: |")
    for row in rows:
        print(f"| {row['model']} | {row['times_median']:g} | {100 * row['outliers']:.2f} | {100 * row['a8_share_before']:.1f} "
              f"| {100 * row['a8_share_fold']:.1f} | {100 * row['a8_share_gather']:.1f} |")
    if args.out:
        result = json.loads(args.out.read_text()) if args.out.exists() else {}
        result["act_stats"] = rows
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
