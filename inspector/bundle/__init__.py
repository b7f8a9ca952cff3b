"""A self-contained verdict: signed, with the evidence that it rests on, checked without lab, cluster or folder."""
