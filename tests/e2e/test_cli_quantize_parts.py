"""`nibble quantize` in parts and within its memory."""

import json
import re
import subprocess
import time

import pytest

from cli_tools import (
    BINARY, INVALID, ROOT, STORYTELLER, UNAVAILABLE, fails, json_of, nibble, succeeds)

ARGUMENTS = ["--scheme", "w4a16_g32", "--shard-size", "500KB"]
PARTS = 4


def command(output, *more):
    return ["quantize", STORYTELLER, output, *ARGUMENTS, *more]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "output"
    succeeds(*command(output))
    return contents(output)


def start(output, part):
    return subprocess.Popen([BINARY, *map(str, command(output, "--part", f"{part}/{PARTS}"))],
                            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def test_four_parts_one_killed(tmp_path, whole):
    output, work = tmp_path / "output", tmp_path / "output.partial"
    processes = [start(output, part) for part in range(1, PARTS + 1)]
    victim = processes[1]
    journal = work / "journal-2-of-4.jsonl"
    while victim.poll() is None and not (journal.exists() and journal.stat().st_size > 200):
        time.sleep(0.0005)
    victim.kill()
    for process in processes:
        process.communicate()
    assert victim.returncode == -9
    assert [process.returncode for process in processes[2:]] == [0, 0] and not output.exists()
    message = fails(UNAVAILABLE, "part 2/4", "--finish", arguments=command(output, "--finish"))
    assert "part 1/4" not in message and "part 3/4" not in message
    told = json_of(*command(output, "--part", "2/4"))
    assert told["part"] == "2/4" and 0 < told["shards_done"] < told["shards_total"]
    files = {path.name: path.stat().st_ino for path in work.glob("*.safetensors")}
    succeeds(*command(output, "--part", "3/4"))  # done before: nothing is made again
    assert {path.name: path.stat().st_ino for path in work.glob("*.safetensors")} == files
    succeeds(*command(output, "--finish"))
    assert contents(output) == whole
    assert not work.exists()
    assert "already" in succeeds(*command(output, "--part", "1/4")).stdout


def test_parts_share_out_all_files(tmp_path):
    output = tmp_path / "output"
    done = []
    for part in range(1, PARTS + 1):
        done.append(json_of(*command(output, "--part", f"{part}/{PARTS}")))
    assert sum(part["shards_done"] for part in done) == done[0]["shards_total"]
    sizes = [part["bytes_in"] + part["bytes_out"] for part in done]
    assert max(sizes) < 2 * min(sizes) + 4_000_000  # one file holds the embedding
    # A whole run takes over what parts did.
    assert json_of(*command(output))["tensors"] == 56


def test_two_runs_of_one_part(tmp_path):
    output = tmp_path / "output"
    processes = [start(output, 1) for _ in range(3)]
    errors = [process.communicate()[1].decode() for process in processes]
    codes = [process.returncode for process in processes]
    assert 0 in codes and set(codes) <= {0, UNAVAILABLE}, (codes, errors)


@pytest.mark.parametrize("part", ["0/4", "5/4", "1", "1/", "/4", "a/b", "1/4x", "-1/4"])
def test_malformed_part(tmp_path, part):
    fails(INVALID, f"--part {part}", arguments=command(tmp_path / "output", f"--part={part}"))


def test_part_and_finish_exclude_each_other(tmp_path):
    fails(INVALID, "--part", arguments=command(tmp_path / "output", "--part", "1/2", "--finish"))


def test_finish_without_parts(tmp_path):
    fails(UNAVAILABLE, "weight files are missing",
          arguments=command(tmp_path / "output", "--finish"))


# --- memory --------------------------------------------------------------------------------------

LARGE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 64, "vocab_size": 8192,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    succeeds("make-dummy", "--config", folder / "config.json", "--out", folder / "model")
    size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    assert size > 300e6
    return folder / "model"


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w8a8_fp8"])
def test_memory_is_bounded(large, tmp_path, scheme):
    limit = 96 << 20
    arguments = ["quantize", large, tmp_path / "output", "--scheme", scheme, "--scale-rule",
                 "absmax", "--memory", "96MiB", "--threads", "4"]
    value = json_of(*arguments, timeout=300)
    assert value["bytes_in"] > 300e6
    assert 0 < value["peak_rss_bytes"] < limit, value["peak_rss_bytes"]


def test_bytes_do_not_depend_on_memory_or_threads(large, tmp_path):
    made = []
    for name, more in (("a", ["--memory", "64MiB", "--threads", "1"]),
                       ("b", ["--memory", "1GiB", "--threads", "3"])):
        output = tmp_path / name
        succeeds("quantize", large, output, "--scheme", "w4a16_g32", "--scale-rule", "absmax", *more,
                 timeout=300)
        made.append(contents(output))
    assert made[0] == made[1]


def test_too_little_memory(large, tmp_path):
    arguments = ["quantize", large, tmp_path / "output", "--scheme", "w4a16_g32", "--memory"]
    message = fails(INVALID, "--memory 8 MiB", arguments=[*arguments, "8MiB"])
    needed = int(re.search(r"needs (\d+) MiB", message).group(1))
    assert 8 < needed < 100
    assert not list(tmp_path.iterdir())
    nibble(*arguments, f"{needed + 8}MiB", timeout=300)
    assert (tmp_path / "output").exists()
