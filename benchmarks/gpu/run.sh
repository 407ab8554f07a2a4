#!/usr/bin/env bash
# Measures on a machine with a GPU, from this tree and carried wheels, without a network.
# usage: run.sh --part K --out DIR [--wheels DIR] [--seconds 480]
#
# Writes DIR/partK.json: date, machine, and per section its status, seconds and result or error. Sections are
# processes of their own with a time limit each: one that fails, hangs or kills its process loses itself only.
# Expected there: Python 3.12, torch 2.11 with CUDA 13, cmake, a C++ compiler; collect_wheels.sh has the rest.
#
# Part 1 builds, measures links and runs the native tests. Part 2 trains and compares to the bit. Part 3 is
# for speed, part 4 for what else there is, part 5 for the optimizer on the host. With REHEARSE=1 parts 2 to 5
# train tiny models on the CPU: the scripts are tried, and what can only be measured on a GPU is left out.
#
# Rehearsed without a network (unshare -n) on a machine without a GPU, part 1: Python 3.12.1 with the carried
# wheels and no torch, and Python 3.11 with torch 2.13 for CPU. Wheels, build, ortools, the native engine on a
# disk and the native tests ran; what needs a GPU said that there is none: 75 s on two cores. Where teraio
# is installed in editable mode, that one is imported and the section `imports` fails.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
part="" out="" wheels="" seconds=480
while [ $# -gt 0 ]; do
  case $1 in
    --part) part=$2 ;;
    --out) out=$2 ;;
    --wheels) wheels=$2 ;;
    --seconds) seconds=$2 ;;
    *) echo "unknown option $1; options are --part, --out, --wheels, --seconds" >&2; exit 2 ;;
  esac
  shift 2
done
if [ -z "$part" ] || [ -z "$out" ]; then
  echo "usage: run.sh --part K --out DIR [--wheels DIR] [--seconds 480]" >&2
  exit 2
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ -n "$wheels" ]; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check \
    --target "$scratch/carried" "$wheels"/*.whl || echo "the carried wheels did not install" >&2
fi

mkdir -p "$out"
# Safe path: `teraio` must be the one that the build section installs, not the folder of that name here.
export PYTHONSAFEPATH=1 PYTHONPATH="$scratch/site:$scratch/carried:$root/benchmarks/gpu"
export PATH="$scratch/carried/bin:$PATH" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONUNBUFFERED=1
python3 "$root/benchmarks/gpu/sections.py" \
  --part "$part" --out "$out" --scratch "$scratch" --seconds "$seconds"
