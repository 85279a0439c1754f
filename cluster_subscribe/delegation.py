"""How a decorator passes on all that it does not define."""

from abc import update_abstractmethods
from typing import Any, TypeVar

from a2a.server.request_handlers import RequestHandler

T = TypeVar('T')


class Delegate(RequestHandler):
    """Reads and writes through to a wrapped handler, attribute by attribute.

    What a decorator keeps for itself has a private name of two underscores. All other names, those
    of one underscore included, are the wrapped handler's: its users read and write them.
    """

    def __init__(self, wrapped: RequestHandler) -> None:
        self.__wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        if _is_own(type(self), name):
            raise AttributeError(name)
        return getattr(self.__wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_own(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.__wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__wrapped, name)


def delegates_the_rest(cls: type[T]) -> type[T]:
    """Delegates every public method of `RequestHandler` that the class does not define.

    The names are taken from the installed SDK, so that a method which a later one
    adds is delegated too, be it abstract or with a default.
    """
    for name in dir(RequestHandler):
        if not name.startswith('_') and name not in vars(cls):
            setattr(cls, name, _through(name))
    update_abstractmethods(cls)
    return cls


def _through(name: str) -> property:
    def read(self: Delegate) -> Any:
        return self.__getattr__(name)

    return property(read)


def _is_own(cls: type, name: str) -> bool:
    return name.startswith('_') and any(
        name.startswith(f'_{base.__name__}__')
        for base in cls.__mro__[: cls.__mro__.index(Delegate) + 1]
    )
