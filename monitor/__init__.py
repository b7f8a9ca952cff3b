"""The prover's side: numerics, presets, recorder, transcript and lab."""
