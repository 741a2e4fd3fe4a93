"""--kernel: matrix products by a kernel of one's choice, and nothing in its place in silence."""

import re

import pytest

from cli_tools import INVALID, ROOT, STORYTELLER, fails, json_of, succeeds

SCALAR = ["--isa", "scalar", "--device", "cpu"]
PROMPT = ["--prompt", "Once upon a time", "--max-tokens", 3, "--temperature", 0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The storyteller with INT4 layers in groups and a head in BF16."""
    folder = tmp_path_factory.mktemp("models") / "w4a16"
    succeeds("quantize", STORYTELLER, folder, "--scheme", "w4a16_g32")
    return folder


def kernels(result):
    """The counts in the log: kernel -> products."""
    line = re.search(r"matrix products: (.*)", result.stderr).group(1)
    return {name: int(count) for count, name in re.findall(r"(\d+) by (\w+)", line)}


def test_the_log_counts_the_products_of_each_kernel(model):
    default = kernels(succeeds("generate", model, *PROMPT, *SCALAR))
    assert set(default) == {"gemm_w4a16_fixed_scalar", "gemm_bf16_scalar"}
    assert default["gemm_bf16_scalar"] == 1  # the head


def test_a_kernel_takes_what_it_accepts_and_the_rest_goes_by_the_usual_order(model, tmp_path):
    default = kernels(succeeds("generate", model, *PROMPT, *SCALAR))
    chosen = kernels(succeeds("generate", model, *PROMPT, *SCALAR, "--kernel", "gemm_w4a16_scalar"))
    assert chosen == {"gemm_w4a16_scalar": default["gemm_w4a16_fixed_scalar"],
                      "gemm_bf16_scalar": 1}
    story = tmp_path / "story.txt"
    story.write_text((ROOT / "tests/data/text/the_black_cat.txt").read_text()[:300])
    text = ["eval", "ppl", model, "--text", story, "--window", 32, *SCALAR]
    by_name = json_of(*text, "--kernel", "gemm_w4a16_scalar")["perplexity"]
    assert by_name == json_of(*text, "--exact-activations")["perplexity"]
    assert by_name != json_of(*text)["perplexity"]


@pytest.mark.parametrize("names", [
    ["--kernel", "gemm_bf16_scalar", "--kernel", "gemm_w4a16_scalar"],
    ["--kernel", "gemm_bf16_scalar,gemm_w4a16_scalar"],
])
def test_several_kernels(model, names):
    result = succeeds("generate", *names, model, *PROMPT, *SCALAR)
    assert set(kernels(result)) == {"gemm_w4a16_scalar", "gemm_bf16_scalar"}


@pytest.mark.parametrize("command", [["generate", *PROMPT], ["chat"], ["serve", "--port", 0],
                                     ["eval", "ppl", "--text", ROOT / "README.md"],
                                     ["bench", "offline"], ["bench", "capacity"]])
def test_an_unknown_kernel_is_refused_with_all_names(model, command):
    fails(INVALID, "--kernel gemm_w4a16_neon", "cpu/scalar", "gemm_w4a16_scalar,",
          "gemm_bf16_scalar", arguments=[*command, model, *SCALAR, "--kernel", "gemm_w4a16_neon"])


def test_a_kernel_that_takes_nothing_of_the_model_is_refused_with_the_reason(model):
    fails(INVALID, "--kernel gemm_w4a8_scalar", "none of the products", "w4a16_g32 [",
          "bf16 [", "multiplies w4a8",
          arguments=["generate", model, *PROMPT, *SCALAR, "--kernel", "gemm_bf16_scalar",
                     "--kernel", "gemm_w4a8_scalar"])
    fails(INVALID, "--kernel gemm_w4a16_fixed_scalar", "no scheme on cpu/scalar as it is set up",
          arguments=["generate", model, *PROMPT, *SCALAR, "--exact-activations",
                     "--kernel", "gemm_w4a16_fixed_scalar"])


def test_bench_kernels_times_what_the_named_kernels_take():
    shape = ["--m", 1, "--n", 4096, "--k", 4096, "--isa", "scalar", "--threads", 1]
    value = json_of("bench", "kernels", *shape, "--scheme", "w4a16_g128",
                    "--kernel", "gemm_w4a16_scalar", timeout=300)
    assert [row["name"] for row in value["kernels"]] == ["gemm_w4a16_scalar"]


def test_bench_kernels_refuses_kernels_that_take_nothing():
    result = ["bench", "kernels", "--scheme", "w4a8", "--m", 1, "--n", 64, "--k", 64, "--isa",
              "scalar", "--threads", 1, "--json"]
    fails(INVALID, "--kernel gemm_bf16_scalar", "w4a8 [64, 64]", "multiplies bf16",
          arguments=[*result, "--kernel", "gemm_bf16_scalar"], timeout=300)
