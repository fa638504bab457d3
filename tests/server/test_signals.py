"""Which sequences of signals end a draining server at once; with processes: test_launch.py."""

from __future__ import annotations

import asyncio
import signal
from unittest.mock import MagicMock

import pytest

from quire.configs.config import Config
from quire.server import launch
from quire.server.launch import Launcher

TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("signals", "ends"),
    [
        ([(TERM, 0.0), (TERM, 0.1), (TERM, 1.9)], None),
        ([(TERM, 0.0), (TERM, 2.1)], TERM),
        ([(INT, 0.0), (INT, 0.1)], INT),
        ([(TERM, 0.0), (INT, 0.1)], None),
        ([(TERM, 0.0), (INT, 0.1), (TERM, 0.2), (INT, 0.3)], INT),
        ([(INT, 0.0), (TERM, 0.1)], None),
        ([(INT, 0.0), (TERM, 3.0)], TERM),
        ([(TERM, 0.0), (INT, 3.0)], INT),
    ],
)
def test_which_signals_end_at_once(monkeypatch, signals, ends):
    launcher = Launcher.__new__(Launcher)
    launcher.engines, launcher.frontend, launcher.config = MagicMock(), MagicMock(num_in_flight=1), Config()
    launcher.spare = MagicMock()
    launcher.stop, launcher.announced = asyncio.Event(), True
    launcher._interrupted, launcher._signalled = False, 0.0
    monkeypatch.setattr(launch.os, "_exit", MagicMock(side_effect=SystemExit))
    for number, (sent, when) in enumerate(signals, start=1):
        monkeypatch.setattr(launch.time, "monotonic", lambda when=when: 100.0 + when)
        if ends is not None and number == len(signals):
            with pytest.raises(SystemExit):
                launcher.on_signal(sent)
            launch.os._exit.assert_called_once_with(128 + ends)
            launcher.spare.close.assert_called_once_with()
        else:
            launcher.on_signal(sent)
            assert launcher.stop.is_set() and not launch.os._exit.called
