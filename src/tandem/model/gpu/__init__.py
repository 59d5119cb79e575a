"""Triton kernels for CUDA devices, one file a family. Imported only where such a device computes,
and by tests."""
