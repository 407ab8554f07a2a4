#!/usr/bin/env bash
# Proves teraio on a GPU that is there for a quarter of an hour: from this tree, carried wheels, no network.
# usage: run.sh first|second OUT WHEELS [SECONDS]        (by default 560 and 150 seconds, all included)
#
# On a machine with a network, for Python 3.12 and the torch of the GPU's machine (a minute, or five):
#
#     benchmarks/gpu/collect_wheels.sh --python PYTHON wheels
#
# On the machine with the GPU, in the root of this tree, with the folder `wheels` (it is ignored by git), two
# commands, the second at once after the first:
#
#     bash benchmarks/gpu/run.sh first "$OUT" wheels 560
#     bash benchmarks/gpu/run.sh second "$OUT" wheels 150
#
# Rows are written as they come: OUT/first.jsonl, a JSON object per line; OUT/first.log has the ends of what
# jobs said. What to read first are the lines on stdout. If the smoke test fails, all ends at once (exit code
# 3): most of the quarter of an hour is left for a second try. What the first command leaves for the second is
# in build/, which git ignores. A cap on the commands from outside should be 20 seconds above theirs.
#
# Expected there: Python 3.12, torch 2.11 with CUDA 13 and what it depends on, numpy; 16 cores, 80 GB of card.
#
# With REHEARSE=1, and STAND_IN as the module that makes torch take a stand-in for a GPU, the same scripts
# train tiny models. Triton's kernels do nothing there and cuDNN is missing: rows say so, and compare nothing.
#
# Rehearsed so without a network, on the stand-in, on two cores: the first command in 535 s, where ten of its
# jobs found no time, and with 900 s allowed in 695 s, where all ran; the second in 82 and 93 s. A budget
# there is a few MiB, so some are refused and tried with 128 MiB more. cuDNN's jobs ran nowhere; none has met
# a GPU.
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
ulimit -c 0 # a job that hangs is aborted, to say where; no one wants its memory on the disk
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

# What is compiled for this torch is carried, too: there may be no compiler here.
export XDG_CACHE_HOME=$kept/cache
mkdir -p -m 700 "$kept/cache/teraio/built"
for built in "$wheels/built"/*.so; do
  [ ! -e "$built" ] || install -m 600 "$built" "$kept/cache/teraio/built/"
done
# shellcheck disable=SC1091
made_from=$(. "$root/benchmarks/gpu/made_from.sh" "$root")
stale=()
if [ "$made_from" != "$(cat "$wheels/made-from" 2>/dev/null)" ]; then
  echo "THE WHEEL WAS NOT MADE FROM THIS TREE: what is measured is the wheel's" >&2
  stale=(--stale)
fi

# Safe path: `teraio` must be the wheel's, not the folder of that name here.
export PYTHONSAFEPATH=1 PYTHONPATH="$kept/site:$root/benchmarks/gpu${PYTHONPATH:+:$PYTHONPATH}"
export TORCHINDUCTOR_CACHE_DIR=$kept/inductor PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=
left=$((seconds - (SECONDS - begun) - 6))
echo "ready after $((SECONDS - begun)) s; $left s are left"
exec timeout --kill-after=5 $((left + 4)) python3 "$root/benchmarks/gpu/fourteen.py" \
  "$command" --out "$out" --kept "$kept" --seconds "$left" "${stale[@]}"
