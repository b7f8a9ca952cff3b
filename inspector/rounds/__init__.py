"""An inspection as rounds of signed messages between parties that do not trust each other, each with a deadline."""
