"""A verdict that stands alone: signed, with the evidence that it rests on, checked without lab, cluster or folder."""
