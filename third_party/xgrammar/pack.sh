#!/usr/bin/env bash
# Makes xgrammar-VERSION.tar.xz, the files that the build takes, from the source distribution.
# Usage: third_party/xgrammar/pack.sh xgrammar-VERSION.tar.gz
# The same input gives the same bytes.
set -euo pipefail
version=0.2.8
sdist_sha256=8305646fd2b319d6c3003f51a1665e54cbbe9cba1fb636bc41d0b46434ccbb80

[ $# -eq 1 ] || { echo "usage: pack.sh xgrammar-$version.tar.gz" >&2; exit 2; }
echo "$sdist_sha256  $1" | sha256sum --check --quiet
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -xzf "$1" -C "$work"
cd "$work"
files=(LICENSE NOTICE include 3rdparty/picojson/picojson.h 3rdparty/dlpack/include/dlpack/dlpack.h
       3rdparty/dlpack/LICENSE)
mapfile -t sources < <(cd "xgrammar-$version" && find cpp -path cpp/tvm_ffi -prune -o \( -name '*.cc' -o -name '*.h' \) -print)
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 --mode=u=rwX,go=rX -cf - \
  "${files[@]/#/xgrammar-$version/}" "${sources[@]/#/xgrammar-$version/}" | xz -9e > packed.tar.xz
cd - > /dev/null
mv "$work/packed.tar.xz" "$(dirname "${BASH_SOURCE[0]}")/xgrammar-$version.tar.xz"
