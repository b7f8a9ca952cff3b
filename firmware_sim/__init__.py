"""Simulated chip firmware: evidence formats, identity, device memory, NVRAM, snapshots."""
