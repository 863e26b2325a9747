"""Checkpoints that others trained, brought into the store as runs.

`mechicl.importers.importing` has the import itself; this package imports nothing until it is asked.
"""
