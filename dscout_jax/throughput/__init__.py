"""Factorization two: throughput = mean accepted tokens / cycle latency (METHOD section 4)."""
