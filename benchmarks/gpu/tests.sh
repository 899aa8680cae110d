#!/usr/bin/env bash
# Runs the tests that need a CUDA card, on a machine with torch, triton and pytest alone. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."
mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests/lm | sort)
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
exec "${PYTHON:-python3}" -m pytest -c benchmarks/gpu/pytest.ini --rootdir=. -m gpu -s --durations=10 "${files[@]}" "$@"
