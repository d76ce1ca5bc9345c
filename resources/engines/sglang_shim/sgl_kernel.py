"""What SGLang asks of its kernel package on a CPU, in plain PyTorch.

The published package holds CUDA kernels only. Without a GPU SGLang computes with PyTorch, but it imports these names
from `sgl_kernel` whatever it then does with them. A server without speculative decoding calls the first one alone; one
that is asked for it calls the second too, before it finds that no attention for drafts exists on a CPU. A single module,
not a package, as a package would need an `__init__.py`.
"""

import ctypes

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the cache slots of new tokens, request after request, into the table of slots by request and position.

    Args:
        req_pool_indices: row of each request in the table, [requests].
        req_to_token: the table, [rows, pool_len]; changed in place.
        start_offset, end_offset: positions of each request's new tokens, [requests]; the end is exclusive.
        out_cache_loc: slots of all new tokens, [sum of end - start].
    """
    done = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move keys and values of tokens to other slots, in every buffer; slots may be source and target at once.

    Args:
        data_ptrs: address of each buffer, [buffers].
        strides: bytes of a slot in each, [buffers].
        tgt_loc, src_loc: slots, [tokens].
    """
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(address + slot * size, size) for slot in src_loc.tolist()]
        for slot, row in zip(tgt_loc.tolist(), held, strict=True):
            ctypes.memmove(address + slot * size, row, size)


def _absent(name: str):
    def refuse(*args, **kwargs):
        raise NotImplementedError(
            f"sgl_kernel.{name} is not part of this CPU stand-in; turn off the server option that needs it "
            "(speculative decoding, cache compaction), or install the real package on a GPU machine"
        )

    return refuse


assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _absent("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")
