"""Short programs that run as they are, each one a use of the package: ``python -m analysis.examples.NAME FOLDER``."""
