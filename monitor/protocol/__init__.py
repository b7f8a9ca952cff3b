"""The forms of what parties say to each other: in a dispute, in a round, to a lab at work."""
