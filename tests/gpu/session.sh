#!/usr/bin/env bash
# What a GPU host runs, from the repository's root: session.sh OUT_DIR PHASE...
# PYTHON names an interpreter that has the pinned SGLang, patched (fp4kv patch apply), and pytest with its
# plugins xdist and timeout. MODEL and DRAFT name the folders of the smollm2 phase.
set -uo pipefail
out=$1; shift
py=${PYTHON:-python3}
status=0
phase() { echo "=== $1 ($SECONDS s)"; shift; "$@"; local rc=$?; [ $rc -eq 0 ] || { status=1; echo "phase failed: rc $rc"; }; }
for name in "$@"; do
  case $name in
    kernels) FP4KV_REQUIRE_GPU=1 phase kernels "$py" -m pytest -m "gpu or interpreter" -n 8 --timeout 250 \
      tests/test_store_nvfp4.py tests/test_commit_prefix.py tests/test_decode_nvfp4.py \
      tests/test_extend_nvfp4.py tests/test_pool.py 2>&1 | tee "$out/kernels.log" | tail -40 ;;
    pair) phase pair "$py" -m tests.gpu.serving models/pair/target models/pair/draft \
      models/pair/prompts.json "$out/h200_pair.json" --logs "$out/logs/pair" ;;
    smollm2) phase smollm2 "$py" -m tests.gpu.serving "$MODEL" "$DRAFT" \
      tests/gpu/smollm2_prompts.json "$out/h200_smollm2.json" --oracle --tokens 40 --logs "$out/logs/smollm2" ;;
    demo) phase demo "$py" -m launcher.demo --json "$out/h200_demo.json" --logs "$out/logs/demo" ;;
    bench) phase bench "$py" tests/bench/bench_attention.py --out "$out/h200_attention.json" ;;
    *) echo "unknown phase $name"; status=2 ;;
  esac
done
exit $status
