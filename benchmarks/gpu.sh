#!/bin/bash
# Everything there is to see on a GPU, in at most nine minutes: the tests, then the measurements of benchmarks/gpu.py, the most telling first.
# Every part has its own time limit, so that one that hangs does not eat the others'. Results: benchmarks/gpu.json, a table on stdout, and the trace of
# ten decode steps in benchmarks/gpu_profile.json.gz; all three are copied to $OUT if that is set.
# usage: benchmarks/gpu.sh [--smoke]      --smoke: on the CPU, a tiny model, small numbers; shows that everything runs, measures nothing
# env: PYTHON (python3), RESULTS (benchmarks/gpu.json), SKIP_TESTS (set: no tests), MODELS (of benchmarks/gpu_models.py), LIMIT (530: seconds for everything)
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}; results=${RESULTS:-benchmarks/gpu.json}; device=cuda; failed=0; total=${LIMIT:-530}
models=${MODELS:-"Llama-3.1-8B Qwen3-0.6B Qwen3-30B-A3B"}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
pytest=(-m pytest -q -m gpu --timeout 100 -p no:cacheprovider tests/worker); parallel=()
if "$python" -c 'import xdist' 2> /dev/null; then parallel=(-n 6 --dist worksteal); fi
if [ "${1:-}" = --smoke ]; then device=cpu; models=tiny; pytest+=(--collect-only); parallel=(); fi
largest=${models%% *}
rm -f "$results"

part() {  # part NAME SECONDS COMMAND...: run it within SECONDS and note how it ended; its leftovers end with it
  local name=$1 limit=$2 start=$SECONDS left=$((total - SECONDS)) status; shift 2
  [ "$left" -ge "$limit" ] || limit=$left
  if [ "$limit" -lt 10 ]; then printf '\n== %s: no time is left\n' "$name"; failed=1; return; fi
  printf '\n== %s (at most %s s)\n' "$name" "$limit"
  timeout --kill-after 10 "$limit" "$@"; status=$?
  [ $status -eq 0 ] || failed=1
  "$python" benchmarks/gpu.py --results "$results" note "$name" $status $((SECONDS - start))
}
measure() { part "$1 $2" "$3" "$python" benchmarks/gpu.py --device "$device" --results "$results" "$1" "$2"; }

part ceilings 40 "$python" benchmarks/gpu.py --device "$device" --results "$results" ceilings
if [ -z "${SKIP_TESTS:-}" ]; then
  part tests 130 "$python" "${pytest[@]}" "${parallel[@]}" -k "not takes_all_memory"
  part "tests that take all memory" 30 "$python" "${pytest[@]/%tests\/worker/tests/worker/test_gpu.py}" -k takes_all_memory
fi
measure steps "$largest" 110
measure http "$largest" 70
for model in $models; do [ "$model" = "$largest" ] || measure steps "$model" 40; done
measure offline "$largest" 60
for model in $models; do [ "$model" = "$largest" ] || { measure offline "$model" 30; measure http "$model" 40; }; done
part products 70 "$python" benchmarks/gpu.py --device "$device" --results "$results" products
measure files "$largest" 75

printf '\n'; "$python" benchmarks/gpu.py --results "$results" table
[ -z "${OUT:-}" ] || cp "$results" "$(dirname "$results")"/gpu_profile.json.gz "$OUT"/
exit $failed
