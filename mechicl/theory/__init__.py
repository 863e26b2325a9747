"""Closed forms of the papers in float64 NumPy: what a trained model is held against."""
