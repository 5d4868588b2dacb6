"""The three documents that workers exchange: Graph, Plan, Timeline. No torch."""

from autopar.documents.graph import Graph
from autopar.documents.plan import Plan
from autopar.documents.timeline import Timeline

__all__ = ["Graph", "Plan", "Timeline"]
