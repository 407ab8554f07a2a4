#!/usr/bin/env bash
# Measures on a machine with a GPU, from this tree and carried wheels, without a network.
# usage: run.sh --part K --out DIR [--wheels DIR] [--seconds 480]
#
# Writes DIR/partK.json: date, machine, and per section its status, seconds and result or error. Sections are
# processes of their own with a time limit each, by worth: one that fails, hangs or kills its process
# loses itself only, and what it had found is in its entry. If all of this is ended from outside, the rows of
# the section that ran are in DIR/partK-SECTION.rows.json.
# Expected there: Python 3.12, torch 2.11 with CUDA 13, cmake, a C++ compiler; collect_wheels.sh has the rest.
#
# Part 1 builds, measures links and runs the native tests. Part 2 trains and compares to the bit. Part 3 is
# for speed, part 4 for what else there is, part 5 for the optimizer on the host. With REHEARSE=1 parts 2 to 5
# train tiny models on the CPU: the scripts are tried, and what can only be measured on a GPU is left out.
#
# What is built, the wheels' contents and plain runs of the last hour stay in build/gpu-*, which git ignores:
# on the same machine the next part finds them.
#
# For half an hour in commands of ten minutes, all on one machine, each with `--out OUT --wheels wheels`:
#
#     run.sh --part 2 --seconds 560                                   equality, tiers, a cut card
#     run.sh --part 3 --seconds 480                                   speed at 40, 25 and 60 %
#     run.sh --part 1 --seconds 180; run.sh --part 5 --seconds 280    links, tests; the optimizer on the host
#
# That is 25 minutes at most; the rest is for starting the machine, copying, and installing wheels (a quarter
# of a minute, once). For ten minutes: part 2 with 300, then part 3 with 260. Part 4 (400) and the end of
# part 2 (segments, sanitizer) are worth least and wait for another half hour. --seconds is the most that a
# part takes. What its sections need on a GPU is not known yet: each row has its own `case_seconds`.
#
# Rehearsed on two busy cores without a GPU. Parts 2 to 5, REHEARSE=1, with Python 3.11 and torch 2.13 for
# CPU: 490, 215, 180 and 55 s, of which the build takes 90, once. Part 1 there (80 s), and without a network
# (unshare -n) with Python 3.12.1, the carried wheels and no torch: wheels, build, the native engine on a disk
# and the native tests ran, what needs torch failed and said so. Nothing of this has met a GPU: tiers, larger,
# part 2's host_step, sanitizer, links, gds, equal_flash's choice of kernels, offloading_stream and DeepSpeed
# have not run at all, the rest not with Triton. Where teraio is installed in editable mode, that one is
# imported and the section `imports` fails: the rehearsals had an environment without it.
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
ulimit -c 0 # a training that hangs is aborted, to say where; no one wants its memory on the disk

# By what it is made from: sources, Python and torch.
made_from() {
  (cd "$root" && find csrc teraio runtime passes profiles/machines pyproject.toml -type f \
    -not -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum)
  python3 -VV
  python3 -c 'import importlib.metadata as m; print(m.version("torch"))' 2>&1 | tail -1 || true
}
kept=$root/build/gpu-$(made_from | sha256sum | cut -c1-12)
mkdir -p "$kept" "$out"

carried=$scratch/none
if [ -n "$wheels" ]; then
  carried=$root/build/gpu-wheels-$(ls "$wheels" | sha256sum | cut -c1-12)
  if [ ! -d "$carried" ]; then
    python3 -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check \
      --target "$scratch/wheels" "$wheels"/*.whl && mv "$scratch/wheels" "$carried" ||
      echo "the carried wheels did not install" >&2
  fi
fi

# Safe path: `teraio` must be the one that the build section installs, not the folder of that name here.
export PYTHONSAFEPATH=1 PYTHONPATH="$kept/site:$carried:$root/benchmarks/gpu"
export PATH="$carried/bin:$PATH" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
python3 "$root/benchmarks/gpu/sections.py" \
  --part "$part" --out "$out" --scratch "$scratch" --kept "$kept" --seconds "$seconds"
