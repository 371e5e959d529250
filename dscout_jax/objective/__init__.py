"""Factorization one: training loss = inclusion x weighting x prediction (METHOD section 2)."""
