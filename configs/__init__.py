"""Configuration: a leaf package that imports nothing of ours and no torch."""
