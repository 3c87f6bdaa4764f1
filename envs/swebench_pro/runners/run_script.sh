#!/bin/bash
# Runs the test files that are named, with commas between them; all of them where none is.
set -eu

IFS=',' read -r -a TEST_FILES <<<"${1:-}"

COMMAND "${TEST_FILES[@]}" || true
