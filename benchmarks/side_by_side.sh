#!/usr/bin/env bash
# The loads of RESULTS.md against two servers that already run on this machine, in turn: A B A B. Results as JSON files, one per server, load and round.
#
#   benchmarks/side_by_side.sh OUT_DIR URL_A MODEL_A URL_B MODEL_B
set -euo pipefail
out=${1:?usage: side_by_side.sh OUT_DIR URL_A MODEL_A URL_B MODEL_B}
mkdir -p "$out"

load() { # name, then flags of `quire bench serve`
  quire bench serve --base-url "$url" --model "$model" --ignore-eos --seed "$round" --save-result --result-filename "$out/$label-$1-$round.json" "${@:2}" | grep -E 'Output token throughput|Median'
}

for round in 1 2; do
  for label in a b; do
    if [ "$label" = a ]; then url=$2 model=$3; else url=$4 model=$5; fi
    echo "== $label, round $round"
    load c1 --random-input-len 32 --random-output-len 64 --num-prompts 2 --max-concurrency 1 --num-warmups 1
    load c8 --random-input-len 128 --random-output-len 64 --num-prompts 16 --max-concurrency 8
    load c32 --random-input-len 128 --random-output-len 64 --num-prompts 64 --max-concurrency 32
    load p1024 --random-input-len 1024 --random-output-len 2 --num-prompts 4 --max-concurrency 1
    load prefix --dataset-name prefix-repetition --prefix-repetition-prefix-len 900 --prefix-repetition-suffix-len 32 --prefix-repetition-num-prefixes 1 \
      --prefix-repetition-output-len 32 --num-prompts 32 --max-concurrency 32
  done
done
