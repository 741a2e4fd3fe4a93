#!/usr/bin/env bash
# Checks formatting (clang-format 14) and runs clang-tidy 14.
# Usage: scripts/lint.sh [--format] [--fix] [--changed]
#   --format   formatting only    --fix   rewrite files instead of checking
#   --changed  clang-tidy only over files that differ from the main branch
set -euo pipefail
"$(dirname "${BASH_SOURCE[0]}")/install-deps.sh" --lint
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

format_only=false fix=false changed=false
for option in "$@"; do
  case "$option" in
    --format) format_only=true ;;
    --fix) fix=true ;;
    --changed) changed=true ;;
    *) fail "unknown option $option (use --format, --fix, --changed)" ;;
  esac
done

mapfile -t sources < <(git ls-files -- '*.cc' '*.h' | grep -v '^tests/data/' || true)
if $fix; then
  clang-format-14 -i "${sources[@]}"
else
  clang-format-14 --dry-run -Werror "${sources[@]}" ||
    fail "formatting differs; run scripts/lint.sh --format --fix"
fi
$format_only && exit 0

cmake --preset tidy -DCMAKE_CXX_CLANG_TIDY= >&2
if $changed; then
  mapfile -t units < <(git diff --name-only --diff-filter=d main -- '*.cc' || true)
else
  mapfile -t units < <(git ls-files -- 'src/*.cc' 'tools/*.cc')
fi
[ ${#units[@]} -eq 0 ] && exit 0
printf '%s\0' "${units[@]}" | xargs -0 -n 4 -P "$(jobs)" clang-tidy-14 -p build/tidy --quiet
