"""Refereed delegation (Verde): a bisection over steps and operators between two provers, and tournaments of n."""
