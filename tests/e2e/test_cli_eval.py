"""`nibble eval`: protocols, KL divergences, tasks and GSM8K at the command line, and what is refused."""

import json
import lzma
import math
import os
import pathlib

import pytest

from cli_tools import (CORRUPT, EXISTS, INVALID, NOT_FOUND, ROOT, STORYTELLER, Model, fails, json_of,
                       succeeds)

STORY = ROOT / "tests/data/text/the_black_cat.txt"
TINY = ROOT / "tests/data/tasks/tiny.jsonl"
SHARED = pathlib.Path(os.environ.get("NIBBLE_SHARED", ROOT.parent / "shared"))
CPU = ["--device", "cpu"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_bytes(STORY.read_bytes()[:6000])
    return path


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "q"
    succeeds("quantize", STORYTELLER, path, "--scheme", "w4a16_g128")
    return path


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


# --- perplexity ----------------------------------------------------------------------------------

def test_protocols_score_different_parts(text):
    found = {name: json_of("eval", "ppl", STORYTELLER, "--text", text, "--window", 64, "--protocol",
                           name, *CPU) for name in ("ours", "gptq", "llama.cpp", "lm-eval")}
    windows = found["ours"]["text_tokens"] // 64
    assert found["ours"]["tokens"] == windows * 63
    assert found["gptq"]["tokens"] % 63 == 0
    assert found["llama.cpp"]["tokens"] == windows * 31
    assert found["lm-eval"]["tokens"] == found["lm-eval"]["text_tokens"]
    assert len({value["perplexity"] for value in found.values()}) == 4
    for name, value in found.items():
        assert value["protocol"] == name
        assert 0 < value["perplexity_error"] < value["perplexity"] / 5
    words = found["lm-eval"]
    assert words["word_perplexity"] == pytest.approx(
        words["perplexity"] ** (words["tokens"] / words["words"]))
    assert words["bits_per_byte"] == pytest.approx(math.log2(words["byte_perplexity"]))


def test_a_text_may_be_too_short_for_a_protocol(text):
    fails(INVALID, "tokens, but", "--window", str(text),
          arguments=["eval", "ppl", STORYTELLER, "--text", text, "--protocol", "llama.cpp",
                     "--window", 1024, *CPU])
    fails(INVALID, "--protocol", "gptq",
          arguments=["eval", "ppl", STORYTELLER, "--text", text, "--protocol", "papers", *CPU])


# --- KL divergence -------------------------------------------------------------------------------

def test_kld_of_a_model_with_itself_is_nothing(text):
    found = json_of("eval", "kld", STORYTELLER, STORYTELLER, "--text", text, "--window", 128, *CPU)
    assert abs(found["kld_max"]) < 1e-12
    assert found["same_top"] == 1
    assert found["ln_ppl_ratio"] == 0


def test_kld_and_perplexity_agree(text, quantized):
    window = ["--text", text, "--window", 128, *CPU]
    found = json_of("eval", "kld", STORYTELLER, quantized, *window)
    base = json_of("eval", "ppl", STORYTELLER, *window)
    other = json_of("eval", "ppl", quantized, *window)
    assert found["tokens"] == base["tokens"]
    assert found["ln_ppl_base"] == pytest.approx(base["nats_per_token"], abs=1e-12)
    assert found["ln_ppl"] == pytest.approx(other["nats_per_token"], abs=1e-12)
    assert found["ppl_ratio"] == pytest.approx(other["perplexity"] / base["perplexity"])
    assert 0 < found["kld_median"] < found["kld_p90"] < found["kld_p99"] < found["kld_max"]
    assert sum(bucket["tokens"] for bucket in found["by_context"]) == found["tokens"]


@pytest.mark.parametrize("precision, error", [("f32", 0), ("u16", 1e-4)])
def test_a_stored_base_gives_the_same(text, quantized, tmp_path, precision, error):
    window = ["--text", text, "--window", 128, *CPU]
    base = tmp_path / "base"
    wrote = json_of("eval", "kld", STORYTELLER, "--save-base", base, "--base-precision", precision,
                    *window)
    assert base.stat().st_size - wrote["bytes"] < 1024
    live = json_of("eval", "kld", STORYTELLER, quantized, *window)
    stored = json_of("eval", "kld", quantized, "--base-file", base, *window)
    assert stored["base_precision"] == precision
    assert stored["kld"] == pytest.approx(live["kld"], abs=error)
    assert stored["ln_ppl"] == live["ln_ppl"]
    fails(EXISTS, str(base), arguments=["eval", "kld", STORYTELLER, "--save-base", base, *window])
    fails(INVALID, "other windows", "--window 128",
          arguments=["eval", "kld", quantized, "--base-file", base, "--text", text, *CPU])
    base.write_bytes(base.read_bytes()[:-1])
    fails(CORRUPT, str(base), "--save-base",
          arguments=["eval", "kld", quantized, "--base-file", base, *window])


def test_kld_refuses_another_vocabulary(model, text):
    model.edit_json("config.json", vocab_size=5000)
    fails(INVALID, "vocabulary", str(STORYTELLER), "4096", str(model), "5000",
          arguments=["eval", "kld", STORYTELLER, model, "--text", text, *CPU])


def test_kld_says_which_models_it_needs(text, tmp_path):
    for extra in ([], ["--base-file", tmp_path / "a", "--save-base", tmp_path / "b"]):
        fails(INVALID, "base", arguments=["eval", "kld", STORYTELLER, "--text", text, *extra])


# --- tasks ---------------------------------------------------------------------------------------

def test_tasks_compare_models_in_pairs(quantized, tmp_path):
    samples = tmp_path / "samples.jsonl"
    found = json_of("eval", "tasks", STORYTELLER, quantized, STORYTELLER, "--tasks", TINY,
                    "--samples", samples, *CPU)
    assert [model["model"] for model in found["models"]] == [
        str(STORYTELLER), str(quantized), str(STORYTELLER)]
    first, _, again = (model["tasks"][0] for model in found["models"])
    assert first == again and first["items"] == 4 and 0 <= first["acc"] <= 1
    assert found["differences"][1]["acc"] == 0 and found["differences"][1]["acc_error"] == 0
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [len(line["log_likelihoods"]) for line in lines] == [2, 3, 2, 3] * 3
    right = [max(range(len(sums := line["log_likelihoods"])), key=sums.__getitem__) == line["gold"]
             for line in lines[:4]]
    assert first["acc"] == sum(right) / 4


def test_tasks_refuse_what_is_wrong(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(TINY.read_text() + '{"query": "q", "choices": ["a", "b"], "gold": 2}\n')
    ask = ["eval", "tasks", STORYTELLER, *CPU, "--tasks"]
    fails(CORRUPT, "bad.jsonl", "line 5", "gold", "2 is out of range", arguments=[*ask, bad])
    bad.write_text(TINY.read_text() + '\n{"query": "q", "gold": 1}\n')
    fails(CORRUPT, "line 6", "choices", arguments=[*ask, bad])
    bad.write_text("\n")
    fails(INVALID, "no items", arguments=[*ask, bad])
    fails(INVALID, "mmlu", "piqa", arguments=[*ask, "mmlu"])
    fails(NOT_FOUND, "piqa.jsonl", "--data-dir", arguments=[*ask, "piqa", "--data-dir", tmp_path])


@pytest.mark.parametrize("name", ["piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande",
                                  "boolq", "lambada_openai"])
def test_known_tasks_read_their_files(name, tmp_path):
    packed = sorted(SHARED.glob(f"data/zeroshot/{name}*.jsonl.xz"))
    if not packed:
        pytest.skip(f"no zeroshot/{name} in the shared data; set NIBBLE_SHARED to its folder")
    with lzma.open(packed[0], "rt", encoding="utf-8") as lines:
        (tmp_path / f"{name}.jsonl").write_text("".join(next(lines) for _ in range(12)))
    found = json_of("eval", "tasks", STORYTELLER, "--tasks", name, "--data-dir", tmp_path, *CPU)
    task = found["models"][0]["tasks"][0]
    assert task["task"] == name and task["items"] == 12
    assert ("acc_norm" in task) == (name != "lambada_openai")
    assert task["gold_perplexity"] > 1


# --- GSM8K ---------------------------------------------------------------------------------------

def problems(path, count):
    path.write_text("".join(json.dumps({"question": f"What is {i} and {i}?",
                                        "answer": f"It is {2 * i}.\n#### {2 * i}"}) + "\n"
                            for i in range(count)))
    return path


def test_gsm8k_asks_every_problem(tmp_path):
    data = problems(tmp_path / "data.jsonl", 9)
    samples = tmp_path / "samples.jsonl"
    ask = ["eval", "gsm8k", STORYTELLER, "--data", data, "--max-tokens", 12, *CPU]
    found = json_of(*ask, "--fewshot", 2, "--samples", samples)
    assert found["items"] == 7  # without the examples
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [line["question"] for line in lines] == [f"What is {i} and {i}?" for i in range(2, 9)]
    assert all("Question:" not in line["answer"] for line in lines)
    assert found["flexible_match"] == sum(line["flexible"] for line in lines) / 7
    # Batches change nothing, and examples may come from another file.
    one = tmp_path / "one.jsonl"
    json_of(*ask, "--fewshot", 2, "--samples", one, "--max-num-seqs", 1)
    assert one.read_text() == samples.read_text()
    assert json_of(*ask, "--fewshot", 2, "--examples", data, "--limit", 3)["items"] == 3


def test_gsm8k_refuses_what_is_wrong(tmp_path):
    data = problems(tmp_path / "data.jsonl", 3)
    ask = ["eval", "gsm8k", STORYTELLER, *CPU, "--data"]
    fails(INVALID, "--fewshot 3", "--examples", arguments=[*ask, data, "--fewshot", 3])
    fails(INVALID, "--max-tokens", arguments=[*ask, data, "--fewshot", 0, "--max-tokens", 100000])
    data.write_text(data.read_text() + '{"question": "q", "answer": "none"}\n')
    fails(CORRUPT, "line 4", "answer", arguments=[*ask, data, "--fewshot", 0])


# --- report --------------------------------------------------------------------------------------

def test_report_is_a_page_of_what_the_others_said(text, quantized, tmp_path):
    """Results of one label become one method, whatever command they are of."""
    results = {
        "kld": ["kld", STORYTELLER, quantized, "--text", text],
        "ppl": ["ppl", quantized, "--text", text],
        "tasks": ["tasks", STORYTELLER, quantized, "--tasks", TINY]}
    for name, command in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(json_of("eval", *command, *CPU)))
    page = tmp_path / "report.html"
    succeeds("eval", "report", page, f"q={tmp_path}/kld.json", f"q={tmp_path}/ppl.json",
             tmp_path / "tasks.json", quantized / "quantization_report.json")
    shown = page.read_text()
    begin = shown.index('id="report">') + len('id="report">')
    methods = {method["label"]: method
               for method in json.loads(shown[begin:shown.index("</script>", begin)])["methods"]}
    assert list(methods) == ["q", "storyteller"]
    method = methods["q"]
    assert sum(bin["tokens"] for bin in method["kld"]["histogram"]) == method["kld"]["tokens"]
    assert method["perplexity"]["perplexity"] == pytest.approx(math.exp(method["kld"]["ln_ppl"]))
    assert method["bytes"] == sum(path.stat().st_size for path in quantized.glob("*.safetensors"))
    assert len(method["tensors"]) == 56
    assert [task["task"] for task in method["tasks"]] == [TINY.name]
    fails(INVALID, "kld.json", "LABEL=FILE", arguments=[
        "eval", "report", page, f"q={tmp_path}/kld.json", f"q={tmp_path}/kld.json"])
    fails(INVALID, "config.json", "neither", arguments=[
        "eval", "report", page, STORYTELLER / "config.json"])
    fails(NOT_FOUND, "none.json", arguments=["eval", "report", page, "none.json"])
    assert page.read_text() == shown
