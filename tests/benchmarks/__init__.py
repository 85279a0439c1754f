"""Figures, as ratios against the stock SDK in the same run."""
