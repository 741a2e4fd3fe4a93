#!/usr/bin/env bash
# Installs what the build needs on Debian 12. Does nothing, and needs no network, when all is there.
# Usage: scripts/install-deps.sh [--check] [--lint] [--fuzz] [--clean-root]
#   --check   install nothing; fail when something is missing      the others: a group of tools more
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache pkg-config git ca-certificates curl
  libboost1.81-dev libboost-json1.81-dev libcli11-dev libfmt-dev libspdlog-dev
  libpcre2-dev libutf8proc-dev libxxhash-dev libedit-dev libgtest-dev libgmock-dev libsimde-dev
  python3 python3-venv xz-utils
)
check=false
for option in "$@"; do
  case "$option" in
    --check) check=true ;;
    --lint) packages+=(clang-format-14 clang-tidy-14) ;;
    --fuzz) packages+=(clang-19 libclang-rt-19-dev llvm-19) ;;
    --clean-root) packages+=(debootstrap) ;;
    *) echo "install-deps.sh: unknown option $option (use --check, --lint, --fuzz, --clean-root)" >&2; exit 2 ;;
  esac
done

installed() { [ "$(dpkg-query -W -f '${Status}' "$1" 2>/dev/null)" = "install ok installed" ]; }

command -v dpkg-query >/dev/null || {
  echo "install-deps.sh: this is not a Debian system; install by hand: ${packages[*]}" >&2; exit 1; }
missing=()
for package in "${packages[@]}"; do installed "$package" || missing+=("$package"); done
[ ${#missing[@]} -eq 0 ] && exit 0
! $check || exit 1

echo "install-deps.sh: installing ${missing[*]}" >&2
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || {
    echo "install-deps.sh: neither root nor sudo; ask an administrator for: apt-get install ${missing[*]}" >&2
    exit 1; }
  as_root=(sudo)
fi
# A failing third-party source must not stop us while Debian's own lists are usable.
"${as_root[@]}" apt-get update -q >&2 || echo "install-deps.sh: apt-get update failed; going on" >&2
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -q --no-install-recommends "${missing[@]}" >&2
