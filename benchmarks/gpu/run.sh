#!/usr/bin/env bash
# Tests teraio on a GPU that is available for a quarter of an hour: this tree, carried wheels, no network.
# usage: run.sh first|second OUT WHEELS [SECONDS]        (by default 560 and 150 seconds, all included)
#
# On a machine with a network, for Python 3.12 and the torch of the GPU's machine (one to five minutes):
#
#     benchmarks/gpu/collect_wheels.sh --python PYTHON wheels
#
# On the machine with the GPU, in the root of this tree, with the folder `wheels` (git ignores it), run two
# commands, the second immediately after the first:
#
#     bash benchmarks/gpu/run.sh first "$OUT" wheels 560
#     bash benchmarks/gpu/run.sh second "$OUT" wheels 150
#
# Rows are written as they come: OUT/first.jsonl has a JSON object per line. OUT/first.log has the end of each
# failed job's log. Read the lines on stdout first. If the smoke test fails, the command ends immediately
# (exit code 3), and most of the quarter of an hour is left for a second try. The first command leaves its
# state for the second in build/, which git ignores. An outer time limit for a command should be 20 seconds
# longer than its SECONDS.
#
# The machine is expected to have Python 3.12, torch 2.11 with CUDA 13 and its dependencies, numpy, 16 cores
# and a card of 80 GB.
#
# With REHEARSE=1, the same scripts train tiny models. STAND_IN then names the module that gives torch a
# stand-in for a GPU. On the stand-in, Triton's kernels do nothing and cuDNN is missing. Rows of a rehearsal
# are therefore marked, and compare no numbers.
#
# Rehearsed without a network, on the stand-in, on two cores: the first command took 535 s, and ten of its
# jobs found no time. With 900 s allowed it took 695 s, and all jobs ran. The second command took 82 and 93 s.
# In a rehearsal a budget is a few MiB, so teraio refuses some budgets, and these jobs run again with 128 MiB
# more. Jobs that need cuDNN have not run anywhere. No job has run on a GPU.
set -euo pipefail

begun=$SECONDS
root=$(cd "$(dirname "$0")/../.." && pwd)
command=${1:-} out=${2:-} wheels=${3:-}
case $command in
  first) seconds=${4:-560} ;;
  second) seconds=${4:-150} ;;
  *) echo "usage: run.sh first|second OUT WHEELS [SECONDS]" >&2; exit 2 ;;
esac
if [ -z "$out" ] || ! ls "$wheels"/teraio-*.whl >/dev/null 2>&1; then
  echo "usage: run.sh first|second OUT WHEELS [SECONDS]; collect_wheels.sh makes WHEELS" >&2
  exit 2
fi
ulimit -c 0 # a hanging job is aborted to print its stack; its core dump is useless
ulimit -n "$(ulimit -Hn)" 2>/dev/null || true

mkdir -p "$out" "$root/build"
out=$(cd "$out" && pwd) wheels=$(cd "$wheels" && pwd)
kept=$root/build/gpu-$(cat "$wheels"/*.whl | sha256sum | cut -c1-12)
if [ ! -d "$kept/site" ]; then
  partial=$(mktemp -d "$root/build/gpu-XXXXXX")
  for wheel in "$wheels"/*.whl; do
    python3 -m zipfile -e "$wheel" "$partial" || echo "$wheel: did not unpack" >&2
  done
  mkdir -p "$kept" && mv "$partial" "$kept/site"
fi

# The carried wheels include the binaries compiled for this torch: this machine may have no compiler.
export XDG_CACHE_HOME=$kept/cache
mkdir -p -m 700 "$kept/cache/teraio/built"
for built in "$wheels/built"/*.so; do
  [ ! -e "$built" ] || install -m 600 "$built" "$kept/cache/teraio/built/"
done
# shellcheck disable=SC1091
made_from=$(. "$root/benchmarks/gpu/made_from.sh" "$root")
stale=()
if [ "$made_from" != "$(cat "$wheels/made-from" 2>/dev/null)" ]; then
  echo "THE WHEEL WAS NOT BUILT FROM THIS TREE: the results are the wheel's" >&2
  stale=(--stale)
fi

# Safe path: `teraio` must be the wheel's package, not the folder of that name in this tree.
export PYTHONSAFEPATH=1 PYTHONPATH="$kept/site:$root/benchmarks/gpu${PYTHONPATH:+:$PYTHONPATH}"
export TORCHINDUCTOR_CACHE_DIR=$kept/inductor PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=
left=$((seconds - (SECONDS - begun) - 6))
echo "ready after $((SECONDS - begun)) s; $left s are left"
exec timeout --kill-after=5 $((left + 4)) python3 "$root/benchmarks/gpu/fourteen.py" \
  "$command" --out "$out" --kept "$kept" --seconds "$left" "${stale[@]}"
