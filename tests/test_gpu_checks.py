"""The H200's run of the checks: which servers it starts and what each is compared with."""

from fake_server import FakeServer

from launcher.checks import runner
from launcher.flags import parse
from tests.gpu import checks


def test_every_format_drafted_and_undrafted():
    args = checks.arguments(["MODEL", "OUT", "--draft", "DRAFT"])
    flags = {key: parse(checks.server_flags(args, *key)) for key in checks.runs(args.draft)}
    assert [(f.kv_cache_dtype, f.speculative_algorithm) for f in flags.values()] == [
        (kv, algorithm) for algorithm in (None, "DFLASH") for kv in ("bf16", "fp8_e4m3", "nvfp4")
    ]
    assert {key[1]: f.chunked_prefill_size for key, f in flags.items()} == {False: -1, True: 1024}
    assert len(checks.runs(None)) == 3


def test_a_drafted_server_leaves_no_check_out(tmp_path):
    """Its undrafted twin reads in one chunk and the BF16 server is its control."""
    args = checks.arguments(["MODEL", str(tmp_path), "--draft", "DRAFT", "--depths", "300,900"])
    undrafted = {"speculative_algorithm": None, "chunked_prefill_size": -1}
    with FakeServer() as target, FakeServer(info=undrafted) as twin:
        with FakeServer(info={**undrafted, "kv_cache_dtype": "bf16"}) as control:
            urls = {("nvfp4", True): target.url, ("nvfp4", False): twin.url, checks.CONTROL: control.url}
            asked = checks.options(args, ("nvfp4", True), urls)
            verdict = runner.run(asked, tmp_path / "a")
            alone = runner.run(checks.options(args, checks.CONTROL, urls), tmp_path / "b")
    assert asked.skip == () and checks.summary(verdict)["verdict"] == "pass"
    assert alone["verdict"] == "pass" and "items" not in checks.summary(alone)["checks"]["recall"]
