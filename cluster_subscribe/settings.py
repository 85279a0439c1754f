"""The settings: environment variables and keyword arguments, validated when they are read.

Nothing else in the package reads the environment.
"""

import logging
import os

from collections.abc import Mapping
from difflib import get_close_matches
from enum import Enum
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from cluster_subscribe.errors import SettingsError

logger = logging.getLogger(__name__)

PREFIX: Final = 'CLUSTER_SUBSCRIBE_'
_MODE_VARIABLE: Final = 'CLUSTER_SUBSCRIBE'
# The test suite's own variables share the prefix and are not settings.
_TEST_PREFIX: Final = f'{PREFIX}TEST_'


class Mode(str, Enum):
    """What the decorator does with a `SubscribeToTask` request."""

    ON = 'on'
    """Every stream comes from the event log."""
    STALE = 'stale'
    """The SDK answers while a turn of the task runs on this replica; else as `ON`."""
    OBSERVE = 'observe'
    """The SDK answers; the decorator only reports what it would have done."""
    OFF = 'off'
    """`wrap()` gives back the handler it was given."""


class CloseOn(str, Enum):
    """Which events end a stream (contract, rule 4)."""

    INTERRUPTED = 'interrupted'
    """Terminal states, and INPUT_REQUIRED while no later turn has begun."""
    TERMINAL = 'terminal'
    """Terminal states only (A2A 3.1.6)."""


class WakeupMode(str, Enum):
    """How the event log's reader learns of new rows."""

    AUTO = 'auto'
    """What the database offers (PostgreSQL: LISTEN; SQLite: `data_version`), beside the timer."""
    POLL = 'poll'
    """The timer and what this process publishes; nothing that the database offers."""


class Evict(str, Enum):
    """What happens to an `ActiveTask` that another replica has overtaken."""

    SUPERSEDED = 'superseded'
    """It is closed once nothing runs in it and nobody reads from it."""
    OFF = 'off'
    """It stays as the SDK keeps it."""


def _tidy(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


_ALLOWED: Final = {
    'float_parsing': 'input should be a number of seconds greater than 0, without a unit',
    'int_parsing': 'input should be an integer greater than or equal to 1',
}
_MOST_ROWS: Final = 2**31 - 1
"""What a database takes as the limit of a statement."""
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseSettings):
    """Every setting of the package; frozen.

    A keyword argument outranks the environment, the environment outranks the
    default. An empty variable counts as unset.

    Raises:
        SettingsError: A value is not allowed. One line: the variable, the value
            and what is allowed.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        frozen=True,
        extra='forbid',
    )

    mode: Annotated[Mode, BeforeValidator(_tidy)] = Field(
        default=Mode.ON, validation_alias=_MODE_VARIABLE
    )
    """Variable `CLUSTER_SUBSCRIBE`."""
    close_on: Annotated[CloseOn, BeforeValidator(_tidy)] = CloseOn.INTERRUPTED
    wakeup: Annotated[WakeupMode, BeforeValidator(_tidy)] = WakeupMode.AUTO
    poll_interval: _Seconds = 0.5
    """Seconds between two reads of the stored versions by the event log's reader."""
    reconcile_interval: _Seconds = 15.0
    """Seconds within which a stream that differs from the store is corrected (rule 5)."""
    evict: Annotated[Evict, BeforeValidator(_tidy)] = Evict.SUPERSEDED
    sweep_interval: _Seconds = 60.0
    """Seconds between two sweeps for superseded `ActiveTask`s."""
    max_buffered_events: Annotated[int, Field(ge=1, le=_MOST_ROWS)] = 256
    """Events held in memory for a subscriber that reads slowly."""

    def __init__(self, **values: Any) -> None:
        keywords = dict(values)
        if 'mode' in values:
            # By populate_by_name the variable CLUSTER_SUBSCRIBE_MODE would be obeyed as well.
            values[_MODE_VARIABLE] = values.pop('mode')
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingsError(_one_line(error, keywords)) from None
        _warn_of_unknown_variables()


def _variable(field: str) -> str:
    return _MODE_VARIABLE if field in ('mode', _MODE_VARIABLE) else PREFIX + field.upper()


def _one_line(error: ValidationError, keywords: Mapping[str, object]) -> str:
    """Each problem in the words of what was set: the keyword, or the variable."""
    lines = []
    for problem in error.errors():
        field = str(problem['loc'][0]).replace(_MODE_VARIABLE, 'mode')
        name = field if field in keywords else _variable(field)
        if problem['type'] == 'extra_forbidden':
            known = ', '.join(Settings.model_fields)
            lines.append(f'{name}={problem["input"]!r} is no setting; known are {known}')
            continue
        message = f'{problem["msg"][0].lower()}{problem["msg"][1:]}'
        allowed = _ALLOWED.get(problem['type'], message)
        lines.append(f'{name}={problem["input"]!r} is not allowed: {allowed}')
    return '; '.join(lines)


def _warn_of_unknown_variables() -> None:
    known = {_variable(field) for field in Settings.model_fields}
    for name in sorted(os.environ):
        if name in known or name.startswith(_TEST_PREFIX):
            continue
        if name.startswith(PREFIX) or get_close_matches(name, known, cutoff=0.9):
            logger.warning(
                '%s is no setting of cluster-subscribe; known are %s',
                name,
                f'{_MODE_VARIABLE}, for the mode'
                if name == f'{PREFIX}MODE'
                else ', '.join(sorted(known)),
            )
