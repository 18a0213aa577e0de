import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sglang_fp4kv import embedded
from sglang_fp4kv.embedded import hooks, ranks, recurrent
from sglang_fp4kv.embedded.environment import embedded_env, embedded_flags, embedded_reasons

ROOT = Path(__file__).parents[1]


def in_new_process(code: str, **env: str) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if k not in embedded_env()}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**kept, "SGLANG_PLUGINS": "none", **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_entry_point_names_our_callable():
    (point,) = entry_points(group="sglang.srt.platforms", name=embedded.PLATFORM_NAME)
    assert point.load() is embedded.platform_class


@pytest.mark.parametrize("selected", [None, "", "another"])
def test_inert_unless_selected(monkeypatch, selected):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if selected is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", selected)
    assert embedded.platform_class() is None


def test_launcher_side_needs_neither_torch_nor_sglang():
    done = in_new_process(
        "import sys, launcher.process, sglang_fp4kv.embedded.environment as e\n"
        "e.embedded_env(); e.embedded_flags()\n"
        "print(sorted({'torch', 'sglang', 'numpy', 'triton'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_selected_platform():
    done = in_new_process(
        "import json\n"
        "from sglang.srt.platforms import current_platform as p\n"
        "from sglang_fp4kv.embedded import interpreter_fixes\n"
        "print(json.dumps([type(p).__name__, p.is_out_of_tree(), p.device_type,"
        " p.capabilities.supports_triton, p.get_dispatch_key_name(),"
        " p.get_default_attention_backend(), p.supports_speculative_algorithm('DFLASH'),"
        " p.supports_speculative_algorithm('EAGLE3'), p.supports_speculative_algorithm('DSPARK'),"
        " p.supports_speculative_draft_attention_backend('EAGLE3', 'triton'),"
        " p.supports_speculative_draft_attention_backend('DFLASH', 'flashinfer'),"
        " interpreter_fixes.is_applied()]))",
        **embedded_env(),
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [
        *("EmbeddedPlatform", True, "cpu", True, "native", "triton"),
        *(True, True, False, True, False, True),
    ], done.stderr


def test_unselected_platform_changes_nothing():
    done = in_new_process(
        "import sys\n"
        "from sglang.srt.platforms import current_platform as p\n"
        "print(p.is_out_of_tree(), 'sglang_fp4kv.embedded.platform' in sys.modules)"
    )
    assert done.stdout.splitlines()[-1] == "False False", done.stderr


def test_hooks_are_applied_where_sglang_loads_its_plugins():
    done = in_new_process(
        "import sglang.srt.mem_cache.kv_cache_configurator as c\n"
        "from sglang.srt.plugins import load_plugins\n"
        "from sglang_fp4kv.embedded import hooks\n"
        "load_plugins(); hooks.require_active()\n"
        "import torch; print(c.is_float4_e2m1fn_x2(torch.float4_e2m1fn_x2),"
        " c.is_float4_e2m1fn_x2(torch.bfloat16))\n"
        "from sglang.srt.platforms import current_platform as p\n"
        "c.reject_out_of_tree_path(p, subsystem=hooks.BLOCK_SCALED_POOL)\n"
        "c.reject_out_of_tree_path(p, subsystem='something else')",
        **embedded_env(),
    )
    assert done.stdout.splitlines()[-1] == "True False", done.stderr
    assert "NotImplementedError" in done.stderr and "something else" in done.stderr


def test_neither_cuda_packages_nor_a_compiler_are_imported():
    done = in_new_process(
        "import sys, torch\n"
        "from sglang.srt.models import dflash\n"
        "from sglang.srt.managers import overlap_utils\n"
        "print(overlap_utils._assert_nonneg_and_invalidate(torch.tensor([3]), b := torch.ones(2), torch.tensor([1])), b.tolist(),"
        " dflash._radix_topk(torch.tensor([[1.0, 5.0, 3.0]]), 2)[1].tolist(),"
        " sorted(m for m in ('flashinfer', 'cutlass', 'torch._inductor.compile_fx') if sys.modules.get(m)))\n"
        "import flashinfer",
        **embedded_env(),
    )
    assert done.stdout.splitlines()[-1] == "None [1.0, -1.0] [[1, 2]] []", done.stderr
    assert "ModuleNotFoundError: import of flashinfer halted" in done.stderr


def test_interpreter_must_be_on_from_the_start():
    done = in_new_process(
        "from sglang.srt.platforms import current_platform",
        **{**embedded_env(), "TRITON_INTERPRET": "0"},
    )
    assert done.returncode != 0
    assert "needs TRITON_INTERPRET=1 in the environment" in done.stderr
    assert "got '0'" in done.stderr


def test_users_flags_win():
    user = ["--mem-fraction-static=0.7", "--max-total-tokens", "64", "--device", "cpu"]
    added = embedded_flags(user)
    for flag in ("--mem-fraction-static", "--max-total-tokens", "--device"):
        assert flag not in added
    assert added[:2] == ["--attention-backend", "triton"]
    assert embedded_flags(user + added) == []
    assert all(embedded_reasons()[f] for f in embedded_flags() if f.startswith("--"))


def test_sglang_knows_every_flag():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    parser.parse_args(["--model-path", "m", *embedded_flags()])


def test_seams_are_where_they_were_read():
    import pkgutil

    source = Path(find_spec("sglang").origin).parent / "srt/mem_cache/kv_cache_configurator.py"
    assert f'subsystem="{hooks.BLOCK_SCALED_POOL}"' in source.read_text()
    for target in hooks.TARGETS:
        assert callable(pkgutil.resolve_name(target)), target


def test_missing_hooks_are_named(monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", set(hooks.TARGETS[1:]))
    with pytest.raises(RuntimeError, match=rf"not active in this worker: {hooks.TARGETS[0]}$"):
        hooks.require_active()


def test_record_stream_does_nothing_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", torch.Tensor.record_stream)
    hooks.make_record_stream_harmless()
    installed = torch.Tensor.record_stream
    hooks.make_record_stream_harmless()
    assert torch.Tensor.record_stream is installed
    torch.zeros(1).record_stream(None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_rank_is_bound_to_cores(device):
    assert ranks.leave_threads_unbound(device=device) is None


def test_heads_are_copied_to_ranks_and_not_padded():
    config = object()
    assert ranks.keep_heads(config, None, 4) is config


class Ranks:
    """A stand-in for a group of two ranks, the other of which holds what this one does plus 10."""

    def _all_gather_into_tensor(self, output, input):
        output.copy_(torch.cat((input, input + 10)))


def test_all_gather_needs_no_kernel_for_the_cpu():
    output = torch.zeros(4)
    ranks.all_gather_on_cpu(None, Ranks(), output, torch.tensor([1.0, 2.0]))
    assert output.tolist() == [1, 2, 11, 12]


def test_all_gather_elsewhere_is_the_stock_one():
    seen = []
    elsewhere = torch.zeros(2, device="meta")
    ranks.all_gather_on_cpu(lambda *arguments: seen.append(arguments), "group", "output", elsewhere)
    assert seen == [("group", "output", elsewhere)]
def test_pinning_and_choosing_a_device_do_nothing_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)
    monkeypatch.delattr(torch.cpu, "device", raising=False)
    recurrent.make_pinning_harmless()
    recurrent.give_the_cpu_a_device()
    x = torch.zeros(1)
    with torch.cpu.device(x.device.index):
        assert x.pin_memory() is x


def test_tiles_keep_their_head_dim_blocks():
    assert hooks.large_tiles((64, 0, 64, 64, 64, 4), Lq=64, Lv=64) == (64, 0, 64, 128, 256, 4)


def test_plain_qk_norm_rope():
    class Layer(torch.nn.Module):
        use_table_qk_norm_rope = True

    model = torch.nn.Sequential(Layer(), torch.nn.Linear(1, 1), Layer())
    assert hooks.use_plain_qk_norm_rope(model) == 2
    assert not model[0].use_table_qk_norm_rope and hooks.use_plain_qk_norm_rope(model) == 0


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_speculative_cache_locs(batch):
    from sglang_fp4kv.embedded.platform import speculative_cache_locs

    table = torch.randperm(4 * 64).reshape(4, 64).to(torch.int32)
    rows, start = torch.tensor([2, 0, 3])[:batch], torch.tensor([5, 56, 0])[:batch]
    got = speculative_cache_locs(
        req_pool_indices=rows,
        req_to_token=table,
        start_offset=start,
        end_offset=start + 8,
        batch_size=batch,
        draft_token_num=8,
        device="cpu",
    )
    wanted = [slot for r, s in zip(rows, start, strict=True) for slot in table[r, s : s + 8]]
    assert got.dtype == torch.int64 and got.tolist() == [int(slot) for slot in wanted]
