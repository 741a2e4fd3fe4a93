"""`nibble quantize` interrupted: killed, stopped, out of disk space, after a power loss. The same
command continues, and the bytes are those of a run without interruption."""

import os
import random
import resource
import shutil
import signal
import subprocess
import time

import pytest

from cli_tools import (
    BINARY, CORRUPT, EXHAUSTED, EXISTS, INVALID, ROOT, STORYTELLER, fails, json_of, succeeds)

CANCELLED = 10
# Slow enough and in enough files that interruptions fall everywhere.
ARGUMENTS = ["--scheme", "w4a16_g32", "--shard-size", "700KB", "--threads", "2"]


def command(output):
    return ["quantize", STORYTELLER, output, *ARGUMENTS]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an uninterrupted run makes."""
    output = tmp_path_factory.mktemp("whole") / "output"
    succeeds(*command(output))
    return contents(output)


def start(output, **options):
    return subprocess.Popen([BINARY, *map(str, command(output))], cwd=ROOT,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)


def end_at(output, files, delay, number=signal.SIGKILL):
    """Ends a run a moment after so many weight files are complete; returns the work folder."""
    work = output.parent / (output.name + ".partial")
    with start(output) as process:
        while process.poll() is None and len(complete_files(work)) < files:
            time.sleep(0.0005)
        time.sleep(delay)
        process.send_signal(number)
    return work, process.returncode


def random_moment(choose):
    """From before the first file to after the last of eight."""
    return choose.randrange(9), choose.choice([0, choose.uniform(0, 0.02)])


def complete_files(work):
    """Inodes of the weight files that are complete; none when the folder has been renamed."""
    try:
        return {path.name: path.stat().st_ino for path in work.glob("*.safetensors")}
    except FileNotFoundError:  # renamed while it was listed
        return {}


def check_resumed(output, expected):
    succeeds(*command(output))
    assert contents(output) == expected
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_fifty_kills(tmp_path, whole):
    choose = random.Random(21)
    kept = begun = 0
    for _ in range(50):
        output = tmp_path / "output"
        work, _ = end_at(output, *random_moment(choose))
        before = complete_files(work)
        begun += work.exists()
        check_resumed(output, whole)
        for name, inode in before.items():
            assert (output / name).stat().st_ino == inode, f"{name} was made again"
            kept += 1
        shutil.rmtree(output)
    assert begun > 25 and kept > 50, (begun, kept)


def test_killed_again_and_again(tmp_path, whole):
    choose = random.Random(22)
    output = tmp_path / "output"
    for files in range(8):
        work, _ = end_at(output, files, choose.uniform(0, 0.01))
    check_resumed(output, whole)


@pytest.mark.parametrize("kilobytes", [60, 200, 350, 500, 650])
def test_disk_full(tmp_path, whole, kilobytes):
    """Files cannot grow beyond a limit: writing fails as on a full disk."""
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes << 10, kilobytes << 10))

    output = tmp_path / "output"
    message = fails(EXHAUSTED, "output.partial", "the same command continues",
                    arguments=command(output), preexec_fn=limit)
    assert "write" in message
    assert not output.exists() and (tmp_path / "output.partial").exists()
    check_resumed(output, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped(tmp_path, whole, number):
    output = tmp_path / "output"
    for _ in range(20):  # a run may end before the signal arrives
        work, code = end_at(output, 1, 0, number)
        if code != 0:
            break
        shutil.rmtree(output)
    assert code == CANCELLED
    assert not output.exists() and list(work.glob("journal-*.jsonl"))
    check_resumed(output, whole)


def damage(work, choose):
    """What a power loss may do: writes that never reached the disk, in any file that is open."""
    for path in sorted(work.iterdir()):
        size = path.stat().st_size
        if path.name.endswith(".safetensors.partial"):
            kind = choose.randrange(3)
            if kind == 0:
                os.truncate(path, choose.randrange(size + 1))
            elif kind == 1:
                with open(path, "r+b") as file:
                    for _ in range(3):
                        at = choose.randrange(max(size, 1)) // 4096 * 4096
                        file.seek(at)
                        file.write(bytes(min(4096, size - at)))
        elif path.name.startswith("journal-"):
            kind = choose.randrange(3)
            if kind == 0:
                os.truncate(path, choose.randrange(size + 1))
            elif kind == 1 and size:
                at = choose.randrange(size)
                with open(path, "r+b") as file:
                    file.seek(at)
                    file.write(bytes(size - at))


def test_power_loss(tmp_path, whole):
    choose = random.Random(23)
    damaged = 0
    for _ in range(20):
        output = tmp_path / "output"
        work, _ = end_at(output, *random_moment(choose))
        if work.exists():
            damage(work, choose)
            damaged += 1
        check_resumed(output, whole)
        shutil.rmtree(output)
    assert damaged > 10


def test_a_lost_weight_file_is_made_again(tmp_path, whole):
    output = tmp_path / "output"
    work, _ = end_at(output, 3, 0)
    (work / sorted(complete_files(work))[1]).unlink()
    check_resumed(output, whole)


def test_other_options_are_refused(tmp_path):
    output = tmp_path / "output"
    work, _ = end_at(output, 3, 0)
    other = ["quantize", STORYTELLER, output, "--scheme", "w8a8_int8"]
    fails(INVALID, "output.partial", "other options", "--force", arguments=other)
    assert complete_files(work)
    succeeds(*other, "--force")
    assert not work.exists()


def test_only_one_run_at_a_time(tmp_path, whole):
    output = tmp_path / "output"
    running = [start(output) for _ in range(3)]
    codes = [process.wait() for process in running]
    assert 0 in codes and set(codes) <= {0, 9}, codes  # 9: another one was at work
    check_resumed(output, whole)


def test_what_is_there_already_is_left(tmp_path):
    output = tmp_path / "output"
    assert json_of(*command(output))["already_there"] is False
    before = complete_files(output)
    again = json_of(*command(output))
    assert again["already_there"] is True and again["tensors"] == 56
    assert json_of(*command(output), "--force")["already_there"] is True
    assert complete_files(output) == before


def test_least_signal_to_noise(tmp_path, whole):
    output = tmp_path / "output"
    fails(INVALID, "--min-snr 50", "output.partial", arguments=[*command(output), "--min-snr", 50])
    assert not output.exists()
    assert (tmp_path / "output.partial/quantization_report.json").exists()
    succeeds(*command(output), "--min-snr", "10")
    assert contents(output) == whole


def test_a_folder_of_somebody_else(tmp_path):
    (tmp_path / "output.partial").mkdir()
    (tmp_path / "output.partial/mine").write_text("kept")
    fails(EXISTS, "output.partial", arguments=command(tmp_path / "output"))
    assert [path.name for path in (tmp_path / "output.partial").iterdir()] == ["mine"]


def test_a_source_that_changes(tmp_path):
    """Between two runs its work is of no use; during a run the run fails."""
    source = shutil.copytree(STORYTELLER, tmp_path / "source")
    output = tmp_path / "output"
    arguments = ["quantize", source, output, *ARGUMENTS]
    with subprocess.Popen([BINARY, *map(str, arguments)], cwd=ROOT, stderr=subprocess.PIPE,
                          stdout=subprocess.DEVNULL) as process:
        work = tmp_path / "output.partial"
        while process.poll() is None and not complete_files(work):
            time.sleep(0.0005)
        os.utime(source / "config.json")
        message = process.communicate()[1].decode()
    assert process.returncode == CORRUPT and "changed while it was read" in message
    assert not output.exists() and not work.exists()
    with subprocess.Popen([BINARY, *map(str, arguments)], cwd=ROOT, stderr=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not complete_files(work):
            time.sleep(0.0005)
        process.kill()
    os.utime(source / "model-00002-of-00002.safetensors")
    fails(INVALID, "output.partial", "changed", arguments=arguments)


def in_file_system(tmp_path, kind, more, script):
    """Runs a shell script with $MOUNT on a file system of its own; skips where that is not let."""
    mount = tmp_path / "mount"
    mount.mkdir()
    made = f"mount -t {kind} {more} {mount} || exit 99; export MOUNT={mount}; "
    result = subprocess.run(["unshare", "-rm", "sh", "-c", made + script], text=True, cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if result.returncode == 99 or "unshare" in result.stdout:
        pytest.skip(f"cannot mount {kind} here: {result.stdout.strip()}")
    return result


def shell(output):
    return " ".join([str(BINARY), *map(str, command(output))])


def test_a_file_system_that_refuses_direct_writes(tmp_path, whole):
    result = in_file_system(tmp_path, "ramfs", "none",
                            f"{shell('$MOUNT/output')} && cp -r $MOUNT/output {tmp_path}/output")
    assert result.returncode == 0, result.stdout
    assert contents(tmp_path / "output") == whole


@pytest.mark.parametrize("kilobytes", [300, 900, 1500, 2500, 3300])
def test_a_file_system_that_is_full(tmp_path, whole, kilobytes):
    run = shell("$MOUNT/output")
    result = in_file_system(
        tmp_path, "tmpfs", f"-o size={kilobytes}k none",
        f"{run} && exit 1; test $? = {EXHAUSTED} || exit 2; test ! -e $MOUNT/output || exit 3; "
        f"mount -o remount,size=64m $MOUNT && {run} && cp -r $MOUNT/output {tmp_path}/output")
    assert result.returncode == 0, result.stdout
    assert "the same command continues" in result.stdout
    assert contents(tmp_path / "output") == whole
