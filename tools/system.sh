#!/bin/sh
# Install what pip cannot, for the tests of the site: Chromium, a library that Playwright needs, a font, KaTeX. Nothing is
# asked; where it cannot install, it says in one line what is left out. `system.sh python3-venv` installs that instead.
set -u
missing=${*:+ $*}
if [ -z "$missing" ]; then
  command -v chromium >/dev/null || command -v google-chrome >/dev/null || missing="$missing chromium"
  find /usr/lib /usr/lib64 -maxdepth 2 -name libatomic.so.1 2>/dev/null | grep -q . || missing="$missing libatomic1"
  [ -d /usr/share/fonts/truetype/dejavu ] || missing="$missing fonts-dejavu-core"
  [ -d /usr/share/javascript/katex ] || missing="$missing libjs-katex"
  [ -n "$missing" ] || exit 0
fi

if [ "$(id -u)" = 0 ]; then root=""; elif sudo -n true 2>/dev/null; then root="sudo -n"; else root="none"; fi
if ! command -v apt-get >/dev/null || [ "$root" = none ]; then
  echo "Left out:$missing (they need apt-get and root, or another way that you know); tests that need them are skipped."
  exit 0
fi

echo "Installing$missing with apt-get ..."
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
if ! { $root apt-get -qq update && $root apt-get -qq install -y --no-install-recommends $missing; } >"$log" 2>&1 </dev/null; then
  tail -n 3 "$log"
  echo "Left out:$missing (apt-get failed, see above); tests that need them are skipped."
fi
rm -f "$log"
