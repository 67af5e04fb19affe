#!/usr/bin/env bash
# Installs the system tools that some tests use, when that is possible; otherwise says which tests
# will be skipped. Fails where Python is too old for the frameworks that the tests use.
set -u
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "missing: Python 3.11 or later for the tests, as its torch takes; this is $("$python" -V)" >&2
  echo "    make clean, then make test PYTHON=python3.12" >&2
  exit 1
fi
packages=()
command -v strace >/dev/null || packages+=(strace)
command -v mkfs.ext4 >/dev/null || packages+=(e2fsprogs)
command -v losetup >/dev/null || packages+=(mount)
command -v setpriv >/dev/null || packages+=(util-linux)
command -v readelf >/dev/null || packages+=(binutils)

if [ ${#packages[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing for the tests: ${packages[*]}"
  { apt-get install -qq -y "${packages[@]}" || { apt-get update -qq && apt-get install -qq -y "${packages[@]}"; }; } \
    >/dev/null 2>&1 || echo "could not install: ${packages[*]}" >&2
fi
for tool in strace mkfs.ext4 losetup setpriv prlimit readelf; do
  command -v "$tool" >/dev/null || echo "tests that use $tool are skipped (not installed)"
done
if [ "$(id -u)" != 0 ]; then
  echo "tests that mount file systems or change limits are skipped (not root)"
fi
exit 0
