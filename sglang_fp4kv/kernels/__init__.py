"""Triton kernels, one operation a file, each next to its host function."""
