#!/usr/bin/env bash
# Runs tests/gpu in several processes at once: Triton compiles each kernel variant for about a second, on one core.
# Usage, from the repository root on a machine with a GPU: bash tests/gpu/run.sh [pytest arguments]
set -u
export PYTHONPATH="src:tests${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
logs=$(mktemp -d)
mapfile -t tests < <("$python" -m pytest tests/gpu --collect-only -q -p no:cacheprovider -o addopts= "$@" 2>/dev/null | grep "^tests/.*::")
echo "${#tests[@]} tests"
workers=${WORKERS:-8}
for ((w = 0; w < workers; w++)); do
  chosen=()
  for ((i = w; i < ${#tests[@]}; i += workers)); do chosen+=("${tests[i]}"); done
  [ ${#chosen[@]} -eq 0 ] && continue
  "$python" -m pytest -q -p no:cacheprovider -o addopts= --tb=short "${chosen[@]}" >"$logs/$w" 2>&1 &
done
# A limit of time shows what there is by then: each process's last line, dots if it is not done.
report() {
  local status=0
  for log in "$logs"/*; do
    grep -hE "^(FAILED|ERROR|E  )" "$log" | head -40
    tail -n 1 "$log"
    grep -qE "[0-9]+ (passed|skipped)" "$log" || status=1
    grep -qE "[0-9]+ (failed|error)" "$log" && status=1
  done
  return $status
}
trap 'report; kill $(jobs -p); exit 124' TERM INT
wait
report
