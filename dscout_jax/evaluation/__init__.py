"""Benchmarks of decoding, their statistics, tables and pictures."""
