"""bench moe: the experts of one layer alone, what is reported of them, and what is refused.
NIBBLE_BIN names the binary; run from the repository root."""

import json

import pytest

from cli_tools import INVALID, NOT_FOUND, UNSUPPORTED, fails, succeeds

REPORT = {"backend", "threads", "layer", "routing", "seed", "ceilings", "runs"}
LAYER = {"name", "experts", "all_experts", "top_k", "hidden", "width", "activation", "biases",
         "note"}
RUN = {"scheme", "kernel", "m", "rows", "slots", "active_experts", "expert_rows_max",
       "expert_rows_mean", "us", "us_p25", "us_p75", "active_bytes", "copies", "gbps", "read_gbps",
       "read_percent", "read_percent_p25", "read_percent_p75", "tflops", "kernel_launches"}
SIZES = ["--experts", 16, "--top-k", 4, "--hidden", 128, "--width", 64]
SCHEME = ["--scheme", "w4a16_g32"]


def report_of(path, *flags):
    table = succeeds("bench", "moe", "--copies", 2, "--repeats", 3, "--json", path, *flags,
                     timeout=300).stdout
    value = json.loads(path.read_text())
    assert set(value) == REPORT and set(value["layer"]) == LAYER
    assert all(set(run) == RUN for run in value["runs"])
    return value, table


def test_bench_moe_balanced(tmp_path):
    value, table = report_of(tmp_path / "report.json", *SIZES, "--scheme", "w4a16_g32,bf16",
                             "--scheme", "w8a8_int8", "--m", "1,3,4,64", "--routing", "balanced")
    assert value["backend"].startswith("cpu/") and value["routing"] == "balanced"
    assert value["layer"]["name"] == "custom" and value["layer"]["note"] is None
    assert value["ceilings"]["read_gbps"] > 0.5
    runs = value["runs"]
    assert [(run["scheme"], run["m"]) for run in runs] == [
        (scheme, m) for scheme in ("w4a16_g32", "bf16", "w8a8_int8") for m in (1, 3, 4, 64)]
    assert [run["active_experts"] for run in runs] == [4, 12, 16, 16] * 3
    assert [run["expert_rows_max"] for run in runs] == [1, 1, 1, 16] * 3
    assert [run["expert_rows_mean"] for run in runs] == [1, 1, 1, 16] * 3
    for run in runs:
        assert run["rows"] == run["m"] and run["slots"] == 4 * run["m"] and run["copies"] == 2
        assert run["kernel"].startswith("gemm_") and run["kernel_launches"] is None
        assert 0 < run["us_p25"] <= run["us"] <= run["us_p75"]
        assert 0 < run["read_percent_p25"] <= run["read_percent"] <= run["read_percent_p75"]
        assert abs(run["gbps"] * run["us"] * 1e3 - run["active_bytes"]) < 1e-6 * run["active_bytes"]
        operations = 2 * run["slots"] * 3 * 128 * 64
        assert abs(run["tflops"] * run["us"] * 1e6 - operations) < 1e-6 * operations
    plain = {run["m"]: run for run in runs if run["scheme"] == "bf16"}
    expert = 2 * 3 * 128 * 64
    assert plain[3]["active_bytes"] - plain[1]["active_bytes"] == 8 * expert
    for word in ("GB/s", "TFLOPS", "launches", "w8a8_int8", "balanced"):
        assert word in table


def test_bench_moe_all_rows_to_the_same_experts(tmp_path):
    value, _ = report_of(tmp_path / "report.json", *SIZES, *SCHEME, "--m", "1,50", "--routing",
                         "one")
    assert [run["active_experts"] for run in value["runs"]] == [4, 4]
    assert [run["expert_rows_max"] for run in value["runs"]] == [1, 50]
    assert [run["expert_rows_mean"] for run in value["runs"]] == [1, 50]


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_bench_moe_at_random(tmp_path, routing):
    """Figures of routing depend on the seed alone, and a report replaces the one before."""
    def loads(*flags):
        value, _ = report_of(tmp_path / "report.json", *SIZES, *SCHEME, "--m", "1,9,100",
                             "--routing", routing, *flags)
        return [(run["active_experts"], run["expert_rows_max"]) for run in value["runs"]]

    first = loads()
    assert first[0] == (4, 1) and 4 <= first[1][0] <= 16 and first[2][1] > 25
    assert loads("--threads", 1, "--isa", "scalar") == first != loads("--seed", 2)


def test_bench_moe_help_names_layers_and_says_what_rows_are(tmp_path):
    text = " ".join(succeeds("bench", "moe", "--help").stdout.split())
    for words in ("gpt-oss-20b", "kimi-k2-ep8", "qwen3-30b-a3b", "max(1, m * 48 / 384)"):
        assert words in text


@pytest.mark.parametrize("flags, words", [
    (["--layer", "gpt-5", *SCHEME], ["--layer", "gpt-5", "gpt-oss-20b", "qwen3-30b-a3b"]),
    (["--layer", "gpt-oss-20b", "--top-k", 2, *SCHEME], ["--layer", "--top-k"]),
    (SCHEME, ["--layer", "--experts"]),
    ([*SIZES[:6], *SCHEME], ["--width"]),
    ([*SIZES[:2], "--top-k", 17, *SIZES[4:], *SCHEME], ["--top-k 17", "--experts 16"]),
    (["--experts", 0, *SIZES[2:], *SCHEME], ["--experts"]),
    (["--experts", 256, *SIZES[2:], *SCHEME], ["--hidden 128", "--experts 256"]),
    ([*SIZES[:6], "--width", 40, *SCHEME], ["--width 40", "32"]),
    (SIZES, ["--scheme"]),
    ([*SIZES, "--scheme", "w9"], ["--scheme", "w9", "w4a16_g32"]),
    ([*SIZES, *SCHEME, "--routing", "worst"], ["--routing", "worst", "balanced"]),
    ([*SIZES, *SCHEME, "--m", "1,0"], ["--m"]),
    ([*SIZES, *SCHEME, "--copies", 0], ["--copies"]),
    ([*SIZES, *SCHEME, "--backend", "tpu"], ["tpu", "cuda:N"]),
    ([*SIZES, *SCHEME, "--backend", "auto"], ["auto", "cuda:N"]),
    ([*SIZES, *SCHEME, "--isa", "neon"], ["--isa"]),
    ([*SIZES, *SCHEME, "--kernel", "gemm_of_mine"], ["--kernel", "gemm_of_mine"]),
])
def test_bench_moe_flags(flags, words):
    fails(INVALID, *words, arguments=["bench", "moe", *flags])


def test_bench_moe_of_a_scheme_that_the_layer_cannot_have(tmp_path):
    """Refused before anything is measured, in the words of those who refuse it."""
    path = tmp_path / "report.json"
    fails(UNSUPPORTED, "2880", "group size 128", arguments=[
        "bench", "moe", "--layer", "gpt-oss-20b", "--scheme", "mxfp4,w4a16_g128", "--json", path])
    assert not path.exists()


def test_bench_moe_where_nothing_can_be_written(tmp_path):
    fails(NOT_FOUND, "--json", "nowhere", arguments=[
        "bench", "moe", *SIZES, *SCHEME, "--json", tmp_path / "nowhere" / "report.json"])
