"""Kernels in C++ for processors, built on first use."""
