"""The command ``anybatch``."""
