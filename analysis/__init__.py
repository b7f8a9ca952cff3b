"""Figures, tables, Monte Carlo, reports, benchmarks and the command line."""
