#!/usr/bin/env bash
# Everything that needs a GPU, in eight minutes: run from a checkout, with the package and what peers there are installed.
# Writes benchmarks/results/*.json after every point; what a limit cut off goes on when the script is run again.
#
#   benchmarks/gpu.sh [python]
set -u
cd "$(dirname "$0")/.."
python=${1:-python}
deadline=$((SECONDS + 475))

step() { # step MINUTES COMMAND [OPTIONS]: the last points may overrun the minutes, never the deadline
    local minutes=$1 left=$((deadline - SECONDS))
    shift
    [ "$left" -gt 5 ] || return 0
    timeout "$left" "$python" -m benchmarks "$@" --device cuda --size full --minutes "$minutes" || echo "$1: stopped"
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
step 1.8 check
step 0.8 table1 --repeats 5 --budget 3
step 2.5 modern --repeats 5 --budget 1
step 0.8 fit
step 1.0 fig2 --repeats 5 --budget 2
step 0.5 clipped --repeats 5 --budget 1
