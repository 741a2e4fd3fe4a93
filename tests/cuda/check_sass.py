"""Checks the machine code of the CUDA kernels: each family uses the instructions that it is made
for, and keeps its values in registers. Needs cuobjdump and nvdisasm (CUDA toolkit, or the packages
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm) and c++filt (binutils).

Usage: check_sass.py LIBRARY [--table]   (or a program of PROGRAMS)
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

# Kernels by the name that c++filt gives: instructions of which each kernel has at least one, and
# the most loads and stores of local memory in one kernel (indexed arrays and spills outside loops).
FAMILIES = [
    (r"gemm_sm90<.*w4a8_sm90|gemm_sm90<.*Int4Codec", ("IGMMA", "UBLKCP"), 16),
    # Scales of tokens and what a tile's end needs lie in local memory while the main loops run.
    (r"gemm_sm90<.*W4A8Bf16Codec", ("IGMMA", "HGMMA", "UBLKCP", "UTMALDG"), 72),
    (r"gemm_sm90<.*Int4ToBf16Codec", ("HGMMA", "UBLKCP", "UTMALDG"), 16),
    (r"gemm_sm90<.*ByteCodec", ("IGMMA|QGMMA|HGMMA", "UBLKCP"), 16),
    (r"gemm_sm90<.*Fp4ToE4M3Codec", ("QGMMA", "UBLKCP"), 0),
    (r"gemm_grouped_sm90<", ("IGMMA|QGMMA|HGMMA", "UBLKCP", "UTMALDG"), 0),
    (r"gemm_w4a16_planes_sm90<", ("IMMA", "UBLKCP"), 0),
    (r"gemm_w4a16_decode_sm90<", ("HMMA", "UBLKCP"), 0),
    (r"gemm_w4a16_(pairs_)?sm90<", ("HGMMA", "UBLKCP"), 0),
    (r"w4ax_wide_sm90<", ("IGMMA", "UTMALDG"), 150),
    (r"w4ax_few_sm90<", ("IMMA", "UTMALDG"), 0),
    # Some registers too few on Hopper, which takes gemm_w4ax_sm90 instead.
    (r"w4ax_kernel<", ("IMMA", "LDGSTS"), 6),
    (r"w4ax_experts<", ("IMMA", "LDGSTS"), 0),
    (r"wide_kernel<", ("IMMA", "HMMA", "LDGSTS"), 0),
    (r"sm80::gemm_kernel<.*Codec(W4A8|W8A8)\b", ("IMMA", "LDGSTS"), 0),
    (r"sm80::(gemm|grouped)_kernel<.*CodecFp8", ("HMMA|QMMA", "LDGSTS"), 0),
    # Three registers too few in its largest tile; Hopper takes gemm_w4a16_channel_sm90 instead.
    (r"sm80::gemm_kernel<.*CodecW4A16Channel", ("HMMA", "LDGSTS"), 6),
    (r"sm80::gemm_kernel<", ("HMMA", "LDGSTS"), 0),
    # What a block of prefill keeps of its segment while it codes queries; loops of tiles have none.
    (r"many_latent_sm90<.*Int8Latents.*LatentBlock", ("IGMMA", "HGMMA", "UBLKCP"), 52),
    (r"many_latent_sm90<.*Fp8Latents.*LatentBlock", ("QGMMA", "HGMMA", "UBLKCP"), 52),
    (r"(few|many)_latent_sm90<.*Int8Latents", ("IGMMA", "HGMMA", "UBLKCP"), 12),
    (r"(few|many)_latent_sm90<.*Fp8Latents", ("QGMMA", "HGMMA", "UBLKCP"), 8),
    # Four addresses are loaded for each tile, which 168 registers do not hold.
    (r"few_latent_sm90<.*FewInt4<16>.*LatentLine", ("HGMMA", "UBLKCP"), 32),
    # What the end of a segment needs; loops of tiles have none.
    (r"many_latent_sm90<.*ManyInt4", ("HGMMA", "UBLKCP"), 17),
    (r"(few|many)_latent_sm90<", ("HGMMA", "UBLKCP"), 0),
    (r"warp_latent_kernel<", ("HMMA", "LDGSTS"), 0),
    (r"prefill_sm90_kernel<", ("HGMMA", "UBLKCP"), 0),
    (r"expanded_sm90_kernel", ("HGMMA", "UTMALDG"), 0),
    # int4_page keeps q in the steps of a tile's channels beside q: too much for heads of 256, and a
    # little too much for 16 query heads in decode.
    (r"prefill_kernel<.*KvCode\)5, 256>", ("HMMA", "UBLKCP|LDGSTS"), 320),
    (r"prefill_kernel<.*256>", ("HMMA", "UBLKCP|LDGSTS"), 70),
    # Two registers too few.
    (r"prefill_kernel<.*KvCode\)6, 64>", ("HMMA", "UBLKCP|LDGSTS"), 4),
    (r"prefill_kernel<", ("HMMA", "UBLKCP|LDGSTS"), 0),
    (r"decode_kernel<.*KvCode\)5,", ("HMMA", "UBLKCP|LDGSTS"), 92),
    (r"decode_kernel<", ("HMMA", "UBLKCP|LDGSTS"), 64),
    (r"column_kernel<", ("FFMA", "LDS"), 0),
    (r"logits_kernel<", ("HMMA", "LDG"), 0),
]
# Where registers do not suffice, ptxas puts a wait behind every product of warpgroups, which then
# follow one another, and says so in a remark alone (C7512): there are fewer waits than this share.
PRODUCT = {"HGMMA", "IGMMA", "QGMMA"}
MOST_WAITS = 0.75
WAITS_FOR_EACH = re.compile(r"W4AxForm<4>")  # blocks of 32: each product is a sum of its own
# Products of INT4, which GPUs before Hopper have: where they are made for, and what Hopper calls
# instead, 190 instructions around two products of INT8.
INT4_FAMILIES = {r"w4ax_kernel<", r"w4ax_experts<"}
INT4_PRODUCT = re.compile(r"\bIMMA\.\d+\.S4\.S4\b")
INT4_ROUTINE = b"mma_sub_byte"
# The same of benchmarks' own kernels, by the name of the program that has them. Small tiles have
# the fewest registers, two blocks a multiprocessor; none spills in a main loop.
PROGRAMS = {
    "w4ax_schedules": [(r"mixed_gemm_sm90<", ("IGMMA", "HGMMA", "UBLKCP", "UTMALDG"), 64)],
}
LOCAL = {"LDL", "STL"}
FUNCTION = re.compile(r"Function : (\S+)")
ARCHITECTURE = re.compile(r"arch = (sm_\w+)")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\S+\s+)?([A-Z][A-Z0-9_]*)")


def instructions(library):
    """{(architecture, kernel): Counter of instructions}"""
    dump = subprocess.Popen(["cuobjdump", "-sass", library], stdout=subprocess.PIPE, text=True)
    kernels, counts, architecture = {}, None, ""
    for line in dump.stdout:
        if match := INSTRUCTION.search(line):
            counts[match[1]] += 1
            if INT4_PRODUCT.search(line):
                counts["INT4"] += 1
            if "WARPGROUP.DEPBAR" in line:
                counts["WAIT"] += 1
        elif match := ARCHITECTURE.search(line):
            architecture = match[1]
        elif match := FUNCTION.search(line):
            counts = kernels.setdefault((architecture, match[1]), collections.Counter())
    if dump.wait() != 0 or not kernels:
        sys.exit(f"check_sass.py: cuobjdump finds no machine code in {library}")
    return kernels


def emulated_int4(library, hopper="sm_90"):
    """Names of the pieces of code for Hopper that emulate products of INT4."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["cuobjdump", "-xelf", "all", pathlib.Path(library).resolve()], cwd=folder,
                       stdout=subprocess.DEVNULL, check=True)
        return sorted(piece.name for piece in pathlib.Path(folder).iterdir()
                      if hopper in piece.name and INT4_ROUTINE in piece.read_bytes())


def main():
    library, *flags = sys.argv[1:]
    families = PROGRAMS.get(library.rsplit("/", 1)[-1], FAMILIES)
    kernels = instructions(library)
    names = subprocess.run(["c++filt"], input="\n".join(name for _, name in kernels), text=True,
                           capture_output=True, check=True).stdout.splitlines()
    errors, seen = [], collections.Counter()
    for (architecture, _), name, counts in zip(kernels, names, kernels.values()):
        family = next((f for f in families if re.search(f[0], name)), None)
        if family is None or architecture == "sm_80" and re.search("sm90|Fp8", family[0]):
            continue  # kernels for Hopper and for FP8 are empty there
        pattern, wanted, most = family
        seen[pattern] += 1
        local = sum(counts[op] for op in LOCAL)
        title = f"{architecture} {name.replace('(anonymous namespace)::', '').split('(')[0]}"
        if "--table" in flags:
            print(f"{sum(counts.values()):6} instructions, {local:3} local  {title}")
        for operation in wanted:
            if not any(counts[op] for op in operation.split("|")):
                errors.append(f"{title}: no {operation}")
        if architecture == "sm_80" and pattern in INT4_FAMILIES and not counts["INT4"]:
            errors.append(f"{title}: no products of INT4")
        if architecture.startswith("sm_9") and counts["INT4"]:
            errors.append(f"{title}: products of INT4, which Hopper has not")
        products = sum(counts[op] for op in PRODUCT)
        if counts["WAIT"] > max(4, MOST_WAITS * products) and not WAITS_FOR_EACH.search(name):
            errors.append(f"{title}: {counts['WAIT']} waits for {products} products of warpgroups, "
                          "which follow one another for want of registers")
        if local > most:
            errors.append(f"{title}: {local} loads and stores of local memory, at most {most}")
    errors += [f"{name}: emulates products of INT4 on Hopper" for name in emulated_int4(library)]
    errors += [f"no kernel matches {f[0]}" for f in families if not seen[f[0]]]
    for error in errors:
        print(error, file=sys.stderr)
    print(f"check_sass.py: {len(kernels)} kernels, {sum(seen.values())} with rules, "
          f"{len(errors)} errors")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
