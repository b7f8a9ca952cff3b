"""The verifier's side: sampling, provenance, replay, dispute, rules, detection probability."""
