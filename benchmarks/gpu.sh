#!/bin/bash
# Everything there is to see on a GPU, in at most nine minutes: the tests, then the measurements of benchmarks/gpu.py, the most telling first.
# Every part has its own time limit, so that one that hangs does not eat the others'. Results: benchmarks/gpu.json, a table on stdout, and the trace of
# ten decode steps in benchmarks/gpu_profile.json.gz; all three are copied to $OUT if that is set.
# usage: benchmarks/gpu.sh [--more | --peers] [--smoke]
#        --more: the second set, in a call of its own; adds to the results of the first
#        --peers: beside vLLM (VLLM: its command), a kind of model or of load after another; a call goes on where the last one stopped
#        --smoke: on the CPU, a tiny model, small numbers; shows that everything runs, measures nothing
# env: PAIRS (model:case,case ...; what --peers compares), PYTHON (python3), RESULTS (benchmarks/gpu.json), SKIP_TESTS (set: no tests), MODELS (of benchmarks/gpu_models.py), LIMIT (530: seconds for everything)
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}; results=${RESULTS:-benchmarks/gpu.json}; device=cuda; failed=0; total=${LIMIT:-530}
models=${MODELS:-"Llama-3.1-8B Qwen3-0.6B Qwen3-30B-A3B"}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
pytest=(-m pytest -q -m gpu --timeout 100 --continue-on-collection-errors -p no:cacheprovider tests/worker); parallel=()
if "$python" -c 'import xdist' 2> /dev/null; then parallel=(-n 6 --dist worksteal); fi
patience=1  # times the limits: a smoke test shows that everything ends, on a busy machine, too
set=first; case ${1:-} in --more | --peers) set=${1#--}; shift;; esac
# the most telling first; vLLM takes about two minutes to be ready, so that a call of 530 s holds two or three
pairs=${PAIRS:-"Qwen3-30B-A3B:one,streams Llama-3.1-8B-FP8:one,streams Llama-3.1-8B-AWQ:one,streams Qwen3-Next-12-layers:one,streams
  Llama-3.1-8B:schema,adapters Llama-3.1-8B:drafts Llama-3.1-8B:one,mixed Qwen3-0.6B:one,mixed"}
if [ "${1:-}" = --smoke ]; then patience=5; total=$((total * patience)); device=cpu; pairs=${PAIRS:-"tiny:one,streams,schema tiny:drafts tiny:adapters"}; models=tiny; pytest+=(--collect-only); parallel=(); fi
largest=${models%% *}; others=${models#"$largest"}
[ "$set" != first ] || rm -f "$results"

part() {  # part NAME SECONDS COMMAND...: run it within SECONDS, note how it ended, and end what it left behind
  local name=$1 limit=$2 start=$SECONDS left=$((total - SECONDS)); status=1; shift 2
  limit=$((limit * patience))
  [ "$left" -ge "$limit" ] || limit=$left
  if [ "$limit" -lt 10 ]; then printf '\n== %s: no time is left\n' "$name"; failed=1; return; fi
  printf '\n== %s (at most %s s)\n' "$name" "$limit"
  export GPU_BENCHMARK_PART="$$-$SECONDS-$name"
  timeout --kill-after 10 "$limit" "$@"; status=$?
  [ $status -eq 0 ] || failed=1
  "$python" benchmarks/gpu.py --results "$results" note "$name" $status $((SECONDS - start))
}
measure() { part "$1 $2" "$3" "$python" benchmarks/gpu.py --device "$device" --results "$results" "$1" "$2"; }
compare() {  # compare SERVER MODEL:CASE,CASE SECONDS: unless an earlier call did
  local server=$1 model=${2%%:*} cases=${2#*:} smoke=()
  [ "$device" = cuda ] || smoke=(--smoke)
  grep -qsxF "$server $2" "$lines.done" && return
  part "$server $2" "$3" "$python" -m benchmarks.gpu_peers --results "$lines" "${smoke[@]}" run "$server" "$model" ${cases//,/ }
  [ $status -ne 0 ] || echo "$server $2" >> "$lines.done"
}

if [ "$set" = peers ]; then
  lines=${results%.json}_peers.jsonl; peers="quire vllm"
  ${VLLM:-vllm} --version > /dev/null 2>&1 || { echo "vLLM does not run here (VLLM: its command): quire alone"; peers=quire; }
  for pair in $pairs; do for server in $peers; do
    if [ "$server" = quire ]; then compare quire "$pair" 90; else compare vllm "$pair" 220; fi
  done; done
  printf '\n'; "$python" -m benchmarks.gpu_peers --results "$lines" table
  [ -z "${OUT:-}" ] || cp "$lines" "$OUT"/
  exit $failed
elif [ "$set" = first ]; then  # in order of worth; the limits add up to less than $total
  part ceilings 30 "$python" benchmarks/gpu.py --device "$device" --results "$results" ceilings
  [ -n "${SKIP_TESTS:-}" ] || part tests 105 "$python" "${pytest[@]}" "${parallel[@]}" -k "not takes_all_memory"
  measure steps "$largest" 100
  measure http "$largest" 55
  for model in $others; do measure steps "$model" 45; done
  part products 60 "$python" benchmarks/gpu.py --device "$device" --results "$results" products
  measure offline "$largest" 45
  [ -n "${SKIP_TESTS:-}" ] || part "tests that take all memory" 30 "$python" "${pytest[@]/%tests\/worker/tests/worker/cuda/test_gpu.py}" -k takes_all_memory
else
  measure files "$largest" 90
  part attention 45 "$python" benchmarks/gpu.py --device "$device" --results "$results" attention
  for model in $models; do measure mixed "$model" 30; done
  measure drafts "$largest" 45
  for model in $others; do measure offline "$model" 60; measure http "$model" 80; done
fi

printf '\n'; "$python" benchmarks/gpu.py --results "$results" table
[ -z "${OUT:-}" ] || cp "$results" "$(dirname "$results")"/gpu_profile.json.gz "$OUT"/
exit $failed
