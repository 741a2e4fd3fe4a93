"""`nibble bench quantize`."""
import pytest

from cli_tools import INVALID, fails, json_of, succeeds

RESULT = {"scheme", "format", "rule", "gweights_per_s", "gbps_in", "snr_db"}


def test_every_rule_of_a_scheme():
    value = json_of("bench", "quantize", "--scheme", "w4a8", "--n", 64, "--k", 512, "--threads", 1)
    assert set(value) == {"threads", "n", "k", "read_gbps", "results"}
    assert (value["threads"], value["n"], value["k"]) == (1, 64, 512)
    rules = {row["rule"]: row for row in value["results"]}
    assert {"absmax", "absmax7.5", "lsq", "mse", "quark", "best"} <= set(rules)
    for row in rules.values():
        assert set(row) == RESULT and row["format"] == "quark"
        assert row["gbps_in"] == pytest.approx(2 * row["gweights_per_s"])
    assert rules["best"]["snr_db"] == rules["mse"]["snr_db"] > rules["quark"]["snr_db"] + 0.5


def test_table_and_instruction_sets():
    rows = []
    for isa in ("scalar", "auto"):
        text = succeeds("bench", "quantize", "--scheme", "w4a16_g32", "--scale-rule", "lsq_signed",
                        "--n", 32, "--k", 256, "--isa", isa, "--threads", 2).stdout
        assert "GB/s" in text and "lsq_signed" in text
        rows.append(text.strip().splitlines()[-1].split())
    assert rows[0][-1] == rows[1][-1]  # the same error


@pytest.mark.parametrize("flags, words", [
    (["--scheme", "w9"], ["w9", "w4a16_g32"]),
    (["--scale-rule", "round"], ["round", "lsq_signed"]),
    (["--scheme", "w8a8_fp8", "--scale-rule", "mse"], ["mse", "w8a8_fp8"]),
    (["--isa", "neon"], ["--isa"]),
    (["--n", "0"], ["--n"]),
])
def test_flags(flags, words):
    fails(INVALID, *words, arguments=["bench", "quantize", *flags])
