"""Refusals: what was asked, why it cannot be had, where that is written, and what would be accepted.

One table of texts, one renderer. Ids are never reused. FP4-001 to FP4-009 are about the patch
series; launch rules start at FP4-010.
"""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Text:
    """A refusal's wording; ``{fields}`` are filled in by :func:`refusal`."""

    name: str  # the bad combination, kebab case
    says: str  # one lower-case sentence, no full stop
    why: str  # the mechanism, not the symptom
    evidence: str
    help: str


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
    "FP4-010": Text(
        name="nvfp4-without-triton",
        says="NVFP4 KV is asked for with prefill on {prefill} and decode on {decode}",
        why="only this kit's Triton backend reads packed NVFP4 in prefill, verify and decode; FlashInfer cannot decode it and trtllm_mha does not serve a drafted block",
        evidence="srt/arg_groups/kv_cache_hook.py @ sglang 0.5.23",
        help="--kv-cache-dtype nvfp4 --attention-backend triton",
    ),
    "FP4-011": Text(
        name="draft-pool-not-plain",
        says="the drafter's KV dtype cannot be {dtype} next to an NVFP4 target",
        why="the drafter commits a prefix of each block into its own pool, which is plain FP8 E4M3 or BF16; nothing reads a drafter's pool in FP4, and auto is priced differently than it is built",
        evidence="srt/speculative/dflash_worker_v2.py and srt/mem_cache/draft_kv_budget.py @ sglang 0.5.23",
        help="--speculative-draft-kv-cache-dtype fp8_e4m3",
    ),
    "FP4-012": Text(
        name="draft-without-block-size",
        says="the draft {path} does not say its block size",
        why="SGLang falls back to 16 when the config has none, and a drafter trained on another size then proposes nonsense",
        evidence="srt/arg_groups/speculative_hook.py @ sglang 0.5.23",
        help="write the block_size the draft was trained with into its config.json",
    ),
    "FP4-013": Text(
        name="draft-names-a-missing-layer",
        says="the draft wants the output of target layers {wrong}, and the target has {layers} layers",
        why="a layer's output is captured as the next layer's input, so an id must be below {limit}; any other captures nothing and the drafter gets fewer features than it was trained on",
        evidence="set_dflash_layers_to_capture in srt/models/qwen3.py @ sglang 0.5.23",
        help="use the draft that was trained for this target",
    ),
    "FP4-014": Text(
        name="head-dim-without-whole-blocks",
        says="head_dim {head_dim} is not a multiple of {block}",
        why="NVFP4 keeps one scale for each {block} elements along head_dim, and a block cannot span two heads",
        evidence="sglang_fp4kv/formats.py",
        help="--kv-cache-dtype fp8_e4m3",
    ),
    "FP4-015": Text(
        name="k-and-v-of-different-width",
        says="K is {head_dim} wide and V is {v_head_dim}",
        why="the packed pool and its readers keep K and V rows of one width",
        evidence="sglang_fp4kv/pool.py",
        help="--kv-cache-dtype fp8_e4m3",
    ),
    "FP4-016": Text(
        name="unpatched-sglang",
        says="the patch series is {state} in {where}",
        why="without it nothing stops a server whose plugin failed to load, and FP4 KV is not refused where its scales would be lost",
        evidence="patches/series and fp4kv patch status",
        help="fp4kv patch apply",
    ),
}


@dataclass(frozen=True)
class Refusal:
    id: str
    name: str
    says: str
    asked: str
    why: str
    evidence: str
    help: str

    def as_dict(self):
        return asdict(self)


class Refused(Exception):
    """Carries one or more refusals, in table order; its text is their rendering."""

    def __init__(self, *refusals):
        self.refusals = tuple(sorted(refusals, key=lambda refusal: refusal.id))
        super().__init__(render(self.refusals))


def refusal(id, *, asked, **facts):
    """The refusal ``id`` with its text filled in from ``facts``."""
    text = TEXTS[id]
    return Refusal(
        id=id,
        name=text.name,
        says=text.says.format(**facts),
        asked=asked,
        why=text.why.format(**facts),
        evidence=text.evidence.format(**facts),
        help=text.help.format(**facts),
    )


def render(refusals):
    """The refusals as text for a terminal, one block each, a blank line between blocks."""
    return "\n\n".join(
        f"refused[{r.id}] {r.name}: {r.says}\n"
        f"  asked:    {r.asked}\n"
        f"  why:      {r.why}\n"
        f"  evidence: {r.evidence}\n"
        f"\n"
        f"help: {r.help}"
        for r in refusals
    )
