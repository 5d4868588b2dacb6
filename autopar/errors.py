"""The errors a user can meet.

AutoparError
├── ProfileError        a cluster or chip profile that is missing, unreadable or contradictory
├── DocumentError       a graph.json, plan.json or timeline.json that is cut off, edited wrongly or too new
│   └── PlanMismatch    a plan made for another model, cluster or world size
├── CaptureError        a model that cannot be captured, with module, operator and source line
├── RunFailed           a rank that failed or was ended while training, and why
├── RequestError        a request that contradicts itself: degrees, batch, options
└── NoPlanFits          nothing in the space fits the devices (exit status 3)
"""

from hardware_profiles.errors import AutoparError, ProfileError

__all__ = [
    "AutoparError",
    "CaptureError",
    "DocumentError",
    "NoPlanFits",
    "PlanMismatch",
    "ProfileError",
    "RequestError",
    "RunFailed",
]


class DocumentError(AutoparError):
    """A document that cannot be read: names the file, the field and what is allowed."""


class PlanMismatch(DocumentError):
    """A plan that was made for something else; the message names what differs."""


class CaptureError(AutoparError):
    """A model that could not be captured; the message names module, operator, source line and a way out."""


class RequestError(AutoparError):
    """A request that contradicts itself; the message holds the failing arithmetic."""


class NoPlanFits(AutoparError):
    """No plan of the space fits; says by how much, on which stage, in which term, and a verified way out."""


class RunFailed(AutoparError):
    """A rank that failed or was ended while training; the message names it and the first cause."""
