"""Work for another device's own process: segments replayed, trials, drift and curves, and the pool of processes."""
