"""The vectorised training step and the loop around it."""
