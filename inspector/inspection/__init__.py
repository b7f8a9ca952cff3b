"""One inspection: trust, agreement, provenance, replayed segments, findings, and the verdict from them."""
