#!/usr/bin/env bash
# Says which of the tools that a build needs are missing, and how to get them.
set -u
missing=0
need() { # what, how
  echo "missing: $1" >&2
  echo "    $2" >&2
  missing=1
}

python=${PYTHON:-python3}
command -v cargo >/dev/null || need "cargo, Rust 1.90 or later" "see https://rustup.rs"
command -v cc >/dev/null || need "a C linker (cc)" "apt-get install gcc libc6-dev"
if command -v "$python" >/dev/null; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    need "Python 3.10 or later ($python is older)" "make PYTHON=python3.12 …"
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    need "Python's venv and pip" "apt-get install python3-venv python3-pip"
else
  need "Python 3.10 or later" "apt-get install python3 python3-venv"
fi
if [ "$(uname -s)" != Linux ]; then
  need "Linux" "Forebay uses io_uring and Linux AIO"
fi
exit "$missing"
