"""Arguments of other frameworks for the fields of a configuration, a module for each framework.

The tables have two uses: :mod:`anybatch.scaling.frameworks` translates configurations with them, and :func:`explain`
names the field that is meant when somebody types another framework's argument. To add a framework, write its table in
a module of its own and add it to :data:`FRAMEWORKS`.
"""

from anybatch.config.frameworks.rows import Code, Framework, Row
from anybatch.config.frameworks.tables import FRAMEWORKS, explain

__all__ = ["FRAMEWORKS", "Code", "Framework", "Row", "explain"]
