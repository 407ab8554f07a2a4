# Prints the digest of the files that a wheel of this tree is built from. run.sh and collect_wheels.sh source
# this file, with the root of the tree as $1.
(cd "$1" && find csrc teraio runtime passes profiles pyproject.toml -type f -not -name '*.pyc' \
  -not -name '*.so' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)
