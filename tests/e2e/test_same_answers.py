"""The same greedy answer whatever the instruction set and whoever else is served."""

import concurrent.futures

import pytest
from cli_tools import ROOT, json_of, nibble, succeeds
from test_openai import MODEL, Server

ISAS = ("scalar", "avx2", "avx2_vnni", "avx512_bw", "avx512", "amx")
SCHEMES = ("bf16", "w8a8_int8", "w8a8_fp8", "w4a8", "w4a16_g32", "w4a16_g128")
PROMPT = "It was a dark night and the captain of the ship could not sleep, for he had seen"


@pytest.fixture(scope="module", params=SCHEMES)
def model(request, tmp_path_factory):
    if request.param == "bf16":
        return MODEL
    folder = tmp_path_factory.mktemp("models") / request.param
    succeeds("quantize", MODEL, folder, "--scheme", request.param)
    return folder


def supported(isa):
    result = nibble("generate", MODEL, "--prompt", "A", "--max-tokens", 1, "--isa", isa)
    assert result.returncode in (0, 5), result.stderr
    return result.returncode == 0


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int4"])
def test_every_instruction_set_gives_the_same_tokens(model, kv_cache_dtype):
    tokens = {
        isa: json_of("generate", model, "--prompt", PROMPT, "--max-tokens", 40, "--isa", isa,
                     "--kv-cache-dtype", kv_cache_dtype)["tokens"]
        for isa in ISAS if supported(isa)
    }
    assert len(tokens["scalar"]) > 10
    for isa, answer in tokens.items():
        assert answer == tokens["scalar"], isa


def test_activations_in_fixed_point_are_near_exact_ones(tmp_path):
    succeeds("quantize", MODEL, tmp_path / "model", "--scheme", "w4a16_g32")
    run = ["eval", "ppl", tmp_path / "model", "--text", ROOT / "tests/data/text/the_black_cat.txt", "--window", 64]
    fixed = json_of(*run)["perplexity"]
    exact = json_of(*run, "--exact-activations")["perplexity"]
    assert fixed != exact
    assert fixed == pytest.approx(exact, rel=1e-3)


def test_batches_of_1_7_and_32_give_the_same_text(model):
    server = Server(model=model)
    prompts = [f"{PROMPT} {number} times" for number in range(32)]
    arguments = dict(max_tokens=24, extra_body={"ignore_eos": True})

    def ask(prompt):
        return server.complete(prompt, **arguments).choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    for clients in (7, 32):
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            assert list(pool.map(ask, prompts[:clients])) == alone[:clients]
    assert server.stop() == 0
