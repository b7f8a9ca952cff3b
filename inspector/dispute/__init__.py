"""Refereed delegation (Verde): two provers, a bisection over steps and operators, and who is wrong."""
