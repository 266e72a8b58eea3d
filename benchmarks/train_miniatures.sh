#!/usr/bin/env bash
# Trains the six miniatures, all at once, spread over the GPUs there are: bash benchmarks/train_miniatures.sh [CORPUS] [OUT] [TOKENS]
set -uo pipefail
corpus=${1:-corpus} out=${2:-runs} tokens=${3:-130M} python=${PYTHON:-python3}
gpus=$(nvidia-smi --list-gpus | wc -l)
index=0
for architecture in gdn swa-32 full swa-128 swa-512 swa-32-nope; do
  mkdir -p "$out"
  CUDA_VISIBLE_DEVICES=$((index % gpus)) "$python" -m models.pretrain --preset "mini/$architecture" \
    --corpus "$corpus" --tokens "$tokens" --out "$out/$architecture" >"$out/$architecture.txt" 2>&1 &
  index=$((index + 1))
done
wait  # each run ends by itself; the last checkpoint is the result
for run in "$out"/*/; do
  echo "$(basename "$run") $(tail -n 1 "$run/log.jsonl")"
done
