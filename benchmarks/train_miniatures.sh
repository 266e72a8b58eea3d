#!/usr/bin/env bash
# Trains miniatures, all at once, spread over the GPUs there are; 16 log-spaced checkpoints each:
#   bash benchmarks/train_miniatures.sh [CORPUS] [OUT] [TOKENS] [ARCHITECTURE ...]      default: the six of LOG.md
set -uo pipefail
corpus=${1:-corpus} out=${2:-runs} tokens=${3:-130M} python=${PYTHON:-python3}
architectures=("${@:4}")
[ ${#architectures[@]} -gt 0 ] || architectures=(gdn swa-32 full swa-128 swa-512 swa-32-nope)
gpus=$(nvidia-smi --list-gpus | wc -l)
index=0
for architecture in "${architectures[@]}"; do
  mkdir -p "$out"
  CUDA_VISIBLE_DEVICES=$((index % gpus)) "$python" -m models.pretrain --preset "mini/$architecture" \
    --corpus "$corpus" --tokens "$tokens" --out "$out/$architecture" >"$out/$architecture.txt" 2>&1 &
  index=$((index + 1))
done
wait  # each run ends by itself; the last checkpoint is the result
for architecture in "${architectures[@]}"; do
  echo "$architecture $(tail -n 1 "$out/$architecture/log.jsonl")"
done
