#!/usr/bin/env bash
# Checks formatting (clang-format 14) and runs clang-tidy 14.
# Usage: scripts/lint.sh [--format] [--fix] [--changed]
#   --format   formatting only    --fix   rewrite files instead of checking
#   --changed  clang-tidy only over what changed, at most NIBBLE_TIDY_FILES (16) files: since this
#              branch left main, or on main itself since the last tag or in the last 20 commits
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install_packages --lint

format_only=false fix=false changed=false
for option in "$@"; do
  case "$option" in
    --format) format_only=true ;;
    --fix) fix=true ;;
    --changed) changed=true ;;
    *) fail "unknown option $option (use --format, --fix, --changed)" ;;
  esac
done

existing() { while read -r file; do [ ! -e "$file" ] || echo "$file"; done; }

mapfile -t sources < <(git ls-files --cached --others --exclude-standard -- \
  '*.cc' '*.h' '*.cu' '*.cuh' | grep -v '^tests/data/' | existing)
if $fix; then
  clang-format-14 -i "${sources[@]}"
else
  clang-format-14 --dry-run -Werror "${sources[@]}" ||
    fail "formatting differs; run scripts/lint.sh --format --fix"
fi
$format_only && exit 0

# The commit to compare with. A shallow clone is compared with its oldest commit.
changed_base() {
  local head branch base oldest tag
  head=$(git rev-parse HEAD)
  for branch in origin/main main; do
    base=$(git merge-base "$branch" HEAD 2>/dev/null) || continue
    [ "$base" = "$head" ] || { echo "$base"; return; }
  done
  oldest=$(git rev-list --first-parent --max-count=21 HEAD | tail -n 1)
  tag=$(git describe --tags --abbrev=0 HEAD^ 2>/dev/null) || { echo "$oldest"; return; }
  if git merge-base --is-ancestor "$oldest" "$tag"; then git rev-parse "$tag^{commit}"; else echo "$oldest"; fi
}

# Files that changed since a commit, those of the latest commits first, edited ones before all.
changed_files() {
  { git diff --name-only HEAD; git ls-files --others --exclude-standard
    git log --format= --name-only "$1..HEAD"; } | awk '!seen[$0]++'
}

# Of the files on standard input those that the tidy build compiles; for a header its source. What
# only instantiates the kernels of one CPU takes minutes and holds no code of its own.
compiled() {
  while read -r file; do
    unit=${file%.h}
    [ "$unit" = "$file" ] || unit=$unit.cc
    case "$unit" in *_portable_test.cc|*/kernels_*.cc) continue ;; esac
    [ -e "$unit" ] || continue
    grep -qF "\"$NIBBLE_ROOT/$unit\"" build/tidy/compile_commands.json && echo "$unit"
  done | awk '!seen[$0]++'
}

cmake --preset tidy -DCMAKE_CXX_CLANG_TIDY= >&2
if $changed; then
  base=$(changed_base)
  mapfile -t units < <(changed_files "$base" | compiled)
  most=${NIBBLE_TIDY_FILES:-16}  # of 12 to 64 CPU seconds, 27 on average: 4 minutes on two cores
  note "clang-tidy: ${#units[@]} files changed since $(git log -1 --format='%h of %cs' "$base")"
  if [ ${#units[@]} -gt "$most" ]; then
    echo "lint.sh: $((${#units[@]} - most)) of them, the longest unchanged, are left out;" \
      "scripts/lint.sh checks all" >&2
    units=("${units[@]:0:most}")
  fi
else
  mapfile -t units < <(git ls-files -- 'src/*.cc' 'tools/*.cc' | compiled)
fi
[ ${#units[@]} -eq 0 ] && exit 0
printf '%s\0' "${units[@]}" | xargs -0 -n 1 -P "$(jobs)" clang-tidy-14 -p build/tidy --quiet
