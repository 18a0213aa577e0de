"""What the kit serves, for the server's side and the launcher's alike. Standard library only."""

BACKEND = "triton"  # SGLang's name of the attention backend that reads packed NVFP4

DRAFT_DTYPE_DEFAULT = "fp8_e4m3"  # of the drafter's own pool, where none was asked for
DRAFT_DTYPES = (DRAFT_DTYPE_DEFAULT, "bf16", "bfloat16")
