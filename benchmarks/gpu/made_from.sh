# Prints what a wheel of this tree is made from; sourced by run.sh and collect_wheels.sh, with the root as $1.
(cd "$1" && find csrc teraio runtime passes profiles pyproject.toml -type f -not -name '*.pyc' \
  -not -name '*.so' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)
