"""The embedded platform's draft trees against SGLang's own Triton kernels and against what they say."""

import random

import pytest
import torch

from sglang_fp4kv.embedded import trees

PREFIXES = [5, 0, 17]


def links_of(index, child, sibling):
    """Every node's children, in order, as the links say; the numbering beside them is checked."""
    rows, size = child.shape
    assert index.flatten().tolist() == list(range(rows * size))
    found = []
    for firsts, nexts in zip(child.tolist(), sibling.tolist(), strict=True):
        children = []
        for node in firsts:
            children.append([])
            while node != -1:
                children[-1].append(node)
                node = nexts[node]
        found.append(children)
    return found


def random_parents(seed, size):
    seeded = random.Random(seed)
    return [-1, *(seeded.randrange(node) for node in range(1, size))]


def ancestors_mask(parents):
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def empty_links(rows, size):
    links = [torch.full((rows, size), -1, dtype=torch.int64) for _ in range(3)]
    return [torch.zeros(rows * size, dtype=torch.int64), *links]


def reconstruct(function, parents):
    rows, size = len(parents), len(parents[0])
    mask = torch.stack([ancestors_mask(p) for p in parents]).flatten()
    out = empty_links(rows, size)
    function(mask, torch.tensor(PREFIXES[:rows]), *out, rows, size)
    return out


@pytest.mark.parametrize("size", [1, 2, 12])
def test_ngram_links_follow_the_mask(size):
    parents = [random_parents(seed, size) for seed in range(3)]
    positions, *links = reconstruct(trees.reconstruct_from_mask, parents)
    for row, (above, children) in enumerate(zip(parents, links_of(*links), strict=True)):
        assert children == [[n for n in range(1, size) if above[n] == node] for node in range(size)]
        depths = ancestors_mask(above).sum(-1) - 1
        assert positions.view(3, size)[row].tolist() == (depths + PREFIXES[row]).tolist()


def candidates_of(seed, topk, steps, nodes):
    """(parent list, kept candidates) as SGLang's draft steps leave them: of each step's topk * topk
    candidates topk are followed, and what is kept has its parents kept."""
    seeded = random.Random(seed)
    followed, begin = [-1, *range(topk)], topk
    for _ in range(1, steps - 1):
        followed += sorted(seeded.sample(range(begin, begin + topk * topk), topk))
        begin += topk * topk
    known = topk * len(followed)
    kept = set()
    while len(kept) < nodes - 1:
        reachable = [c for c in range(known) if c // topk == 0 or followed[c // topk] in kept]
        kept.add(seeded.choice([c for c in reachable if c not in kept]))
    return followed, sorted(kept)


def build(function, cases, topk, steps, nodes, device="cpu"):
    prefixes = torch.tensor(PREFIXES[: len(cases)], device=device)
    positions, *links = (x.to(device) for x in empty_links(len(cases), nodes))
    mask = torch.ones(int(nodes * (prefixes.sum() + nodes * len(cases))), dtype=torch.bool, device=device)
    followed, kept = (torch.tensor([case[i] for case in cases], device=device) for i in (0, 1))
    function(followed, kept, prefixes, mask, positions, *links, topk, steps, nodes, 0)
    return [x.cpu() for x in (mask, positions, *links)]


@pytest.mark.parametrize(("topk", "steps", "nodes"), [(1, 3, 4), (2, 3, 6), (4, 4, 12)])
def test_eagle_trees_show_every_node_its_own_branch(topk, steps, nodes):
    cases = [candidates_of(seed, topk, steps, nodes) for seed in range(3)]
    mask, positions, *links = build(trees.build_tree, cases, topk, steps, nodes)
    begin = 0
    for row, ((followed, kept), children) in enumerate(zip(cases, links_of(*links), strict=True)):
        parents = [-1, *(kept.index(followed[c // topk]) + 1 if c // topk else 0 for c in kept)]
        assert children == [[n for n in range(nodes) if parents[n] == node] for node in range(nodes)]
        width = PREFIXES[row] + nodes
        rows = mask[begin : begin + nodes * width].view(nodes, width)
        begin += nodes * width
        assert rows[:, : PREFIXES[row]].all()
        assert torch.equal(rows[:, PREFIXES[row] :], ancestors_mask(parents))
        depths = ancestors_mask(parents).sum(-1) - 1
        assert positions.view(3, nodes)[row].tolist() == (depths + PREFIXES[row]).tolist()
    assert begin == mask.numel()


def test_a_node_whose_parent_was_not_kept_is_refused():
    with pytest.raises(ValueError, match="draft tree 0: candidate 5 follows 1, not kept"):
        build(trees.build_tree, [([-1, 0, 1], [0, 5])], 2, 3, 3)


def test_another_mask_layout_is_refused():
    followed, kept = torch.tensor([[-1]]), torch.tensor([[0]])
    with pytest.raises(NotImplementedError, match="full tree masks only, got 1"):
        trees.build_tree(followed, kept, torch.tensor([1]), None, None, None, None, None, 1, 2, 2, 1)


def verify(function, seed, parents, depth, device="cpu"):
    rows, size = len(parents), len(parents[0])
    generator = torch.Generator().manual_seed(seed)
    candidates, target = (torch.randint(0, 3, (rows, size), generator=generator) for _ in range(2))
    _, *links = reconstruct(trees.reconstruct_from_mask, parents)
    predicts = torch.zeros(rows * size, dtype=torch.int32)
    path = torch.full((rows, depth), -1, dtype=torch.int32)
    count = torch.zeros(rows, dtype=torch.int32)
    moved = [x.to(device) for x in (predicts, path, count, candidates, *links, target)]
    function(*moved)
    return [x.cpu() for x in moved[:3]], candidates, target


@pytest.mark.parametrize("depth", [2, 12])
def test_the_walk_follows_the_targets_own_tokens(depth):
    parents = [random_parents(seed, 12) for seed in range(3)]
    longest = 0
    for seed in range(8):
        (predicts, path, count), candidates, target = verify(trees.verify_tree_greedy, seed, parents, depth)
        for row in range(3):
            nodes = [n - 12 * row for n in path[row].tolist() if n >= 0]
            assert nodes[0] == 0 and count[row] == len(nodes) - 1
            longest = max(longest, len(nodes))
            for before, node in zip(nodes, nodes[1:], strict=False):
                assert parents[row][node] == before and candidates[row, node] == target[row, before]
            assert [predicts[12 * row + n] for n in nodes] == [target[row, n] for n in nodes]
            wanted = [candidates[row, n] for n in range(12) if parents[row][n] == nodes[-1]]
            assert len(nodes) == depth or target[row, nodes[-1]] not in wanted
    assert longest == min(depth, 4) or longest > 3


@pytest.mark.interpreter
class TestAgainstSGLang:
    """SGLang's kernels of the same operations, which an XPU runs; the interpreter or a GPU runs them here."""

    @pytest.fixture
    def spec_tree(self):
        from sglang.kernels.ops.speculative import spec_tree

        return spec_tree

    @pytest.mark.parametrize(("topk", "steps", "nodes"), [(1, 3, 4), (4, 4, 12)])
    def test_build(self, spec_tree, device, topk, steps, nodes):
        cases = [candidates_of(seed, topk, steps, nodes) for seed in range(3)]
        ours = build(trees.build_tree, cases, topk, steps, nodes)
        theirs = build(spec_tree.sgl_build_tree_kernel_triton, cases, topk, steps, nodes, device)
        assert all(map(torch.equal, ours, theirs))

    def test_verify(self, spec_tree, device):
        parents = [random_parents(seed, 6) for seed in range(3)]
        for seed in range(3):
            ours, *_ = verify(trees.verify_tree_greedy, seed, parents, 6)
            theirs, *_ = verify(spec_tree.verify_tree_greedy_triton, seed, parents, 6, device)
            assert all(map(torch.equal, ours, theirs)), seed

    def test_reconstruct(self, device, monkeypatch):
        import sglang.srt.utils

        monkeypatch.setattr(sglang.srt.utils, "is_xpu", lambda: True)  # else it imports sgl_kernel
        monkeypatch.delitem(__import__("sys").modules, trees.RECONSTRUCT, raising=False)
        from sglang.kernels.ops.speculative import reconstruct_tree

        parents = [random_parents(seed, 12) for seed in range(3)]

        def theirs(mask, prefixes, *rest):
            *out, rows, size = rest
            moved = [x.to(device) for x in (mask, prefixes, *out)]
            reconstruct_tree.reconstruct_indices_from_tree_mask_triton(*moved, rows, size)
            for mine, filled in zip(out, moved[2:], strict=True):
                mine.copy_(filled)

        assert all(map(torch.equal, reconstruct(trees.reconstruct_from_mask, parents), reconstruct(theirs, parents)))
