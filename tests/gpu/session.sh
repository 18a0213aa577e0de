#!/usr/bin/env bash
# What a GPU host runs, from the repository's root: session.sh OUT_DIR PHASE...
# PYTHON names an interpreter that has the pinned SGLang, patched (fp4kv patch apply), and pytest with its
# plugins xdist and timeout. MODEL names the folder of the phases smollm2, checks-smollm2 and throughput, DRAFT
# the draft's of smollm2, SANITIZE_MODES some of sanitize's four modes where one call has no time for all,
# LONG_MINUTES the length of long's traffic (10).
set -uo pipefail
out=$1; shift
py=${PYTHON:-python3}
status=0
phase() { echo "=== $1 ($SECONDS s)"; shift; "$@"; local rc=$?; [ $rc -eq 0 ] || { status=1; echo "phase failed: rc $rc"; }; }
for name in "$@"; do
  case $name in
    kernels) FP4KV_REQUIRE_GPU=1 FP4KV_REQUIRE_FLASHINFER=1 phase kernels "$py" -m pytest -m "gpu or interpreter" -vv --tb=short -n 8 --timeout 250 \
      tests/test_store_nvfp4.py tests/test_commit_prefix.py tests/test_decode_nvfp4.py \
      tests/test_extend_nvfp4.py tests/test_pool.py tests/test_prefill.py tests/test_encode_ptx.py \
      tests/test_fragments.py 2>&1 | tee "$out/kernels.log" | tail -40 ;;
    pair) phase pair "$py" -m tests.gpu.serving models/pair/target models/pair/draft \
      models/pair/prompts.json "$out/h200_pair.json" --logs "$out/logs/pair" ;;
    dflash2) [ -d "$out/dflash2" ] || "$py" -c 'import sys; from pathlib import Path
from tests.e2e.tiny_models import build_dflash2
build_dflash2(Path(sys.argv[1]), Path("models/pair/draft"), window=24)' "$out/dflash2"
      phase dflash2 "$py" -m tests.gpu.serving models/pair/target "$out/dflash2" \
      models/pair/prompts.json "$out/h200_dflash2.json" --logs "$out/logs/dflash2" ;;
    smollm2) phase smollm2 "$py" -m tests.gpu.serving "$MODEL" "$DRAFT" \
      tests/gpu/smollm2_prompts.json "$out/h200_smollm2.json" --oracle --tokens 40 --logs "$out/logs/smollm2" ;;
    drafters) phase drafters "$py" -m tests.gpu.drafters "$out/h200_drafters.json" --logs "$out/logs/drafters" ;;
    pair-tp2) phase pair-tp2 "$py" -m tests.gpu.serving models/pair/target models/pair/draft \
      models/pair/prompts.json "$out/h200x2_pair.json" --tp 2 --logs "$out/logs/pair-tp2" ;;
    cache) FP4KV_REQUIRE_GPU=1 phase cache "$py" -m pytest -m "gpu or interpreter" -vv --tb=short -n 8 --timeout 250 \
      tests/test_paged.py tests/test_sparse_nvfp4.py tests/test_boundary_reads.py tests/test_boundary_writes.py \
      tests/test_independent_decoder.py tests/test_selection.py tests/test_bench_sparse.py tests/test_sanitize.py \
      2>&1 | tee "$out/cache.log" | tail -40
      phase pools "$py" tests/gpu/pool_report.py "$out/h200_pools.json"
      phase sparse "$py" tests/bench/bench_sparse.py --out "$out/h200_sparse.json" ;;
    sampling) FP4KV_REQUIRE_GPU=1 phase sampling "$py" -m pytest --timeout 300 tests/test_verify_sampling.py \
      2>&1 | tee "$out/sampling.log" | tail -20 ;;
    demo) phase demo "$py" -m launcher.demo --json "$out/h200_demo.json" --logs "$out/logs/demo" ;;
    bench) phase bench "$py" tests/bench/run.py --out "$out/h200_bench.json" ;;
    throughput) phase throughput "$py" -m tests.gpu.throughput "$MODEL" "$out/h200_throughput.json" \
      --logs "$out/logs/throughput" ;;
    checks) phase checks "$py" -m tests.gpu.checks models/pair/target "$out/checks" --draft models/pair/draft ;;
    checks-sibling) phase checks-sibling "$py" -m tests.gpu.checks models/sibling/target "$out/checks-sibling" \
      --draft models/sibling/draft --context 131072 --pool 140000 --depths 8000,60000,110000 --skip soak ;;
    checks-smollm2) phase checks-smollm2 "$py" -m tests.gpu.checks "$MODEL" "$out/checks-smollm2" --suite chat \
      --depths 512,1800 --context 2048 --draft NGRAM --floor 1 --chunk 256 ;;
    hybrid) phase hybrid "$py" -m tests.gpu.hybrid "$out/h200_hybrid.json" --logs "$out/logs/hybrid" ;;
    hybrid-moe) phase hybrid-moe "$py" -m tests.gpu.hybrid "$out/h200_hybrid_moe.json" --moe --logs "$out/logs/hybrid-moe" ;;
    hybrid-tp2) phase hybrid-tp2 "$py" -m tests.gpu.hybrid "$out/h200x2_hybrid.json" --two-gpus --logs "$out/logs/hybrid-tp2" ;;
    windows) phase windows "$py" -m tests.gpu.windows "$out/h200_windows.json" --logs "$out/logs/windows" ;;
    weights) phase weights "$py" -m tests.gpu.weights "$out/h200_weights.json" --logs "$out/logs/weights" ;;
    plan) phase plan "$py" -m tests.gpu.plan_servers "$out/h200_plan.json" --logs "$out/logs/plan" ;;
    long) phase long "$py" -m tests.gpu.long_run models/pair/target models/pair/draft "$out/h200_long.json" \
      --minutes "${LONG_MINUTES:-10}" --logs "$out/logs/long" ;;
    hicache) FP4KV_REQUIRE_GPU=1 phase hicache "$py" -m pytest -m interpreter tests/test_host_pool.py --timeout 250 \
      tests/test_host_tree.py 2>&1 | tee "$out/hicache.log" | tail -40
      phase host-cache "$py" -m tests.gpu.host_cache models/pair/target models/pair/draft "$out/h200_host_cache.json" \
        --logs "$out/logs/host-cache" ;;
    sanitize) phase sanitize tests/gpu/sanitize.sh "$out/logs/sanitize" ${SANITIZE_MODES:-} ;;
    *) echo "unknown phase $name"; status=2 ;;
  esac
done
exit $status
