#!/bin/bash
# Runs the test files that are named, with commas between them; all of them where none is.
set -eu

IFS=',' read -r -a TEST_FILES <<<"${1:-}"

python3 -m unittest -v "${TEST_FILES[@]}" || true
