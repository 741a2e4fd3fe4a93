"""`nibble quantize --budget`: chooses as `nibble sensitivity` does, and quantizes."""

import json
import signal
import subprocess
import time

import pytest

from cli_tools import BINARY, EXISTS, INVALID, ROOT, STORYTELLER, UNSUPPORTED, fails, json_of, succeeds

STORY = ROOT / "tests/data/text/the_black_cat.txt"
SCHEMES = "w4a16_channel,w4a16_g32,w8a16_channel"
RECIPE = "quantization_recipe.json"


@pytest.fixture(scope="module", name="text")
def make_text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(STORY.read_bytes()[:6000])
    return path


def budget(out, text, amount="4.5bpw", *more):
    return ["quantize", STORYTELLER, out, "--budget", amount, "--schemes", SCHEMES, "--calibrate",
            text, "--calibration-windows", 4, "--measure", 0, *more]


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_it_is_what_sensitivity_and_rules_make(tmp_path, text):
    out, rules, json_file = tmp_path / "out", tmp_path / "rules", tmp_path / "found.json"
    said = succeeds(*budget(out, text, "4.5bpw", "--method", "rtn")).stdout
    table = succeeds("sensitivity", STORYTELLER, "--schemes", SCHEMES, "--calibrate", text,
                     "--calibration-windows", 4, "--measure", 0, "--budget", "4.5bpw",
                     "--write-rules", rules, "--json", json_file).stdout
    chosen = [line for line in table.splitlines() if "budget 4.5bpw" in line or "bound" in line]
    assert said.splitlines()[:2] == chosen
    choice = json.loads(json_file.read_text())["choice"]
    apart = tmp_path / "apart"
    succeeds("quantize", STORYTELLER, apart, "--scheme", choice["scheme"], "--format",
             "compressed-tensors", "--rules", rules)
    assert weights(out) == weights(apart)
    recipe = json.loads((out / RECIPE).read_text())
    assert recipe["rules"] == json.loads((apart / RECIPE).read_text())["rules"]
    assert recipe["budget"]["asked"]["budget"] == "4.5bpw"
    assert recipe["budget"]["asked"]["schemes"] == SCHEMES.split(",")
    figures = recipe["budget"]["chosen"]
    assert {name: figures[name] for name in ("predicted", "bound", "bytes", "bits_per_weight")} == {
        name: choice[name] for name in ("predicted", "bound", "bytes", "bits_per_weight")}
    assert figures["bytes"] == len(weights(out))


def test_a_recipe_repeats_it(tmp_path, text):
    """With codes from the text, and with none of it."""
    first, second = tmp_path / "first", tmp_path / "second"
    found = json_of(*budget(first, text, "5bpw", "--method", "gptq"))
    assert found["budget"]["chosen"]["bits_per_weight"] <= 5
    succeeds("quantize", STORYTELLER, second, "--recipe", first / RECIPE, "--calibrate", text)
    assert weights(first) == weights(second)
    assert (first / RECIPE).read_bytes() == (second / RECIPE).read_bytes()
    plain, again = tmp_path / "plain", tmp_path / "again"
    succeeds("quantize", STORYTELLER, plain, "--budget", "4.6bpw", "--schemes", SCHEMES)
    succeeds("quantize", STORYTELLER, again, "--recipe", plain / RECIPE)
    assert weights(plain) == weights(again)
    assert (plain / RECIPE).read_bytes() == (again / RECIPE).read_bytes()
    succeeds("quantize", STORYTELLER, again, "--recipe", plain / RECIPE, "--rule",
             "*.down_proj=keep", "--force")
    assert "budget" not in json.loads((again / RECIPE).read_text())
    succeeds("verify", STORYTELLER, plain)


@pytest.mark.parametrize("more", [[], ["--lm-head", "w8a16_channel"], ["--method", "rotate"]])
def test_bytes_are_those_of_the_output(tmp_path, more):
    """Also of a head that is given codes, or that is no longer the embeddings' table."""
    out = tmp_path / "out"
    succeeds("quantize", STORYTELLER, out, "--budget", "8100000", "--schemes", SCHEMES, *more)
    assert 7_900_000 < len(weights(out)) <= 8_100_000


def killed_after_choosing(arguments, out):
    """Starts it and kills it when the choice is kept."""
    kept = out.parent / (out.name + ".partial") / "choice.json"
    with subprocess.Popen([BINARY, *map(str, arguments)], cwd=ROOT, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 100
        while not kept.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
    assert kept.exists() and not out.exists()
    return kept


def test_a_run_that_was_killed_goes_on_with_its_choice(tmp_path, text):
    out, whole = tmp_path / "out", tmp_path / "whole"
    kept = killed_after_choosing(budget(out, text), out)
    before = kept.read_bytes()
    fails(INVALID, "out.partial", '--budget "4.5bpw" there, "5bpw" here', "--force",
          arguments=budget(out, text, "5bpw"))
    fails(INVALID, "--seed 0 there, 1 here", arguments=budget(out, text, "4.5bpw", "--seed", 1))
    assert kept.read_bytes() == before
    result = succeeds(*budget(out, text))
    assert "goes on with what was chosen there" in result.stderr
    succeeds(*budget(whole, text))
    names = {path.name for path in whole.iterdir()}
    assert names == {path.name for path in out.iterdir()} and "choice.json" not in names
    for name in names:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    # What is there is taken as it is, another budget is refused before anything is measured.
    assert "is there already" in succeeds(*budget(out, text)).stdout
    fails(EXISTS, str(out), "--force", arguments=budget(out, text, "5bpw"))


def test_force_replaces_unfinished_work(tmp_path, text):
    out = tmp_path / "out"
    killed_after_choosing(budget(out, text), out)
    succeeds(*budget(out, text, "5bpw", "--force"))
    assert json.loads((out / RECIPE).read_text())["budget"]["asked"]["budget"] == "5bpw"


def test_work_without_a_budget_is_in_the_way(tmp_path, text):
    out = tmp_path / "out"
    work = tmp_path / "out.partial"
    arguments = ["quantize", STORYTELLER, out, "--scheme", "w4a16_g32", "--min-snr", "90"]
    fails(INVALID, "--min-snr", arguments=arguments)
    assert work.exists()
    fails(INVALID, "without --budget", str(work), arguments=budget(out, text))


def test_a_dry_run_leaves_nothing(tmp_path, text):
    said = succeeds(*budget(tmp_path / "out", text, "4.5bpw", "--dry-run")).stdout
    assert said.startswith("budget 4.5bpw: ") and "model.layers.0.mlp.down_proj" in said
    assert not list(tmp_path.iterdir())


def test_what_is_refused(tmp_path, text):
    out = tmp_path / "out"
    for arguments, words in [
            (["--budget", "4bpw", "--schemes", "w4a16_g32"], ["4.500bpw", "--schemes"]),
            (["--budget", "1MB", "--schemes", "w4a16_g32"], ["--budget", "bytes"]),
            (["--budget", "4bwp", "--schemes", "w4a16_g32"], ["--budget 4bwp", "4.5bpw"]),
            (["--budget", "5bpw"], ["--schemes"]),
            (["--schemes", "w4a16_g32", "--scheme", "w4a8"], ["--schemes", "--budget"]),
            (["--measure", "0.5", "--scheme", "w4a8"], ["--measure", "--budget"]),
            (["--budget", "99bpw", "--schemes", "w4a16_g32,keep"], ["99bpw", "keep"]),
            (["--budget", "5bpw", "--schemes", "w4a16_g32,w5"], ["--schemes", "w5"])]:
        fails(INVALID, *words, arguments=["quantize", STORYTELLER, out, *arguments])
    for flag, value in [("--scheme", "w4a8"), ("--rule", "*=keep"), ("--rules", "f"),
                        ("--ignore", "a"), ("--include", "a"), ("--recipe", "f"), ("--part", "1/2")]:
        fails(INVALID, f"{flag} and --budget", arguments=[
            "quantize", STORYTELLER, out, "--budget", "5bpw", "--schemes", SCHEMES, flag, value])
    fails(UNSUPPORTED, "--schemes", "fp8", arguments=[
        "quantize", STORYTELLER, out, "--budget", "9bpw", "--schemes", "w8a8_fp8", "--calibrate",
        text])
    assert not list(tmp_path.iterdir())
