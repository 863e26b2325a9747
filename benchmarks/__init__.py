"""Benchmarks: ours beside the usual way, in turns. `make bench` writes docs/performance.md."""
