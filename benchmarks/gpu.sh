#!/usr/bin/env bash
# Everything that needs a GPU, in one call: the tests, then every benchmark, each with its own share of the time.
# Usage, from the repository root: bash benchmarks/gpu.sh [seconds for all of it, default 1800]
# Figures go to ${OUT:-benchmarks/results}; the exit code is the first one that is not 0. A part that runs out of its time is 124.
set -u
export PYTHONPATH="src:tests${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
results=${OUT:-benchmarks/results}
total=${1:-1800}
status=0
device=$("$python" -c "from ottava.bench import report; print(report.default_path('').stem)") || exit 2

# part SHARE NAME COMMAND...: runs the command for at most SHARE per cent of the time.
part() {
  local limit=$((total * $1 / 100)) name=$2 begin=$SECONDS code
  shift 2
  echo "=== $name (at most ${limit} s)"
  timeout --signal=INT --kill-after=20 "$limit" "$@"
  code=$?
  echo "=== $name: exit code $code after $((SECONDS - begin)) s"
  [ $code -ne 0 ] && [ $status -eq 0 ] && status=$code
}

bench() { # SHARE NAME SUFFIX OPTIONS...: the file is NAME-DEVICE-SUFFIX.json
  local share=$1 name=$2 suffix=$3
  shift 3
  part "$share" "bench $name $*" "$python" -m ottava bench "$name" "$@" --output "$results/$name-$device$suffix.json"
}

part 25 "tests/gpu" bash tests/gpu/run.sh
bench 6 kernels ""
bench 5 gemm -8b
bench 3 attention -8b --documents 1000
bench 3 attention -1b --shape 1b --documents 1000
bench 8 layer -1x8192
bench 4 layer -4x2048 --batch 4 --sequence 2048
bench 18 step -1b --shape 1b --profile
bench 2 overlap -8b-2 --shape 8b --ranks 2
bench 16 step -8b-8 --shape 8b-8 --profile
lean="precision.recipe=DelayedScaling,precision.fp8_head=true,optimizer.name=fused_adam,optimizer.moments=bfloat16,precision.gradients=bfloat16"
bench 8 step -8b --shape 8b --contenders none --visits 1 --steps 5 --gate tokens_per_s=14500 --gate allocated_gib=125 \
  --ours "lean:$lean" --ours "fp8 storage:$lean,precision.fp8_weights=true,precision.weights=bfloat16"
part 2 "loop overhead" "$python" benchmarks/loop_overhead.py --config examples/train_160m.toml --json "$results/loop-overhead-$device.json"
exit $status
