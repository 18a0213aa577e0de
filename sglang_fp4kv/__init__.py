"""NVFP4 KV cache for SGLang's Triton backend, with a DFlash drafter beside it."""

__version__ = "0.1.0"
