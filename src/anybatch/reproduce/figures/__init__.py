"""The figures and tables, a module for each."""
