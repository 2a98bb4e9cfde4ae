"""Arguments of other frameworks for the fields of a configuration, a module for each framework.

The tables have two uses: :mod:`anybatch.scaling.frameworks` translates configurations with them, and
:func:`anybatch.config.frameworks.tables.explain` names the field that is meant when somebody types another framework's
argument. To add a framework, write its table in a module of its own and add it to
:data:`anybatch.config.frameworks.tables.FRAMEWORKS`.
"""
