"""Environments of every family, behind one interface with one autoreset convention."""
