"""A simulated lab: its keys and chips, what its host does in honesty and in each lie, and how it answers a dispute."""
