"""Configuration: a leaf package that imports neither torch nor other quire packages."""
