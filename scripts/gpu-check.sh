#!/usr/bin/env bash
# Checks Forebay on a machine with a GPU, in less than 8 minutes: runs the tests that take one and
# `forebay bench --gpu`, and prints what came of both and on what hardware.
#
# It builds nothing, downloads nothing and leaves nothing behind. It takes a Python (3.10 or later)
# that has torch with CUDA, numpy and pytest, and a wheel of Forebay, or else the Forebay that is
# installed there. What else is installed there (safetensors, kvikio, …) is compared with.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/gpu-check.sh [OPTION]… [WHEEL] [-- ARGUMENT…]

  --dir DIR          where to store, on the drive that is measured; the working directory if not given
  --python PROGRAM   the Python to use; python3 if not given
  --device DEVICE    the GPU to use, such as cuda:1; cuda:0 if not given
  --size SIZE        bytes that the bench moves; 1G if not given
  --rounds COUNT     rounds of the bench; 3 if not given
  --dry-run          run the tests on the processor, and no bench: says whether the tests are right
  ARGUMENT…          what pytest takes, such as -k test_exact

Exit codes: 0 all is well; 1 a test or the bench failed; 2 the arguments can't be used; 3 it can't be
done on this machine; 4 the tests passed, and a goal of the bench wasn't reached.
TEXT
}

tests_seconds=220
bench_seconds=220
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=$PWD python=python3 device=cuda:0 size=1G rounds=3 wheel='' dry_run=''
pytest_arguments=()

refuse() { # exit code, why
  echo "gpu-check: $2" >&2
  exit "$1"
}

while [ $# -gt 0 ]; do
  case $1 in
    --dir | --python | --device | --size | --rounds)
      [ $# -gt 1 ] || refuse 2 "$1 takes a value"
      name=${1#--}
      printf -v "$name" '%s' "$2"
      shift
      ;;
    --dry-run) dry_run=yes ;;
    --help | -h) usage && exit 0 ;;
    --)
      shift
      pytest_arguments=("$@")
      break
      ;;
    -*) refuse 2 "there is no option $1 (see --help)" ;;
    *)
      [ -z "$wheel" ] || refuse 2 "one wheel is taken, not also $1"
      wheel=$1
      ;;
  esac
  shift
done
[ -z "$wheel" ] || [ -f "$wheel" ] || refuse 2 "$wheel is not a file"
[[ $device =~ ^cuda:[0-9]+$ ]] || refuse 2 "--device takes a GPU by its number, such as cuda:1"
[ -d "$dir" ] || refuse 2 "$dir is not a directory"
dir=$(cd "$dir" && pwd)
[ -z "$wheel" ] || wheel=$(cd "$(dirname "$wheel")" && pwd)/$(basename "$wheel")
command -v "$python" >/dev/null || refuse 3 "$python is not here: pass --python"
# Everything below runs elsewhere: a path is made to hold there.
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac

work=$(mktemp -d)
stored=$(mktemp -d "$dir/forebay-gpu-check.XXXXXX") || refuse 3 "cannot write in $dir: pass --dir"
trap 'rm -rf "$work" "$stored"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
# The working directory comes first on Python's path, and cuFile writes its log there.
cd "$work"
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$work/site:$root/tests${PYTHONPATH:+:$PYTHONPATH}"

if [ -n "$wheel" ]; then
  # Not a virtual environment: one that was made from another doesn't have that one's torch.
  "$python" -m pip --version >/dev/null 2>&1 || refuse 3 "$python has no pip, which installs wheels"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index --no-compile \
    --target "$work/site" "$wheel" || refuse 3 "cannot install $wheel"
fi
for module in torch numpy pytest forebay; do
  "$python" -W ignore -c "import $module" 2>"$work/error" ||
    refuse 3 "$python cannot import $module: $(tail -n 1 "$work/error")"
done
reason=$("$python" -W ignore -c 'from gpu.machine import missing; print(missing() or "")')
if [ -n "$dry_run" ]; then
  device=cpu
elif [ -n "$reason" ]; then
  refuse 3 "nothing can be checked here: $reason"
fi

cat >"$work/pytest.ini" <<'TEXT'
[pytest]
markers =
    gpu: runs on GPUs
    slow: moves gigabytes
filterwarnings =
    error::forebay.errors.ForebayWarning
TEXT
echo "tests on $device, $tests_seconds seconds at the most …"
tests=0
timeout --signal=INT --kill-after=15 "$tests_seconds" "$python" -m pytest "$root/tests/gpu" \
  -c "$work/pytest.ini" --rootdir "$root/tests" -p no:cacheprovider --basetemp "$stored/tests" \
  --junitxml "$work/tests.xml" -m gpu --gpu-device "$device" -q \
  ${pytest_arguments[@]+"${pytest_arguments[@]}"} >"$work/tests.txt" 2>&1 || tests=$?
if [ "$tests" != 0 ]; then
  cat "$work/tests.txt"
fi

if [ -z "$dry_run" ]; then
  echo "bench on $device with $size in $dir, $bench_seconds seconds at the most …"
  timeout --signal=TERM --kill-after=15 "$bench_seconds" "$python" -m forebay bench \
    "--gpu=${device#cuda:}" --dir "$stored" --size "$size" --rounds "$rounds" --json \
    >"$work/bench.json" || echo "gpu-check: the bench ended with exit code $?" >&2
fi

"$python" -W ignore "$root/scripts/gpu_table.py" "$tests" "$work/tests.xml" "$work/bench.json"
