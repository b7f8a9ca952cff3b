"""The engine for processors: compiled kernels over ranges of rows, and GEMMs, in tiles that stay in the cache."""
