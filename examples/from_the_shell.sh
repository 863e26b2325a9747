#!/usr/bin/env bash
# From a recipe to a page to look at, and from a sweep to one table, without a line of Python.
#
# Usage: examples/from_the_shell.sh [DIR]     (DIR is runs/shell; some two minutes on two cores)
set -euo pipefail
out=${1:-runs/shell}
here=$(dirname "$0")

# 1. Train three seeds, and see how the run stands.
mechicl train he2025-two-head-quick --steps 2000 --seeds 3 --out "$out/two-heads"
mechicl info "$out/two-heads"

# 2. Did signs match, and since when? A table here; results and figures under the run.
mechicl analyze "$out/two-heads" --probe sign_matching --probe head_roles

# 3. The same as data for another program: one JSON document.
mechicl analyze "$out/two-heads" --probe sign_matching --no-plot --json |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["probes"]["sign_matching"]["variables"]["since"])'

# 4. One page with everything, circuits over training on a slider; open it in a browser.
mechicl report "$out/two-heads" --probe circuits --probe head_roles

# 5. A sweep: four runs with an index, restartable; then one probe over all of them.
mechicl sweep "$here/heads.yaml" --out "$out/heads"
mechicl study "$out/heads/*" --probe head_roles --probe circuits --out "$out/heads.zarr"
mechicl report "$out/heads.zarr"
