"""Texts of the refusals about the patch series and the installed release: FP4-001 to 009, and 016."""

from launcher.texts import Text

TEXTS = {
    "FP4-001": Text(
        name="sglang-not-found",
        says="no sglang package in {where}",
        why="the series changes files of SGLang, and {looked_for} holds none of them",
        evidence="patches/UPSTREAM",
        help="pip install sglang=={release}, or --target DIR (a git checkout, or a folder holding sglang/)",
    ),
    "FP4-002": Text(
        name="other-sglang-release",
        says="SGLang {found} is not the release the series was made for",
        why="the series changes exact lines of {release}; nothing is applied with fuzz",
        evidence="patches/UPSTREAM, against {found_in}",
        help="pip install --force-reinstall --no-deps sglang=={release}",
    ),
    "FP4-003": Text(
        name="foreign-files",
        says="{count} touched file(s) are neither as released nor as patched",
        why="a hash that is not on record means someone else's edit, which applying or reverting would lose or mix with",
        evidence="patches/UPSTREAM against {files}",
        help="{restore}",
    ),
    "FP4-004": Text(
        name="half-applied-series",
        says="{applied} of {total} touched files are patched and the rest are as released",
        why="the series is applied whole or not at all, so this is what an interrupted run left",
        evidence="patches/UPSTREAM against {files}",
        help="fp4kv patch revert{target_flag}",
    ),
    "FP4-005": Text(
        name="altered-patch-series",
        says="{patch} does not agree with the record",
        why="{mechanism}",
        evidence="patches/UPSTREAM, line `patch:` or `file:`",
        help="git checkout -- patches, or fp4kv patch refresh --target DIR where the change is meant",
    ),
    "FP4-006": Text(
        name="incomplete-patch-series",
        says="{problem}",
        why="without the whole series the recorded hashes cannot be reached",
        evidence="{place}",
        help="git checkout -- patches, or reinstall sglang-fp4kv",
    ),
    "FP4-007": Text(
        name="target-not-writable",
        says="{path} cannot be replaced ({error})",
        why="each file is replaced by a finished copy beside it, which needs write access to its folder; {aftermath}",
        evidence="the operating system's answer",
        help="run as the owner of {folder}, or use a virtual environment of your own",
    ),
    "FP4-008": Text(
        name="wheel-not-usable",
        says="{problem}",
        why="{mechanism}",
        evidence="{place}",
        help="--wheel PATH with the wheel of sglang {release} from PyPI",
    ),
    "FP4-009": Text(
        name="series-not-exportable",
        says="{problem}",
        why="{mechanism}",
        evidence="{place}",
        help="{way_out}",
    ),
    "FP4-016": Text(
        name="unpatched-sglang",
        says="the patch series is {state} in {where}",
        why="without it nothing stops a server whose plugin failed to load, and FP4 KV is not refused where its scales would be lost",
        evidence="patches/series and fp4kv patch status",
        help="fp4kv patch apply",
    ),
}
