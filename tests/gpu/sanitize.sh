#!/usr/bin/env bash
# The memory checkers over the writers, the readers and the cache on small shapes: sanitize.sh OUT_DIR [MODE...]
# Modes: memcheck racecheck initcheck synccheck, all four where none is given. From the repository's root.
# PYTHON names the interpreter, COMPUTE_SANITIZER the tool. OUT_DIR keeps sanitize_<mode>.log of each, the
# planted faults' logs beside them, and sanitize.log, the verdicts.
# Exit codes: 0 no errors; 1 errors, or the kernels failed; 2 usage; 4 the tool cannot run on this machine;
# 5 the mode missed a planted fault, so that its silence means nothing.
set -uo pipefail
declare -A faults=([memcheck]=bounds [racecheck]=race [initcheck]=uninitialized [synccheck]=barrier)
usage() { echo "usage: $0 OUT_DIR [memcheck|racecheck|initcheck|synccheck]..." >&2; exit 2; }
[ $# -ge 1 ] || usage
out=$1; shift
modes=("$@")
[ $# -gt 0 ] || modes=(memcheck racecheck initcheck synccheck)
for name in "${modes[@]}"; do [ -n "${faults[$name]:-}" ] || usage; done
mkdir -p "$out" || exit 2
py=${PYTHON:-python3}
driver=$(dirname "$0")/sanitize_kernels.py
tool=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
seconds=200 # of one run
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
: >"$out/sanitize.log"
say() { echo "$*" | tee -a "$out/sanitize.log"; }
finish() { say "$2"; exit "$1"; }
under() { timeout "$seconds" "$tool" --tool "$1" --log-file "$2" --error-exitcode 9 "$py" "$driver" "${@:3}"; }
# Why the tool itself gave up, from its own lines.
refusal() { grep -im 1 '^=========.*\(not supported\|permission\|unable to find\|failed to initialize\)' "$1"; }

"$tool" --version >"$out/sanitize_version.log" 2>&1 || finish 4 "not run: no compute-sanitizer at $tool"
say "$(grep -i version "$out/sanitize_version.log" | tail -1)"
# Without the tool first: right results, and Triton's cache is full.
timeout "$seconds" "$py" "$driver" >"$out/sanitize_plain.log" 2>&1 ||
  finish 1 "the kernels failed without a sanitizer: $(tail -1 "$out/sanitize_plain.log")"
status=0
for name in "${modes[@]}"; do
  clean="ERROR SUMMARY: 0 errors"
  if [ $name = racecheck ]; then clean="RACECHECK SUMMARY: .*(0 errors"; fi
  planted=$out/sanitize_${name}_planted.log log=$out/sanitize_$name.log
  under $name "$planted" --plant "${faults[$name]}" >"$planted.out" 2>&1
  cat "$planted.out" >>"$planted"
  if why=$(refusal "$planted"); then finish 4 "not run: $name: $why"; fi
  if ! grep -q "SUMMARY" "$planted" || grep -q "$clean" "$planted"; then finish 5 "$name did not report a planted fault: $planted"; fi
  under $name "$log" >"$log.out" 2>&1
  rc=$?
  cat "$log.out" >>"$log"
  rm -f "$planted.out" "$log.out"
  verdict=$(grep "SUMMARY" "$log" | tail -1)
  if [ $rc -eq 0 ] && grep -q "$clean" "$log" && [ "$(grep -c "are right" "$log")" -eq 3 ]; then
    say "$name: no errors ($verdict)"
  else
    say "$name: FAILED, status $rc ($verdict): $log"
    status=1
  fi
done
exit $status
