"""Rules that an inspectorate sets in a file: each holds, is broken, or cannot be decided, and says on what evidence."""
