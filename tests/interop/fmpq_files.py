#!/usr/bin/env python3
"""Reads, checks and writes the sidecar of activations in blocks as docs/formats.md describes it.

usage: fmpq_files.py MODEL     needs nothing but Python

Written from the page alone: it shares no code with the program.
"""
import json
import pathlib
import struct
import sys

NAME, TENSORS, FIELD, VERSIONS = "nibble_fmpq.json", "nibble_fmpq.safetensors", "nibble_fmpq", (1, 2, 3)
MASK = (1 << 64) - 1
P1, P2, P3, P4, P5 = (11400714785074694791, 14029467366897019727, 1609587929392839161,
                      9650029242287828579, 2870177450012600261)
SIZES = {"U8": "B", "I32": "i"}
LOW_BITS = {"block": 4, "class": 4, "bf16": 8}  # of the two precisions that blocks have, by form


def rotate(x, bits):
    return ((x << bits) | (x >> (64 - bits))) & MASK


def turn(lane, word):
    return rotate((lane + word * P2) & MASK, 31) * P1 & MASK


def xxh64(data):
    """XXH64 with seed 0."""
    at = 0
    if len(data) >= 32:
        lanes = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        while at + 32 <= len(data):
            words = struct.unpack_from("<4Q", data, at)
            lanes = [turn(lane, word) for lane, word in zip(lanes, words)]
            at += 32
        hashed = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18))) & MASK
        for lane in lanes:
            hashed = ((hashed ^ turn(0, lane)) * P1 + P4) & MASK
    else:
        hashed = P5
    hashed = (hashed + len(data)) & MASK
    while at + 8 <= len(data):
        hashed = (rotate(hashed ^ turn(0, struct.unpack_from("<Q", data, at)[0]), 27) * P1 + P4) & MASK
        at += 8
    if at + 4 <= len(data):
        word = struct.unpack_from("<I", data, at)[0]
        hashed = (rotate(hashed ^ word * P1 & MASK, 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        hashed = rotate(hashed ^ byte * P5 & MASK, 11) * P1 & MASK
    hashed = (hashed ^ hashed >> 33) * P2 & MASK
    hashed = (hashed ^ hashed >> 29) * P3 & MASK
    return hashed ^ hashed >> 32


def header(path):
    """Where the tensors of a .safetensors file lie: {name: (dtype, shape, begin, end)}."""
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        entries = json.loads(file.read(size))
    return {name: (entry["dtype"], entry["shape"], *(8 + size + at for at in entry["data_offsets"]))
            for name, entry in entries.items() if name != "__metadata__"}


def part(path, begin, end):
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read(end - begin)


def weight_files(model):
    """{tensor: (path, begin, end)} of a folder's weights."""
    index = model / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else \
        ["model.safetensors"]
    return {tensor: (model / name, begin, end) for name in names
            for tensor, (_, _, begin, end) in header(model / name).items()}


def digest(model, modules):
    files = weight_files(model)
    text = b""
    for module in modules:
        for suffix in (".weight_packed", ".weight_scale"):
            path, begin, end = files[module + suffix]
            text += (module + suffix).encode()
            if end - begin <= 2048:
                text += part(path, begin, end)
            else:
                text += part(path, begin, begin + 1024) + part(path, end - 1024, end)
    return f"{xxh64(text):016x}"


def modules_of(sidecar):
    return [module for site in sidecar["sites"] for module in site["modules"]]


def read(model):
    """The sidecar with `bits` and `columns` of every site as lists; raises ValueError for a bad one."""
    model = pathlib.Path(model)
    sidecar = json.loads((model / NAME).read_text())
    if sidecar["nibble_fmpq"] not in VERSIONS:
        raise ValueError(f"version {sidecar['nibble_fmpq']}")
    if sidecar["form"] not in LOW_BITS or sidecar["block"] not in (32, 64, 128):
        raise ValueError("form or block")
    if (sidecar["form"] == "bf16") != (sidecar["nibble_fmpq"] == 3):
        raise ValueError(f"form {sidecar['form']} in version {sidecar['nibble_fmpq']}")
    low = LOW_BITS[sidecar["form"]]
    tensors = header(model / TENSORS)

    def numbers(name, dtype, count):
        kind, shape, begin, end = tensors.pop(name)
        if kind != dtype or shape != [count]:
            raise ValueError(f"{name}: {kind} {shape}")
        return list(struct.unpack(f"<{count}{SIZES[dtype]}", part(model / TENSORS, begin, end)))

    for i, site in enumerate(sidecar["sites"]):
        k, block = site["inputs"], sidecar["block"]
        if k % block or not 0 < site["clip"] <= 1:
            raise ValueError(f"sites[{i}]: inputs or clip")
        if not 0 <= site.get("rows", 1) <= 1 or "rows" in site and sidecar["nibble_fmpq"] == 1:
            raise ValueError(f"sites[{i}]: rows")
        site["bits"] = numbers(f"sites.{i}.bits", "U8", k // block)
        if set(site["bits"]) - {low, 2 * low}:
            raise ValueError(f"sites[{i}]: bits")
        gathered = sidecar["permute"] == "gather" and f"sites.{i}.columns" in tensors
        site["columns"] = numbers(f"sites.{i}.columns", "I32", k) if gathered else []
        if gathered and sorted(site["columns"]) != list(range(k)):
            raise ValueError(f"sites[{i}]: columns are no permutation")
        parts = sidecar["parts"] if site["split"] else 1
        each = len(site["bits"]) // parts
        if each * parts != len(site["bits"]) or len({
                site["bits"][p * each:(p + 1) * each].count(2 * low) for p in range(parts)}) > 1:
            raise ValueError(f"sites[{i}]: parts have different blocks")
        if any(column // (each * block) != at // (each * block)
               for at, column in enumerate(site["columns"])):
            raise ValueError(f"sites[{i}]: a column leaves its part")
    if tensors:
        raise ValueError(f"{sorted(tensors)} belong to no site")
    if sidecar.get("tensors_xxh64", found := f"{xxh64((model / TENSORS).read_bytes()):016x}") != found:
        raise ValueError(f"{TENSORS} is of another calibration")
    if sidecar["weights_xxh64"] != digest(model, modules_of(sidecar)):
        raise ValueError("belongs to other weights")
    return sidecar


def share_of_bits(model, sidecar, bits=4):
    """What `a4_share` (of 16 bits `bf16_share`) says: multiply-adds with such activations, of all with these sites."""
    files = {name: shape for path in {path for path, _, _ in weight_files(pathlib.Path(model)).values()}
             for name, (_, shape, _, _) in header(path).items()}
    work = [(sum(files[module + ".weight_packed"][0] for module in site["modules"])
             * site["inputs"] * site.get("rows", 1), site["bits"].count(bits) / len(site["bits"]))
            for site in sidecar["sites"]]
    return sum(all_of * share for all_of, share in work) / sum(all_of for all_of, _ in work)


def write(model, sidecar):
    """Writes what read() gives, with a digest of the model's weights."""
    model = pathlib.Path(model)
    entries, data = {}, b""
    for key, dtype in (("columns", "I32"), ("bits", "U8")):
        for i, site in enumerate(sidecar["sites"]):
            if site[key]:
                packed = struct.pack(f"<{len(site[key])}{SIZES[dtype]}", *site[key])
                entries[f"sites.{i}.{key}"] = {"dtype": dtype, "shape": [len(site[key])],
                                               "data_offsets": [len(data), len(data) + len(packed)]}
                data += packed
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    (model / TENSORS).write_bytes(struct.pack("<Q", len(text)) + text + data)
    stored = dict(sidecar, weights_xxh64=digest(model, modules_of(sidecar)),
                  tensors_xxh64=f"{xxh64((model / TENSORS).read_bytes()):016x}")
    stored["sites"] = [{key: value for key, value in site.items() if key not in ("bits", "columns")}
                       for site in sidecar["sites"]]
    (model / NAME).write_text(json.dumps(stored))
    config = json.loads((model / "config.json").read_text())
    config[FIELD] = {"version": sidecar["nibble_fmpq"], "file": NAME}
    (model / "config.json").write_text(json.dumps(config))


def main():
    sidecar = read(sys.argv[1])
    high = 2 * LOW_BITS[sidecar["form"]]
    print(f"form {sidecar['form']}, blocks of {sidecar['block']}, permute {sidecar['permute']}")
    for site in sidecar["sites"]:
        print(f"{site['bits'].count(high)} of {len(site['bits'])} blocks in {high} bits, clip {site['clip']}: "
              f"{', '.join(site['modules'])}")


if __name__ == "__main__":
    main()
