"""Checkpoints that others trained, brought into the store as runs."""
