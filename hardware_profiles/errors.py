"""The root of the error family, and the profiles' own branch.

It stands on the lowest floor so that every floor can raise it; ``autopar.errors`` draws the whole tree.
"""


class AutoparError(Exception):
    """A user's mistake or an impossible wish: the message says what was given, what is allowed, what to do."""


class ProfileError(AutoparError):
    """A cluster or chip profile that is missing, unreadable, or contradicts itself."""
