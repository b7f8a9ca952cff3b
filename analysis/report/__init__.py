"""Figures, tables and the report as a page."""
