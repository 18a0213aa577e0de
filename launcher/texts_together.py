"""Texts of the refusals about parts that were each tried, but not with one another."""

from launcher.texts import Text

_SERVER = "sglang_fp4kv/resolution.py, which refuses it in the server too"

TEXTS = {
    "FP4-100": Text(
        name="other-drafter-on-recurrent-layers",
        says="{drafter} is asked for on {path}, whose recurrent states were tried with DFLASH alone",
        why="another drafter takes the states back by another path, down one branch where it drafts a tree, and a module inside such a checkpoint (Qwen3.5's MTP) asks for a pool whose kind and price were tried beside full attention only. It would take the trial that DFLASH has had: equal answers at every number of accepted tokens, states kept for the prefix cache, bytes as planned",
        evidence=f"commit_mamba_states_after_verify in srt/speculative/spec_utils.py @ sglang 0.5.23; tests/e2e/test_hybrid_serving.py; {_SERVER}",
        help="--speculative-algorithm DFLASH",
    ),
    "FP4-101": Text(
        name="other-drafter-on-windows",
        says="{drafter} is asked for on {path}, whose windowed layers were tried with DFLASH alone",
        why="the readers count a window from a token's row in the drafted block; in a tree that is not its position, so a branch would see fewer tokens than plain decode does, and chains of this drafter have not been run with windows. It would take the tokens' positions in every kernel that reads a block",
        evidence=f"sglang_fp4kv/kernels/decode_nvfp4.py; tests/e2e/test_windows.py; {_SERVER}",
        help="leave out --speculative-algorithm",
    ),
    "FP4-102": Text(
        name="parts-tried-one-at-a-time",
        says="what is asked for was tried one part at a time, and not {pairs}",
        why="the runs on file have one of several ranks, the hierarchical cache, recurrent or windowed layers, a DFlash2 or windowed draft, a draft window, and another drafter than DFLASH, or recurrent layers with a DFlash2 or windowed draft, on one rank and on several, where they have run without it too; what two others of them do to each other has no result on file. It would take a run of the pair whose answers are compared with those without it",
        evidence="tests/e2e/test_nvfp4_parallel.py, tests/e2e/test_hierarchical_cache.py, tests/e2e/test_hybrid_serving.py, tests/e2e/test_hybrid_moe.py, tests/e2e/test_windows.py, tests/e2e/test_draft_serving.py, tests/e2e/test_drafters.py and tests/e2e/test_two_sparks.py",
        help="leave one of them out, or --allow FP4-102",
    ),
    "FP4-103": Text(
        name="shown-on-a-cpu-alone",
        says="NVFP4 KV is asked for with {parts}, and no result of a GPU is on file",
        why="the real server has answered with them on a CPU, equal with and without the drafter; CUDA graphs, the kernels that a GPU takes in their place, and speed are not shown by that",
        evidence="{tests}",
        help="--allow FP4-103, or --kv-cache-dtype fp8_e4m3",
    ),
    "FP4-115": Text(
        name="class-of-recurrent-layers-untested",
        says="{path} has gated-delta layers of model type {type}, and no result of a run of that class is on file",
        why="the servers that were tested have the classes of Qwen3.5, dense and with experts; another class splits, projects and loads such layers by code of its own. It would take the trial those had: equal answers at every number of accepted tokens, states kept for the prefix cache, bytes as planned",
        evidence="srt/models/qwen3_next.py @ sglang 0.5.23; tests/e2e/test_hybrid_serving.py and tests/e2e/test_hybrid_moe.py, of Qwen3.5",
        help="--allow FP4-115, or --kv-cache-dtype fp8_e4m3",
    ),
    "FP4-118": Text(
        name="class-of-windowed-layers-untested",
        says="{path} has windowed layers in the one KV pool, and no result of a run of that class is on file",
        why="the server that was tested has the text-only class of Gemma 3; another class may count its windows, cap its scores, mask images or share K and V between layers by code of its own. It would take the trial that Gemma 3 had: answers many windows deep, near BF16 KV's, and the same in CUDA graphs and eager",
        evidence="tests/e2e/test_windows.py; tests/bench/results/h200_windows.json",
        help="--allow FP4-118, or --kv-cache-dtype fp8_e4m3",
    ),
}
