"""Triton kernels, and nothing else: importing them needs Triton, and only ``codec.gpu`` does."""
