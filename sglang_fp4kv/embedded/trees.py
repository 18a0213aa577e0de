"""The draft-tree operations of speculative decoding on a CPU, in plain torch.

On an out-of-tree platform SGLang 0.5.23 has them as CUDA kernels only
(kernels/ops/speculative/{spec_tree,reconstruct_tree}.py); the second module does not even import where
sgl_kernel does not. :func:`install` puts these in their place.

A tree has N nodes, its root at 0 and every parent before its children. Sizes below: B requests.
  positions                                   [B*N]   int64   prefix length plus depth
  retrieve_index                              [B, N]  int64   B*N numbers in order
  retrieve_next_token, retrieve_next_sibling  [B, N]  int64   first child, next child of the parent; -1 = none
"""

import sys
import types

import torch

RECONSTRUCT = "sglang.kernels.ops.speculative.reconstruct_tree"
_SPEC_TREE = "sglang.kernels.ops.speculative.spec_tree"
BUILD = f"{_SPEC_TREE}.build_tree_kernel_efficient_func"
VERIFY = f"{_SPEC_TREE}.verify_tree_greedy_func"
TARGETS = (BUILD, VERIFY)
_FULL_MASK = 0  # TreeMaskMode.FULL_MASK


def install(registry, hook_type):
    """Registers the two functions, and is the module that NGRAM's worker imports the third one from."""
    module = types.ModuleType(RECONSTRUCT, __doc__)
    module.reconstruct_indices_from_tree_mask_func = reconstruct_from_mask
    sys.modules[RECONSTRUCT] = module
    registry.register(BUILD, build_tree, hook_type.REPLACE)
    registry.register(VERIFY, verify_tree_greedy, hook_type.REPLACE)


def _fill_links(parents, tree, retrieve_index, next_token, next_sibling):
    """The links of one tree from the parent of every node; a node without one (-1) is never reached."""
    count = len(parents)
    child, sibling = [-1] * count, [-1] * count
    for node in range(count - 1, 0, -1):
        if parents[node] >= 0:
            sibling[node] = child[parents[node]]
            child[parents[node]] = node
    retrieve_index[tree] = torch.arange(tree * count, (tree + 1) * count)
    next_token[tree] = torch.tensor(child)
    next_sibling[tree] = torch.tensor(sibling)


def reconstruct_from_mask(
    tree_mask,
    verified_seq_len,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    batch_size,
    draft_token_num,
):
    """Fills positions and links of NGRAM's trees from the mask of ancestors.

    Sizes: tree_mask [B*N*N] bool, row i of a tree true at i and its ancestors; verified_seq_len [B] int
    """
    mask = tree_mask.view(batch_size, draft_token_num, draft_token_num).bool()
    above = torch.tril(mask, diagonal=-1)
    positions.copy_((above.sum(-1) + verified_seq_len[:, None]).flatten())
    parents = torch.where(above, torch.arange(draft_token_num), -1).amax(-1).tolist()
    for tree, row in enumerate(parents):
        _fill_links(row, tree, retrieve_index, retrieve_next_token, retrieve_next_sibling)


def build_tree(
    parent_list,
    top_scores_index,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    spec_steps,
    num_verify_tokens,
    tree_mask_mode,
):
    """Fills mask, positions and links of EAGLE's trees from the candidates that were kept.

    Sizes: K topk, C candidates of all steps, N = num_verify_tokens
      parent_list       [B, P]    int64   entry g: the candidate that the K candidates from g*K on follow
      top_scores_index  [B, N-1]  int64   candidate of node 1, 2, ... in ascending order
      tree_mask         flat bool         N rows of prefix + N a request, one after the other
    Raises: NotImplementedError for another mask than the full one; ValueError for a node whose parent was
    not kept
    """
    if int(tree_mask_mode) != _FULL_MASK:
        raise NotImplementedError(f"the embedded platform builds full tree masks only, got {tree_mask_mode!r}")
    begin = 0
    rows = zip(parent_list.tolist(), top_scores_index.tolist(), seq_lens.tolist(), strict=True)
    for tree, (followed, kept, prefix) in enumerate(rows):
        node_of = {candidate: node for node, candidate in enumerate(kept, start=1)}
        parents = [-1]
        for candidate in kept:
            group = candidate // topk
            if group and followed[group] not in node_of:
                raise ValueError(f"draft tree {tree}: candidate {candidate} follows {followed[group]}, not kept")
            parents.append(node_of[followed[group]] if group else 0)
        visible = torch.eye(num_verify_tokens, dtype=torch.bool)
        for node in range(1, num_verify_tokens):
            visible[node] |= visible[parents[node]]
        end = begin + num_verify_tokens * (prefix + num_verify_tokens)
        tree_mask[begin:end].view(num_verify_tokens, -1)[:, prefix:] = visible
        begin = end
        depth = visible.sum(-1) - 1
        positions[tree * num_verify_tokens : (tree + 1) * num_verify_tokens] = depth + prefix
        _fill_links(parents, tree, retrieve_index, retrieve_next_token, retrieve_next_sibling)


def verify_tree_greedy(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    target_predict,
    topk=-1,
):
    """Walks each tree along the target's own tokens; fills and returns the first three.

    Sizes: S most nodes of a path, the root among them
      predicts        [B*N]   int32   out: at every node walked the target's token after it
      accept_index    [B, S]  int32   out: the nodes walked, by their number in the batch; the rest stays
      accept_token_num [B]    int32   out: nodes walked beside the root
      candidates, target_predict  [B, N] int64   each node's token, and the target's token after it
    """
    size, depth = candidates.shape[1], accept_index.shape[1]
    links = (candidates, target_predict, retrieve_next_token, retrieve_next_sibling)
    for tree, (tokens, wanted, child, sibling) in enumerate(
        zip(*(values.tolist() for values in links), strict=True)
    ):
        node, path = 0, [0]
        while len(path) < depth:
            following = child[node]
            while following != -1 and tokens[following] != wanted[node]:
                following = sibling[following]
            if following == -1:
                break
            node = following
            path.append(node)
        walked = torch.tensor(path) + tree * size
        accept_index[tree, : len(path)] = walked.to(accept_index.dtype)
        predicts[walked] = torch.tensor([wanted[n] for n in path], dtype=predicts.dtype)
        accept_token_num[tree] = len(path) - 1
    return predicts, accept_index, accept_token_num
