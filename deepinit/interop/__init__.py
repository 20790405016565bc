"""Other people's parameter trees: which role each leaf has, and where its fans lie."""

from deepinit.interop.tables import TABLES
from deepinit.interop.trees import Rule, Table

__all__ = ["TABLES", "Rule", "Table"]
