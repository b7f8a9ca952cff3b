"""What a run declares before its first step: admitted programs, their numbers and the rules that these follow."""
