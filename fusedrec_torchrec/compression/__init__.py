"""Less on the wire by thresholds (DCT, KDD 2021): for rows, and for data-parallel gradients."""
