"""The errors of this package, one class for each remedy."""

from a2a.utils.errors import InternalError


class ClusterSubscribeError(Exception):
    """Base class of every error this package defines."""


class SettingsError(ClusterSubscribeError, ValueError):
    """A setting has a value that is not allowed; the message names all three."""


class UnsupportedHandlerError(ClusterSubscribeError, TypeError):
    """`wrap()` cannot find the store and the event stream, or an engine cannot be read beside."""


class EventStreamEndedError(ClusterSubscribeError, InternalError):
    """The event stream stopped while the task was still running; subscribe again.

    A subclass of the SDK's `InternalError`, so that a client gets a protocol
    error and not a broken connection.
    """
