"""The environment is validated once, and a bad value is one clear line."""

from typing import Any

import pytest

from cluster_subscribe import CloseOn, Evict, Mode, Settings, SettingsError, WakeupMode


def test_without_an_environment_the_defaults_hold() -> None:
    settings = Settings()
    assert settings.mode is Mode.ON
    assert settings.close_on is CloseOn.INTERRUPTED
    assert settings.wakeup is WakeupMode.AUTO
    assert settings.evict is Evict.SUPERSEDED
    assert (settings.poll_interval, settings.reconcile_interval) == (0.5, 15)
    assert (settings.sweep_interval, settings.max_buffered_events) == (60, 256)


@pytest.mark.parametrize(
    ('variable', 'value', 'field', 'meaning'),
    [
        ('CLUSTER_SUBSCRIBE', 'stale', 'mode', Mode.STALE),
        ('CLUSTER_SUBSCRIBE', ' Off ', 'mode', Mode.OFF),
        ('CLUSTER_SUBSCRIBE', '', 'mode', Mode.ON),
        ('CLUSTER_SUBSCRIBE_CLOSE_ON', 'terminal', 'close_on', CloseOn.TERMINAL),
        ('CLUSTER_SUBSCRIBE_WAKEUP', 'poll', 'wakeup', WakeupMode.POLL),
        ('CLUSTER_SUBSCRIBE_POLL_INTERVAL', '0.25', 'poll_interval', 0.25),
        ('CLUSTER_SUBSCRIBE_RECONCILE_INTERVAL', '3', 'reconcile_interval', 3),
        ('CLUSTER_SUBSCRIBE_EVICT', 'off', 'evict', Evict.OFF),
        ('CLUSTER_SUBSCRIBE_SWEEP_INTERVAL', '7.5', 'sweep_interval', 7.5),
        ('CLUSTER_SUBSCRIBE_MAX_BUFFERED_EVENTS', '1', 'max_buffered_events', 1),
    ],
)
def test_a_variable_sets_its_field(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, field: str, meaning: object
) -> None:
    monkeypatch.setenv(variable, value)
    assert getattr(Settings(), field) == meaning


@pytest.mark.parametrize(
    ('variable', 'value', 'allowed'),
    [
        ('CLUSTER_SUBSCRIBE', 'maybe', "'on', 'stale', 'observe' or 'off'"),
        ('CLUSTER_SUBSCRIBE_CLOSE_ON', 'never', "'interrupted' or 'terminal'"),
        ('CLUSTER_SUBSCRIBE_WAKEUP', 'carrier-pigeon', "'auto' or 'poll'"),
        ('CLUSTER_SUBSCRIBE_POLL_INTERVAL', '0', 'greater than 0'),
        ('CLUSTER_SUBSCRIBE_POLL_INTERVAL', 'nan', 'finite number'),
        ('CLUSTER_SUBSCRIBE_RECONCILE_INTERVAL', '-1', 'greater than 0'),
        ('CLUSTER_SUBSCRIBE_EVICT', 'all', "'superseded' or 'off'"),
        ('CLUSTER_SUBSCRIBE_SWEEP_INTERVAL', 'soon', 'number of seconds'),
        ('CLUSTER_SUBSCRIBE_MAX_BUFFERED_EVENTS', '0', 'greater than or equal to 1'),
        ('CLUSTER_SUBSCRIBE_MAX_BUFFERED_EVENTS', '2147483648', 'less than or equal to 2147483647'),
    ],
)
def test_a_bad_value_is_one_line_with_the_variable_the_value_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as caught:
        Settings()
    message = str(caught.value)
    assert '\n' not in message
    assert f'{variable}={value!r}' in message
    assert allowed in message


def test_an_argument_outranks_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('CLUSTER_SUBSCRIBE', 'off')
    assert Settings(mode='stale').mode is Mode.STALE


def test_a_variable_of_another_program_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MODE', 'production')
    monkeypatch.setenv('POLL_INTERVAL', '9')
    assert (Settings().mode, Settings().poll_interval) == (Mode.ON, 0.5)


def test_a_misspelt_variable_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv('CLUSTER_SUBSCRIBE_CLOSEON', 'terminal')
    Settings()
    assert 'CLUSTER_SUBSCRIBE_CLOSEON is no setting' in caplog.text


def test_the_mode_has_one_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CLUSTER_SUBSCRIBE_MODE was obeyed, and called unknown."""
    monkeypatch.setenv('CLUSTER_SUBSCRIBE_MODE', 'off')
    assert Settings().mode is Mode.ON
    assert 'CLUSTER_SUBSCRIBE_MODE is no setting' in caplog.text
    assert 'CLUSTER_SUBSCRIBE, for the mode' in caplog.text
    assert Settings(mode='observe').mode is Mode.OBSERVE


@pytest.mark.parametrize(
    ('keywords', 'told'),
    [
        ({'mod': 'on'}, "mod='on' is no setting; known are mode, close_on"),
        ({'mode': 'maybe'}, "mode='maybe' is not allowed"),
        ({'poll_interval': 0}, 'poll_interval=0 is not allowed: input should be greater than 0'),
    ],
)
def test_a_keyword_is_named_as_it_was_given(keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(**keywords)
    assert str(caught.value).startswith(told)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match='frozen'):
        Settings().mode = Mode.OFF  # type: ignore[misc]
