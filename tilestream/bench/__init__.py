"""Benchmarks: cases x providers x modes, a correctness gate before every number, one JSON line per measurement."""
