"""What the acceptance figures are measured with: one module for each ``chipwitness bench``."""
